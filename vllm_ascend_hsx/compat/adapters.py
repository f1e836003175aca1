"""Adapters (LoRA): fingerprints of loaded weights, and configurations that compute wrong rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.checkpoint import Checkpoint, fingerprint
from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import V0_23, release_to_patch
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter

logger = logging.getLogger(__name__)

WORKER_MANAGER = "vllm.lora.worker_manager"
UTILS = "vllm.lora.utils"
_WHY = "files name the weights of the adapter"
# In vLLM's order of preference (lora/lora_model.py:212 in 0.23.0).
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_DESCRIPTION = "adapter_config.json"
_loaded: dict[
    int, str
] = {}  # fingerprint of each adapter that this worker has loaded, by vLLM's id

uses(UTILS, "get_adapter_absolute_path", V0_23, takes="lora_path", why=_WHY)


@patch(WORKER_MANAGER, "WorkerLoRAManager._load_adapter", V0_23, why=_WHY)
def name_weights(original: Any, self: Any, lora_request: Any) -> Any:
    """Take the fingerprint of an adapter's weights whenever they are loaded.

    Reason: an adapter may be loaded again from the same path, under the same name and id, with
    other weights (`load_inplace`, or after an eviction). vLLM does not report this to the connector
    (lora/worker_manager.py:194 and 270).
    """
    loaded = original(self, lora_request)
    _loaded[lora_request.lora_int_id] = _fingerprint(lora_request.lora_path)
    return loaded


def _fingerprint(lora_path: str) -> str:
    """Return the fingerprint of an adapter's files; empty if they cannot be read."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        place = Path(get_adapter_absolute_path(lora_path))
        weights = next((place / name for name in _WEIGHTS if (place / name).exists()), None)
        return "" if weights is None else fingerprint(Checkpoint([weights], [place / _DESCRIPTION]))
    except Exception as error:  # noqa: BLE001 - hub libraries raise anything, and the rows do not depend on it
        logger.warning(
            "cannot read the weights of adapter %s, so files will not name them: %s",
            lora_path,
            error,
        )
        return ""


def refuse_wrong_products(vllm_config: Any) -> None:
    """Refuse adapters with tensor parallelism that are not fully sharded.

    Reason: vLLM gathers the shrunk rows of merged layers even where each rank has all of them
    (lora/layers/column_parallel_linear.py:337 and 59 in 0.23.0), and vLLM's kernel uses the first
    of the copies. vllm-ascend's kernel takes the number of columns for the rank of the adapter
    (csrc/torch_binding.cpp:479) and reads past the weights: rows of every adapter would be wrong.
    vllm-ascend's kernels compute ranks of 8 and more (csrc/kernels/bgmv_expand.cpp:29).

    Args:
        vllm_config: vllm.config.VllmConfig.

    Raises:
        UserError: the configuration has such adapters.
    """
    lora, ranks = vllm_config.lora_config, vllm_config.parallel_config.tensor_parallel_size
    if lora is None or ranks == 1 or release_to_patch("vllm_ascend") not in SpecifierSet(V0_23):
        return
    problem = f"makes vllm-ascend compute wrong adapter outputs with tensor_parallel_size={ranks}"
    if not lora.fully_sharded_loras:
        raise UserError(
            "fully_sharded_loras",
            False,
            problem,
            f"Set it, and max_lora_rank to {8 * ranks} or more.",
        )
    if lora.max_lora_rank < 8 * ranks:
        raise UserError(
            "max_lora_rank", lora.max_lora_rank, problem, f"Set it to {8 * ranks} or more."
        )


def loaded_weights() -> Mapping[int, str]:
    """Return the fingerprint of each adapter that this worker has loaded, by vLLM's id."""
    return _loaded


def adapter_of(lora_request: Any) -> Adapter:
    """Return name and weights of a request's adapter.

    Args:
        lora_request: vllm.lora.request.LoRARequest, or None.
    """
    if lora_request is None:
        return NO_ADAPTER
    return Adapter(lora_request.lora_name, _loaded.get(lora_request.lora_int_id, ""))
