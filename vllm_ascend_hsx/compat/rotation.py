"""The rotation of a target's residual stream (QuaRot), written by msmodelslim beside the weights.

Such a target computes X @ Q instead of X, with an orthogonal Q. The quantisation description in the
checkpoint names the file with Q. vllm-ascend reads it for drafts
(patch/worker/patch_draft_quarot.py:39 and 62 in 0.23.0). Since 0.26 it also reads a file of the
usual name if the description names none (spec_decode/llm_base_proposer.py:407 in 0.26.0rc1). 0.30
accepts targets whose description only states that they are rotated (utils.py:1853 in 0.30.0rc2).

Some checkpoints do not declare the rotation. Older scripts of msmodelslim never do, such as the
script of vllm-ascend's tutorial for Qwen3-235B (example/Qwen3-MOE with `--rot`, msmodelslim
3de0a3c). Newer scripts do unless `export_extra_info` is off. The final norm shows the rotation:
QuaRot moves the norm's weights into the head, because a norm commutes with a rotation only if the
weights are equal (set_bias_to_ones in example/common/rot_utils/rot_qwen.py, fuse_ln_linear in
msmodelslim/processor/quarot). Training leaves different weights. The norms of layers do not show
it: most recipes smooth after they rotate, and smoothing scales these norms, but not the final one
(get_norm_linear_subgraph in
msmodelslim/pytorch/llm_ptq/anti_outlier/dag_utils/torch_dag_adapter.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_hsx.checkpoint import local_checkpoint
from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23
from vllm_ascend_hsx.protocol.errors import UserError

logger = logging.getLogger(__name__)

FILES = "vllm_ascend.quantization.utils"
DESCRIPTION = "quant_model_description.json"
USUAL = "optional/quarot.safetensors"
MATRIX = "global_rotation"  # name of the tensor, and key of the file
_ORTHOGONAL = 0.01  # largest deviation of Q @ Q.T from the identity; 0.004 for Q in bfloat16
_ROWS_AT_ONCE = 512
_KEEP = "store rows unchanged with kv_connector_extra_config.rotation='keep'."
_REMEDY = f"Add the file that its description names to the checkpoint, or {_KEEP}"
_UNDECLARED = (
    "is rotated (QuaRot) but does not declare it: all weights of its final norm are "
    "equal, as after a fusion into the head"
)
_REMEDY_IF_UNDECLARED = (
    f"Put the rotation into {USUAL} (msmodelslim writes it with export_extra_info), or {_KEEP}"
)
# In checkpoints and in models of vLLM; the language model may be a part of a multimodal model.
_FINAL_NORM = re.compile(r"((model|language_model)\.)*norm\.weight")

uses(
    FILES,
    "get_model_file",
    SINCE_0_23,
    takes="model filename revision",
    why="rows are in the model's own basis",
)


def rotation_of(vllm_config: Any, wish: str) -> Path | None:
    """Return the file of a target's rotation; None if the target is not rotated.

    An undeclared rotation is found if the weights are on this machine.

    Args:
        vllm_config: vllm.config.VllmConfig.
        wish: option `rotation`. With "keep" the file may be missing.

    Raises:
        UserError: if the description cannot be read or names a missing file, or if the rotation is
            not declared.
    """
    model_config = vllm_config.model_config
    if model_config.quantization != "ascend":
        return None
    find = importlib.import_module(FILES).get_model_file
    path = find(model_config.model, DESCRIPTION, revision=model_config.revision)
    if path is None:  # vllm-ascend refuses the target, with a better remedy
        return None
    try:
        description = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            "model",
            model_config.model,
            f"has a {DESCRIPTION} that cannot be read: {error}",
            "Repair it.",
        ) from error
    name = _file_of(description)
    if name is None:
        says_so = isinstance(description, Mapping) and description.get("is_rot_used") is True
        if not says_so and find(model_config.model, USUAL, revision=model_config.revision) is None:
            if not _has_equal_weights(_final_norms_of_checkpoint(vllm_config)):
                return None
            if wish == "undo":
                raise UserError("model", model_config.model, _UNDECLARED, _REMEDY_IF_UNDECLARED)
        name = USUAL
    found: Path | None = find(model_config.model, name, revision=model_config.revision)
    if found is None and wish == "undo":
        raise UserError(
            "model",
            model_config.model,
            f"is rotated (QuaRot), but its matrix {name} is missing",
            _REMEDY,
        )
    return found or Path(model_config.model, name)


def refuse_undeclared_rotation(model_config: Any, target: torch.nn.Module) -> None:
    """Refuse a loaded target with an undeclared rotation that the checkpoint did not show.

    Reason: `rotation_of` cannot read every source of a checkpoint.

    Args:
        model_config: vllm.config.ModelConfig of the target.
        target: the model with loaded weights. Every rank has the final norm.

    Raises:
        UserError: if it is rotated.
    """
    norms = (weight for name, weight in target.named_parameters() if _FINAL_NORM.fullmatch(name))
    if model_config.quantization == "ascend" and _has_equal_weights(norms):
        raise UserError("model", model_config.model, _UNDECLARED, _REMEDY_IF_UNDECLARED)


def _has_equal_weights(norms: Iterable[torch.Tensor]) -> bool:
    """Return True if all weights of the final norm are equal, False without a final norm.

    Equal weights are 1, or 0 in a norm that multiplies by 1 + weight.
    """
    norm = next(iter(norms), None)
    return norm is not None and bool((norm.cpu() == norm.cpu()[0]).all())


def _final_norms_of_checkpoint(vllm_config: Any) -> Iterator[torch.Tensor]:
    """Yield the final norm's weight from the files on this machine, if present.

    Most checkpoints have it in one of the last files. vLLM reports files that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        checkpoint = local_checkpoint(vllm_config)
        for path in reversed(checkpoint.weights if checkpoint else ()):
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    names = filter(_FINAL_NORM.fullmatch, file.keys())
                    yield from map(file.get_tensor, names)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        logger.warning(
            "cannot read the final norm of %s, so whether it is rotated is checked "
            "after loading: %s",
            vllm_config.model_config.model,
            error,
        )


