"""The drafter "model": it holds the cache-only layer and has no weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vllm_ascend_hsx.attention import AscendCacheOnlyLayer, CacheOnlyMetadata
from vllm_ascend_hsx.config import CONNECTOR_NAME, HsxConfig, read_target
from vllm_ascend_hsx.staging import StagingCache


class AscendExtractHiddenStatesModel(nn.Module):
    """Stands in vLLM's model registry under `ExtractHiddenStatesModel`, so that no patch is needed to load it.

    Args:
        vllm_config: vllm.config.VllmConfig.
        prefix: as for every vLLM model.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        target = read_target(vllm_config)
        config = HsxConfig.parse(connector_options(vllm_config))
        staging = StagingCache(
            num_slots=config.staging_slots,
            max_tokens=target.max_tokens,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            dtype=vllm_config.model_config.dtype,
            device=torch.get_default_device(),
            collected=target.collected,
        )
        # vLLM reads a layer's index from its name: ours comes behind the target's.
        index = str(vllm_config.model_config.get_total_num_hidden_layers())
        name = ".".join(part for part in (prefix, "cache_only_layers", index) if part)
        self.layer = AscendCacheOnlyLayer(staging, name, vllm_config)

    def forward(self, target_rows: Sequence[torch.Tensor], metadata: CacheOnlyMetadata) -> None:
        """Catch the rows of a step; see AscendCacheOnlyLayer.forward."""
        self.layer(target_rows, metadata)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


def connector_options(vllm_config: Any) -> dict[str, Any]:
    """The options of our connector, alone or inside MultiConnector.

    Returns:
        `kv_connector_extra_config` of the entry named AscendHiddenStatesConnector; {} if there is none, which HsxConfig refuses with
        the option that is missing.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return {}
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    if transfer.kv_connector != "MultiConnector":
        return extra if transfer.kv_connector == CONNECTOR_NAME else {}
    for connector in extra.get("connectors", ()):
        if connector.get("kv_connector") == CONNECTOR_NAME:
            return dict(connector.get("kv_connector_extra_config", {}))
    return {}
