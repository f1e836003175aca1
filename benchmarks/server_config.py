"""A stand-in for VllmConfig as vLLM's planner reads it; the real one needs a server's model.

Checked against vllm 0.23.0 and vllm-ascend 0.23.0. It has the fields of VllmConfig that are read
on the way to a KV cache. Imports are deferred because vLLM takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from benchmarks.model_shape import ModelShape
from vllm_ascend_hsx.config import METHOD

MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
MAMBA_CONFIG = "vllm_ascend.patch.platform.patch_mamba_config"


class Layout(Enum):
    """Where hidden states are: nowhere, in our slots, in the KV pool (vLLM's example connector)."""

    PLAIN = "no extraction"
    HSX = "hsx"
    UPSTREAM = "upstream"


@dataclass(frozen=True)
class EngineOptions:
    """What of a server's options the KV cache depends on."""

    tensor_parallel: int = 4
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048


class UnknownFieldError(AttributeError):
    """This version of vLLM reads a field of its configuration that the stand-in lacks."""


class _Fields(SimpleNamespace):
    """A part of VllmConfig. What it lacks must not pass for a configuration that vLLM refuses."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownFieldError(
            f"vLLM reads {name!r}, which this lacks; it was checked against vllm 0.23.0 and vllm-ascend 0.23.0: install these"
        )


def server_config(shape: ModelShape, options: EngineOptions, layout: Layout) -> Any:
    """Build the fields of VllmConfig that the planner reads, as a server has them after its start.

    * `speculative_config`: none without extraction. Upstream has one draft token, hence one more
      Mamba state per request; our plugin sets it to 0 (compat.drafts.schedule_no_drafts).
    * Upstream has no chunked prefill (vllm/config/vllm.py:764), so a step takes a whole request.
    * Prefix caching is vLLM's default: off for hybrid models (vllm/config/model.py:1852,
      is_prefix_caching_supported).
    * `block_size`: vllm-ascend's refresh_block_size (utils.py:1369) makes it 128; that of a hybrid
      model follows from its state.
    """
    torch = importlib.import_module("torch")
    upstream, batched = layout is Layout.UPSTREAM, options.max_num_batched_tokens
    drafts = {Layout.PLAIN: None, Layout.HSX: 0, Layout.UPSTREAM: 1}[layout]
    config = _Fields(
        cache_config=_Fields(
            block_size=None,
            cache_dtype="auto",
            enable_prefix_caching=not shape.is_hybrid,
            mamba_block_size=None,
            mamba_cache_dtype="auto",
            mamba_cache_mode="none",
            mamba_page_size_padded=None,
            mamba_ssm_cache_dtype="auto",
            num_gpu_blocks_override=None,
        ),
        model_config=_Fields(
            architecture=shape.architecture,
            dtype=getattr(torch, shape.dtype),
            get_head_size=lambda: shape.head_dim,
            get_num_kv_heads=lambda parallel: max(1, shape.num_kv_heads // parallel.tensor_parallel_size),  # vllm/config/model.py:1284
            hf_config=_Fields(model_type=shape.model_type),
            hf_text_config=_Fields(**shape.config),
            is_hybrid=shape.is_hybrid,
            max_model_len=options.max_model_len,
            original_max_model_len=options.max_model_len,
            supports_mamba_prefix_caching=False,  # no class with GatedDeltaNet has SupportsMambaPrefixCaching
            use_mla=shape.is_latent,
        ),
        parallel_config=_Fields(
            tensor_parallel_size=options.tensor_parallel, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=_Fields(
            disable_hybrid_kv_cache_manager=False,
            enable_chunked_prefill=not upstream,
            max_num_batched_tokens=max(batched, options.max_model_len) if upstream else batched,
        ),
        speculative_config=None
        if drafts is None
        else _Fields(method=METHOD, num_speculative_tokens=drafts, use_eagle=lambda: False),
        kv_transfer_config=None,  # read for AscendStoreConnector alone
        max_concurrent_batches=2,  # asynchronous scheduling, vLLM's default, with extraction too
    )
    if shape.is_hybrid:
        _align(shape, config)
    else:
        importlib.import_module("vllm_ascend.utils").refresh_block_size(config)
    return config


def _align(shape: ModelShape, config: Any) -> None:
    """Let vllm-ascend choose block size and page of a hybrid model.

    Reason: its patch_mamba_config.verify_and_update_config replaces vLLM's
    HybridAttentionMambaModelConfig. It looks up the model's class in vLLM's registry, which would
    import the model, and asks it for the state's shapes; here they are passed in instead. Before
    it, vLLM takes the recurrent state's dtype from config.json for some classes
    (models/config.py:536, in MODELS_CONFIG_MAP).
    """
    per_class = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP.get(shape.architecture)
    if per_class is not None:
        per_class.verify_and_update_config(config)
    shapes, dtypes = delta_net_state(shape, config)
    model_class = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes, get_mamba_state_dtype_from_config=lambda _: dtypes
    )
    module: Any = importlib.import_module(MAMBA_CONFIG)
    registry = module.ModelRegistry
    module.ModelRegistry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (model_class, shape.architecture))
    try:
        module.verify_and_update_config.__func__(None, config)
    finally:
        module.ModelRegistry = registry


def delta_net_state(shape: ModelShape, config: Any) -> tuple[Any, Any]:
    """Shapes and dtypes of GatedDeltaNet's convolution and recurrent state on one NPU.

    Reason: vllm/model_executor/models/qwen3_5.py:678-708 and qwen3_next.py ask the same
    calculators, and so does the layer (vllm_ascend/ops/gdn.py:45).
    """
    utils = importlib.import_module(MAMBA_UTILS)
    net = shape.delta_net
    assert net is not None
    shapes = utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
        config.parallel_config.tensor_parallel_size,
        net.num_key_heads,
        net.num_value_heads,
        net.key_head_dim,
        net.value_head_dim,
        net.conv_kernel,
        num_drafts(config),
    )
    dtypes = utils.MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        config.model_config.dtype, config.cache_config.mamba_cache_dtype, config.cache_config.mamba_ssm_cache_dtype
    )
    return shapes, dtypes


def num_drafts(config: Any) -> int:
    """Draft tokens of a step."""
    return config.speculative_config.num_speculative_tokens if config.speculative_config else 0