def _file_of(description: Any) -> str | None:
    for key in ("optional", "quarot", "rotation_map", MATRIX):
        description = description.get(key) if isinstance(description, Mapping) else None
    return description if isinstance(description, str) else None


def read_rotation(path: Path, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Read and check a rotation.

    Args:
        path: file of the rotation.
        hidden_size: elements of the target's rows.
        device: device for the check.

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
        raise UserError(
            "model", str(path), f"is not a rotation: {type(error).__name__}: {error}", _REMEDY
        ) from error
    if matrix.shape != (hidden_size, hidden_size):
        problem = (
            f"is a rotation of shape {tuple(matrix.shape)}, but rows have {hidden_size} elements"
        )
        raise UserError("model", str(path), problem, _REMEDY)
    deviation = _deviation(matrix.to(device))
    if not deviation <= _ORTHOGONAL:
        raise UserError(
            "model",
            str(path),
            f"is not orthogonal: Q @ Q.T deviates by {deviation:.3g} from the identity",
            _REMEDY,
        )
    return matrix


def _deviation(matrix: torch.Tensor) -> float:
    """Return the largest element of |Q @ Q.T - I|; nan if any element is nan.

    The product is computed in blocks of rows. In sleep mode, memory that is freed while a model is
    loaded stays in the pool and cannot be used (torch_npu 2.10.0.post4,
    core/npu/NPUCachingAllocator.cpp:2490).
    """
    largest = []
    for begin in range(0, len(matrix), _ROWS_AT_ONCE):
        product = matrix[begin : begin + _ROWS_AT_ONCE] @ matrix.T
        product.diagonal(begin).sub_(1)
        largest.append(product.abs_().max())
    return float(torch.stack(largest).max())
