"""The drafter's model: the cache-only layer, without weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vllm_ascend_hsx.compat.rotation import read_rotation
from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer, CacheOnlyMetadata
from vllm_ascend_hsx.drafter.shapes import slot_rows
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.settings import read_settings


class AscendExtractHiddenStatesModel(nn.Module):
    """Replace `ExtractHiddenStatesModel` in vLLM's model registry, without a patch.

    Args:
        vllm_config: vllm.config.VllmConfig.
        prefix: as for every vLLM model.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        settings = read_settings(vllm_config)
        target = settings.target
        device = torch.get_default_device()
        staging = StagingCache(
            num_slots=settings.config.staging_slots,
            slot_rows=slot_rows(target.max_tokens, target.tensor_parallel),
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            dtype=settings.dtype,
            device=device,
            layer_order=target.layer_order,
            rotation=None
            if settings.rotation is None
            else read_rotation(settings.rotation, target.hidden_size, device),
        )
        # vLLM reads the index of a layer from the name. The target's layers have lower indexes.
        index = str(vllm_config.model_config.get_total_num_hidden_layers())
        name = ".".join(part for part in (prefix, "cache_only_layers", index) if part)
        self.layer = AscendCacheOnlyLayer(staging, name, vllm_config)

    def forward(self, target_rows: Sequence[torch.Tensor], metadata: CacheOnlyMetadata) -> None:
        """Stage the rows of a step; see AscendCacheOnlyLayer.forward."""
        self.layer(target_rows, metadata)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()
