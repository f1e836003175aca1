"""The two JSON options of `vllm serve` that enable extraction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm_ascend_hsx.config import CONNECTOR_NAME, LAYER_IDS_KEY, METHOD


def speculative_config(layer_ids: Sequence[int]) -> dict[str, Any]:
    """Return the value of --speculative-config.

    Args:
        layer_ids: ids of residual streams, in the order of the files.
    """
    return {
        "method": METHOD,
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {LAYER_IDS_KEY: list(layer_ids)}},
    }


def kv_transfer_config(storage: str | os.PathLike[str] | None, **options: Any) -> dict[str, Any]:
    """Return the value of --kv-transfer-config.

    Args:
        storage: absolute path of the storage directory; None for a sink without files.
        options: further keys of `kv_connector_extra_config`; see HsxConfig.
    """
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            **({} if storage is None else {"shared_storage_path": str(storage)}),
            **options,
        },
    }
