"""A stand-in for VllmConfig as vLLM's planner reads it; the real class needs a server's model.

Checked against vllm-ascend 0.23.0, 0.26.0rc1 and 0.30.0rc2, each with the matching vllm. It has all
fields of VllmConfig that any of these releases reads to plan a KV cache. Where the releases differ,
vLLM is asked instead. Imports are deferred because vLLM takes seconds.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.kv_cache.model_shape import ModelShape
from vllm_ascend_hsx.config import METHOD

MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
MAMBA_CONFIG = "vllm_ascend.patch.platform.patch_mamba_config"
CHECKED = "vllm-ascend 0.23.0, 0.26.0rc1 and 0.30.0rc2"


class Layout(Enum):
    """Location of hidden states: nowhere, our slots, or the KV pool (vLLM's example connector)."""

    PLAIN = "no extraction"
    HSX = "hsx"
    UPSTREAM = "upstream"


@dataclass(frozen=True)
class EngineOptions:
    """Options of a server that affect the KV cache."""

    tensor_parallel: int = 4
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048


class UnknownFieldError(AttributeError):
    """This version of vLLM reads a configuration field that the stand-in lacks."""


class _Fields(SimpleNamespace):
    """A part of VllmConfig. A missing field must not look like a configuration error."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownFieldError(
            f"vLLM reads {name!r}, which the stand-in lacks; it was checked against "
            f"{CHECKED}: install one of these"
        )


def server_config(shape: ModelShape, options: EngineOptions, layout: Layout) -> Any:
    """Build the fields of VllmConfig that the planner reads, as after a server's start.

    * `speculative_config`: none without extraction. Upstream has one draft token, and so one more
      Mamba state per request; our plugin sets it to 0 (compat.drafts.schedule_no_drafts).
    * Prefix caching has vLLM's default. So has chunked prefill if upstream's connector accepts it.
      Otherwise a step takes a whole request.
    * The KV cache has the memory layout that vLLM 0.30 resolves: upstream's connector requires
      LBNHC (example_hidden_states_connector.py:610). vLLM chooses the same where, as on Ascend, no
      attention backend requires another (vllm/v1/attention/backends/utils.py:189).
    * `block_size`: vllm-ascend's refresh_block_size (utils.py:1369 in 0.23, :1405 in 0.30) makes it
      128; that of a hybrid model follows from the state size.
    """
    torch = importlib.import_module("torch")
    upstream, batched = layout is Layout.UPSTREAM, options.max_num_batched_tokens
    drafts = {Layout.PLAIN: None, Layout.HSX: 0, Layout.UPSTREAM: 1}[layout]
    chunks = not upstream or _upstream_takes_chunks()
    config = _Fields(
        attention_config=_Fields(hisparse_config=None),
        cache_config=_Fields(
            block_size=None,
            cache_dtype="auto",
            enable_prefix_caching=_caches_prefixes(shape),
            get_resolved_kv_cache_layout=lambda: (
                importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
            ),
            kv_cache_dtype_skip_layers=[],
            mamba_block_size=None,
            mamba_cache_dtype="auto",
            mamba_cache_mode="none",
            mamba_page_size_padded=None,
            mamba_ssm_cache_dtype="auto",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            user_specified_block_size=False,
            user_specified_mamba_block_size=False,
        ),
        compilation_config=_Fields(static_forward_context={}),
        model_config=_Fields(
            architecture=shape.architecture,
            dtype=getattr(torch, shape.dtype),
            get_head_size=lambda: shape.head_dim,
            get_num_kv_heads=lambda parallel: max(
                1, shape.num_kv_heads // parallel.tensor_parallel_size
            ),  # vllm/config/model.py:1284
            hf_config=_Fields(model_type=shape.model_type),
            hf_text_config=_Fields(**shape.config),
            is_hybrid=shape.is_hybrid,
            max_model_len=options.max_model_len,
            original_max_model_len=options.max_model_len,
            supports_mamba_prefix_caching=False,  # no class with GatedDeltaNet has SupportsMambaPrefixCaching
            use_mla=shape.is_latent,
        ),
        parallel_config=_Fields(
            tensor_parallel_size=options.tensor_parallel,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=_Fields(
            disable_hybrid_kv_cache_manager=False,
            enable_chunked_prefill=chunks,
            max_num_batched_tokens=batched if chunks else max(batched, options.max_model_len),
        ),
        speculative_config=None
        if drafts is None
        else _Fields(
            draft_model_config=None,
            method=METHOD,
            num_speculative_tokens=drafts,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
            use_multi_module_mtp=lambda: False,
        ),
        kv_transfer_config=None,  # read only for AscendStoreConnector
        max_concurrent_batches=2,  # asynchronous scheduling, vLLM's default, with extraction too
    )
    if shape.is_hybrid:
        _align(shape, config)
    else:
        importlib.import_module("vllm_ascend.utils").refresh_block_size(config)
    return config


def _caches_prefixes(shape: ModelShape) -> bool:
    """Return vLLM's default: with a hybrid model False before 0.30.

    Reason: vllm/engine/arg_utils.py:2374 in 0.23, :2520 in 0.26 and :2798 in 0.30.
    """
    model = SimpleNamespace(
        attn_type="hybrid" if shape.is_hybrid else "decoder",
        is_chunked_prefill_supported=True,
        is_hybrid=shape.is_hybrid,
        pooler_config=None,
    )
    model.is_prefix_caching_supported = importlib.import_module(
        "vllm.config"
    ).ModelConfig.is_prefix_caching_supported.fget(model)
    arguments = SimpleNamespace(enable_chunked_prefill=None, enable_prefix_caching=None)
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    engine_args._set_default_chunked_prefill_and_prefix_caching_args(arguments, model)
    return bool(arguments.enable_prefix_caching)


def _upstream_takes_chunks() -> bool:
    """Return True if a server with upstream's connector may use chunked prefill.

    Reason: 0.23 refuses to start (vllm/config/vllm.py:764); 0.26 and 0.30 do not.
    """
    asked = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=None),
        kv_transfer_config=SimpleNamespace(kv_connector="ExampleHiddenStatesConnector"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )
    try:
        importlib.import_module("vllm.config").VllmConfig._post_init_kv_transfer_config(asked)
    except ValueError:
        return False
    return True


def _align(shape: ModelShape, config: Any) -> None:
    """Let vLLM and vllm-ascend choose block size and page size of a hybrid model.

    Reason: vllm-ascend's patch_mamba_config.verify_and_update_config replaces vLLM's
    HybridAttentionMambaModelConfig. Since 0.30 it leaves the sizes to the platform, called by a
    worker with its layers (vllm/v1/executor/uniproc_executor.py:75,
    vllm/platforms/interface.py:609). Both import the model's class through vLLM's registry for the
    state's shapes; here the shapes are passed in instead. Before that, vLLM takes the recurrent
    state's dtype from config.json for some classes (models/config.py:536 in 0.23, in
    MODELS_CONFIG_MAP).
    """
    models = importlib.import_module("vllm.model_executor.models")
    per_class = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP.get(
        shape.architecture
    )
    if per_class is not None:
        per_class.verify_and_update_config(config)
    shapes, dtypes = delta_net_state(shape, config)
    model_class = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes,
        get_mamba_state_dtype_from_config=lambda _: dtypes,
    )
    config.compilation_config.static_forward_context["attention"] = _attention_layer()
    with mock.patch.object(
        models.ModelRegistry, "resolve_model_cls", return_value=(model_class, shape.architecture)
    ):
        importlib.import_module(MAMBA_CONFIG).verify_and_update_config.__func__(None, config)
        importlib.import_module("vllm.platforms").current_platform.update_block_size_for_backend(
            config
        )


def _attention_layer() -> Any:
    """Return a layer with only a backend; the platform reads nothing else, and only in 0.30."""
    base: Any = importlib.import_module(
        "vllm.model_executor.layers.attention_layer_base"
    ).AttentionLayerBase

    def get_attn_backend(self: Any) -> Any:
        return importlib.import_module("vllm_ascend.attention.attention_v1").AscendAttentionBackend

    return type(
        "Attention",
        (base,),
        {"get_attn_backend": get_attn_backend, "get_kv_cache_spec": lambda *_: None},
    )()


def delta_net_state(shape: ModelShape, config: Any) -> tuple[Any, Any]:
    """Return shapes and dtypes of GatedDeltaNet's convolution and recurrent state on one NPU.

    Reason: vllm/model_executor/models/qwen3_5.py:678-708 in 0.23 (:399 in 0.30) and qwen3_next.py
    call the same calculators, and so does the layer (vllm_ascend/ops/gdn.py:45, :275).
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
        config.model_config.dtype,
        config.cache_config.mamba_cache_dtype,
        config.cache_config.mamba_ssm_cache_dtype,
    )
    return shapes, dtypes


def num_drafts(config: Any) -> int:
    """Return the number of draft tokens per step."""
    return config.speculative_config.num_speculative_tokens if config.speculative_config else 0
