"""The cache-only attention backend: a layer that stages rows outside the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from vllm_ascend_hsx.compat.runner import connector_hand_over, register_layer
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache


@dataclass(frozen=True)
class CacheOnlyMetadata:
    """The spans of one step that this rank extracts. `Span.row` is an index into the batch."""

    spans: Sequence[Span]


class AscendCacheOnlyMetadataBuilder(AttentionMetadataBuilder[CacheOnlyMetadata]):
    """Build the metadata of a step. Never called, because the layer is in no KV cache group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CacheOnlyMetadata:
        """Return metadata without spans, because requests are unknown here."""
        return CacheOnlyMetadata(())


class AscendCacheOnlyImpl(AttentionImpl[CacheOnlyMetadata]):
    """Compute nothing. A row has `num_heads` layers of `head_size` elements."""

    def __init__(self, num_heads: int, head_size: int, scale: float = 1.0, **_: Any) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("the cache-only backend computes no attention")


class AscendCacheOnlyAttentionBackend(AttentionBackend):
    """Backend of the drafter's only layer. vLLM uses only the metadata builder."""

    @staticmethod
    def get_name() -> str:
        return "ASCEND_CACHE_ONLY"

    @staticmethod
    def get_impl_cls() -> type[AscendCacheOnlyImpl]:
        return AscendCacheOnlyImpl

    @staticmethod
    def get_builder_cls() -> type[AscendCacheOnlyMetadataBuilder]:
        return AscendCacheOnlyMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        raise NotImplementedError(
            "the cache-only layer has no KV cache: its rows are staged outside the KV pool"
        )


class AscendCacheOnlyLayer(CacheOnlyAttentionLayer):
    """A layer whose "KV cache" is a staging slot.

    The class derives from vLLM's layer only because vllm-ascend checks for it (MR:3989, MR:5003).
    No state of the base class is used. `get_kv_cache_spec` returns None, so the layer has no memory
    in the KV pool, no KV cache group and no page size, and does not affect the graph mode.

    Args:
        staging: receives the rows.
        prefix: name of the layer, unique in the engine. Must contain `cache_only_layers`.
        vllm_config: the configuration that registers the layer.

    Raises:
        ValueError: if a layer with this name exists.
    """

    def __init__(self, staging: StagingCache, prefix: str, vllm_config: Any) -> None:
        nn.Module.__init__(self)
        self.layer_name = prefix
        self.staging = staging
        self.attn_backend = AscendCacheOnlyAttentionBackend
        self.impl = AscendCacheOnlyImpl(
            num_heads=staging.rows.shape[2], head_size=staging.rows.shape[3]
        )
        self.kv_cache = staging.rows  # the connector receives this as the "KV layer"
        register_layer(vllm_config, prefix, self)

    def forward(self, target_rows: Sequence[torch.Tensor], metadata: CacheOnlyMetadata) -> None:
        """Stage the rows of a step, and notify the connector.

        Args:
            target_rows: one [tokens, hidden] per extracted layer, in ascending layer order, in the
                model's dtype.
            metadata: the spans of this step.
        """
        self.staging.write(target_rows, metadata.spans)
        _hand_over(self.layer_name, self.kv_cache, metadata)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


_hand_over = connector_hand_over()
