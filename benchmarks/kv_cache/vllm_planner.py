"""The KV cache that vLLM's planner, patched by vllm-ascend, gives a server, without starting it.

Checked against vllm-ascend 0.23.0, 0.26.0rc1 and 0.30.0rc2, each with the matching vllm. A server
builds a VllmConfig and the model, asks each layer for a KVCacheSpec, and passes the specs to vLLM's
planner. Here the specs are built as the layers build them, from a stand-in (server_config.py). KCU
below is vllm/v1/core/kv_cache_utils.py, MR vllm_ascend/worker/model_runner_v1.py; line numbers
refer to 0.23 unless another release is named. Imports are deferred because vLLM takes seconds.
"""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from typing import Any

from benchmarks.kv_cache.model_shape import LayerKind, ModelShape
from benchmarks.kv_cache.server_config import (
    EngineOptions,
    Layout,
    UnknownFieldError,
    delta_net_state,
    num_drafts,
    server_config,
)

PLANNER = "vllm.v1.core.kv_cache_utils"
SPECS = "vllm.v1.kv_cache_interface"
ASCEND_SPECS = "vllm_ascend.core.kv_cache_interface"
# The drafter's layer (vllm/model_executor/models/extract_hidden_states.py:361, :364 in 0.30).
CACHE_ONLY = "model.cache_only_layers.{}"


@dataclass(frozen=True)
class Capacity:
    """The KV cache that vLLM plans for an amount of memory.

    Attributes:
        block_size: tokens per block of the attention layers.
        num_blocks: blocks; vLLM calls it num_gpu_blocks.
        block_bytes: bytes of a block per NPU, in the layers of the largest group.
        groups: layers and tokens per block of each KV cache group.
        tokens: capacity in tokens for requests of max_model_len tokens; the server logs it as "GPU
            KV cache size".
    """

    block_size: int
    num_blocks: int
    block_bytes: int
    groups: tuple[tuple[int, int], ...]
    tokens: int


class LayoutError(Exception):
    """vLLM's planner refuses the configuration: a server would not start. The message says why."""


def load() -> None:
    """Import vLLM with vllm-ascend's patches applied, as on an Ascend server.

    Reason: vllm-ascend replaces a part of the planner (patch/platform/patch_kv_cache_utils.py) and
    the alignment of hybrid models (patch_mamba_config.py) when the general plugins are loaded.
    """
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)


def plan_layout(
    shape: ModelShape, options: EngineOptions, layout: Layout, num_extracted: int, kv_bytes: int
) -> Capacity:
    """Return the KV cache that vLLM's planner gives an NPU.

    Reason: KCU:1956 (get_kv_cache_configs) groups layers, unifies their pages, checks that a
    request fits and counts the blocks. KCU:899 (get_max_concurrency_for_kv_cache_config) times
    max_model_len is the size that the server logs (KCU:1720). In 0.30: KCU:2617, :1067 and :2373.

    Args:
        shape: the target.
        options: options of the server.
        layout: location of the hidden states.
        num_extracted: number of extracted layers.
        kv_bytes: memory of an NPU for the KV cache.

    Raises:
        LayoutError: such a server does not start.
        UnknownFieldError: another version of vLLM is installed.
    """
    planner = importlib.import_module(PLANNER)
    try:
        config = server_config(shape, options, layout)
        specs = _specs(shape, config, layout, num_extracted)
        cache = planner.get_kv_cache_configs(config, [specs], [kv_bytes])[0]
        concurrency = planner.get_max_concurrency_for_kv_cache_config(config, cache)
    except UnknownFieldError:
        raise
    except Exception as error:  # any error would also end the server
        raise LayoutError(_reason(error)) from error
    return Capacity(
        block_size=config.cache_config.block_size,
        num_blocks=cache.num_blocks,
        block_bytes=max(map(_group_bytes, cache.kv_cache_groups)),
        groups=tuple(
            (len(group.layer_names), group.kv_cache_spec.block_size)
            for group in cache.kv_cache_groups
        ),
        tokens=int(concurrency * options.max_model_len),
    )


def _specs(shape: ModelShape, config: Any, layout: Layout, num_extracted: int) -> dict[str, Any]:
    """Return KVCacheSpecs of all layers in MR:4907's order: attention, the drafter's layer, Mamba.

    Attention pages smaller than Mamba pages are padded (MR:5021). Upstream's drafter layer has a
    HiddenStateCacheSpec (MR:5003); ours has none. In 0.30: MR:6144, :6343 and :6308.
    """
    specs: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for index, kind in enumerate(shape.layers):
        name = f"model.layers.{index}"
        if kind is LayerKind.LINEAR:
            states[name] = _state_spec(shape, config)
        else:
            specs[name] = _attention_spec(shape, kind, config)
    if layout is Layout.UPSTREAM:
        interface = importlib.import_module(SPECS)
        # vllm/model_executor/models/extract_hidden_states.py:285 (:316 in 0.30): a head per
        # extracted layer.
        specs[CACHE_ONLY.format(len(shape.layers))] = interface.HiddenStateCacheSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=num_extracted,
            head_size=shape.hidden_size,
            dtype=config.model_config.dtype,
        )
    page = max((spec.page_size_bytes for spec in states.values()), default=0)
    for spec in specs.values():
        if spec.page_size_bytes < page:
            object.__setattr__(spec, "page_size_padded", page)
    return specs | states


def _attention_spec(shape: ModelShape, kind: LayerKind, config: Any) -> Any:
    """As vllm/model_executor/layers/attention/attention.py:566; latent attention as MR:4991.

    In 0.30: attention.py:663 and MR:6258.
    """
    sizes: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": config.model_config.get_num_kv_heads(config.parallel_config),
        "head_size": shape.head_dim,
        "dtype": config.model_config.dtype,
    }
    if kind is LayerKind.LATENT:
        return importlib.import_module(ASCEND_SPECS).AscendMLAAttentionSpec(**sizes)
    return importlib.import_module(SPECS).FullAttentionSpec(**sizes)


def _state_spec(shape: ModelShape, config: Any) -> Any:
    """As vllm/model_executor/layers/mamba/abstract.py (MambaBase.get_kv_cache_spec) makes it."""
    shapes, dtypes = delta_net_state(shape, config)
    cache = config.cache_config
    return importlib.import_module(SPECS).MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=num_drafts(config),
    )


def _group_bytes(group: Any) -> int:
    """Return the bytes of a block in the layers of a group; groups use the same memory in turn.

    Reason: a spec for several kinds of layers has the sum of their pages; any other spec is per
    layer.
    """
    spec = group.kv_cache_spec
    alike = not isinstance(spec, importlib.import_module(SPECS).UniformTypeKVCacheSpecs)
    return int(spec.page_size_bytes * (len(group.layer_names) if alike else 1))


def _reason(error: Exception) -> str:
    """Return the last line of a server's log. An assertion without a message gets the location."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (
        str(error).split("\n")[0].split(". ")[0].strip()
        or f"in {where.name} ({where.filename.rsplit('site-packages/', 1)[-1]})"
    )
    return f"{type(error).__name__}: {text}"
