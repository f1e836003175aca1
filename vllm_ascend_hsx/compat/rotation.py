"""The rotation of a target's residual stream (QuaRot), as msmodelslim leaves it beside the weights.

Such a target computes X @ Q instead of X, with an orthogonal Q. Its checkpoint has a description of
its quantisation, which names the file with Q. vllm-ascend reads it for drafts
(patch/worker/patch_draft_quarot.py:39 and 62 in 0.23.0); from 0.26 on also where the file has its
usual name and none is given (spec_decode/llm_base_proposer.py:407 in 0.26.0rc1). 0.30 knows targets
that only say that they are rotated (utils.py:1853 in 0.30.0rc2).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23
from vllm_ascend_hsx.protocol.errors import UserError

FILES = "vllm_ascend.quantization.utils"
DESCRIPTION = "quant_model_description.json"
USUAL = "optional/quarot.safetensors"
MATRIX = "global_rotation"  # name of the tensor, and key of its file
_ORTHOGONAL = 0.01  # largest deviation of Q @ Q.T from the identity; that of a Q in bfloat16 is 0.004
_ROWS_AT_ONCE = 512
_REMEDY = (
    "Complete the checkpoint with the file that its description names, or store rows as they are with "
    "kv_connector_extra_config.rotation='keep'."
)

uses(FILES, "get_model_file", SINCE_0_23, takes="model filename revision", why="rows are in the model's own basis")


def rotation_of(model_config: Any, wish: str) -> Path | None:
    """Return the file of a target's rotation; None if the target is not rotated.

    Args:
        model_config: vllm.config.ModelConfig of the target.
        wish: option `rotation`. With "keep" the file need not be there.

    Raises:
        UserError: if the description cannot be read, or names a file that is not there.
    """
    if model_config.quantization != "ascend":
        return None
    find = importlib.import_module(FILES).get_model_file
    path = find(model_config.model, DESCRIPTION, revision=model_config.revision)
    if path is None:  # vllm-ascend refuses it, with a better remedy
        return None
    try:
        description = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("model", model_config.model, f"has a {DESCRIPTION} that cannot be read: {error}", "Repair it.") from error
    name = _file_of(description)
    if name is None:
        says_so = isinstance(description, Mapping) and description.get("is_rot_used") is True
        if not says_so and find(model_config.model, USUAL, revision=model_config.revision) is None:
            return None
        name = USUAL
    found: Path | None = find(model_config.model, name, revision=model_config.revision)
    if found is None and wish == "undo":
        raise UserError("model", model_config.model, f"is rotated (QuaRot), and its matrix {name} is not there", _REMEDY)
    return found or Path(model_config.model, name)


def _file_of(description: Any) -> str | None:
    for key in ("optional", "quarot", "rotation_map", MATRIX):
        description = description.get(key) if isinstance(description, Mapping) else None
    return description if isinstance(description, str) else None


def read_rotation(path: Path, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Read and check a rotation.

    Args:
        path: its file.
        hidden_size: elements of the target's rows.
        device: where to check it.

    Returns:
        float32 [hidden, hidden] on the host, orthogonal.

    Raises:
        UserError: if it cannot be read, or is not an orthogonal matrix of this size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        matrix = load_file(path)[MATRIX].to(torch.float32)
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError("model", str(path), f"is not a rotation: {type(error).__name__}: {error}", _REMEDY) from error
    if matrix.shape != (hidden_size, hidden_size):
        problem = f"is a rotation of {tuple(matrix.shape)}, and rows have {hidden_size} elements"
        raise UserError("model", str(path), problem, _REMEDY)
    deviation = _deviation(matrix.to(device))
    if not deviation <= _ORTHOGONAL:
        raise UserError("model", str(path), f"is not orthogonal: Q @ Q.T deviates by {deviation:.3g} from the identity", _REMEDY)
    return matrix


def _deviation(matrix: torch.Tensor) -> float:
    """Return the largest element of |Q @ Q.T - I|; nan if there is one.

    In blocks of rows, since in sleep mode what is freed while a model is loaded is free for nobody:
    torch_npu 2.10.0.post4 keeps it in the pool (core/npu/NPUCachingAllocator.cpp:2490).
    """
    largest = []
    for begin in range(0, len(matrix), _ROWS_AT_ONCE):
        product = matrix[begin : begin + _ROWS_AT_ONCE] @ matrix.T
        product.diagonal(begin).sub_(1)
        largest.append(product.abs_().max())
    return float(torch.stack(largest).max())
