"""vLLM's planner counts a hidden-state layer as KV cache; ours is not in it (defects 15, 18)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from releases import installed_is
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer
from vllm_ascend_hsx.drafter.staging import StagingCache

LAYER = "cache_only_layers.4"
BLOCK, HEAD = 128, 32


def layout() -> Any:
    """Return the memory layout that vLLM's connector requires since 0.30."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBNHC


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    speculative_config=None,
    kv_transfer_config=SimpleNamespace(),
    parallel_config=SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1
    ),
    cache_config=SimpleNamespace(
        block_size=BLOCK,
        enable_prefix_caching=True,
        hash_block_size=None,
        prefix_match_unit=None,
        get_resolved_kv_cache_layout=layout,
    ),
)


def target() -> dict[str, KVCacheSpec]:
    """A target with full and sliding-window attention: pages of 16 KiB."""
    attention: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": HEAD,
        "dtype": torch.bfloat16,
    }
    return {
        "full": FullAttentionSpec(**attention),
        "window": SlidingWindowSpec(**attention, sliding_window=64),
    }


def upstream(num_layers: int, hidden_size: int) -> dict[str, KVCacheSpec]:
    """With the layer of vLLM's drafter (models/extract_hidden_states.py:325)."""
    return target() | {
        LAYER: HiddenStateCacheSpec(
            block_size=BLOCK, num_kv_heads=num_layers, head_size=hidden_size, dtype=torch.bfloat16
        )
    }


def ours(num_layers: int, hidden_size: int) -> dict[str, KVCacheSpec]:
    staging = StagingCache(
        num_slots=1,
        slot_rows=4,
        num_layers=num_layers,
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
        device=torch.device("npu:0"),
        layer_order=range(num_layers),
    )
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    spec = AscendCacheOnlyLayer(staging, LAYER, config).get_kv_cache_spec(config)
    return target() if spec is None else target() | {LAYER: spec}


def block_sizes(specs: dict[str, KVCacheSpec]) -> tuple[int, int]:
    """Return tokens that the scheduler aligns to, and tokens per hash of the prefix cache."""
    groups = get_kv_cache_groups(CONFIG, specs)
    sizes: tuple[int, int] = resolve_kv_cache_block_sizes(
        SimpleNamespace(kv_cache_groups=groups), CONFIG
    )
    return sizes


def test_defect_15_a_row_may_be_larger_than_a_page_of_the_kv_cache() -> None:
    larger = upstream(5, 2048)
    if installed_is(">=0.30"):  # the pages of attention grow
        pages = {
            group.kv_cache_spec.page_size_bytes for group in get_kv_cache_groups(CONFIG, larger)
        }
        assert len(pages) == 1 and pages.pop() >= 5 * 2048 * 2
    else:
        with pytest.raises(AssertionError):
            [group.kv_cache_spec.page_size_bytes for group in get_kv_cache_groups(CONFIG, larger)]
    assert block_sizes(ours(5, 2048)) == block_sizes(target())


def test_defect_18_prefix_cache_blocks_have_the_size_without_extraction() -> None:
    aligned, hashed = block_sizes(upstream(3, 42))  # 65 rows of 252 bytes in a page
    assert (aligned, hashed) == ((BLOCK, BLOCK // 2) if installed_is(">=0.30") else (65 * BLOCK, 1))
    assert block_sizes(ours(3, 42)) == block_sizes(target()) == (BLOCK, BLOCK)
