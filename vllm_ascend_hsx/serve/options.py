"""The two JSON options that make a `vllm serve` extract."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm_ascend_hsx.config import CONNECTOR_NAME, LAYER_IDS_KEY, METHOD


def speculative_config(layer_ids: Sequence[int]) -> dict[str, Any]:
    """The value of --speculative-config; layer_ids are residual-stream ids in the order wanted in the file."""
    return {
        "method": METHOD,
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {LAYER_IDS_KEY: list(layer_ids)}},
    }


def kv_transfer_config(storage: str | os.PathLike[str] | None, **options: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config.

    Args:
        storage: the absolute path of the directory that receives the files; None for a sink that makes none.
        options: further keys of `kv_connector_extra_config`; see HsxConfig.
    """
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {**({} if storage is None else {"shared_storage_path": str(storage)}), **options},
    }
