"""The one place of `hsx plan` that touches vLLM and vllm-ascend: their own planner, asked for a configuration that no server has yet.

Checked against vllm 0.23.0 and vllm-ascend 0.23.0. A server builds its VllmConfig and its model, asks each layer for a KVCacheSpec, and
hands the specs to vLLM's planner. Here the specs are made as the layers make them, from a stand-in that has the fields of VllmConfig that
are read on the way. KCU below is vllm/v1/core/kv_cache_utils.py, MR vllm_ascend/worker/model_runner_v1.py. Nothing is imported before it is
needed: vLLM takes seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from vllm_ascend_hsx.config import METHOD
from vllm_ascend_hsx.plan.errors import PlannerMissingError
from vllm_ascend_hsx.plan.shape import LayerKind, ModelShape

PLANNER = "vllm.v1.core.kv_cache_utils"
SPECS = "vllm.v1.kv_cache_interface"
ASCEND_SPECS = "vllm_ascend.core.kv_cache_interface"
MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
MAMBA_CONFIG = "vllm_ascend.patch.platform.patch_mamba_config"
# The name of the drafter's layer (vllm/model_executor/models/extract_hidden_states.py:361).
CACHE_ONLY = "model.cache_only_layers.{}"


class Layout(Enum):
    """Where the hidden states are: there are none, in our staging slots, or in the KV pool (vLLM's ExampleHiddenStatesConnector)."""

    PLAIN = "no extraction"
    HSX = "hsx"
    UPSTREAM = "upstream"


@dataclass(frozen=True)
class EngineOptions:
    """What of a server's options the KV cache depends on. `block_size` is None for vLLM's choice; tokens are counted in tokens."""

    tensor_parallel: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int | None
    prefix_caching: bool


@dataclass(frozen=True)
class Capacity:
    """The KV cache that vLLM makes of some memory.

    Attributes:
        block_size: tokens per block of the attention layers.
        num_blocks: blocks; vLLM calls it num_gpu_blocks.
        block_bytes: bytes per NPU that a block takes in all tensors together.
        groups: layers and tokens per block of each KV cache group.
        tokens: what requests of max_model_len tokens can hold together; the server logs it as "GPU KV cache size".
    """

    block_size: int
    num_blocks: int
    block_bytes: int
    groups: tuple[tuple[int, int], ...]
    tokens: int


class LayoutError(Exception):
    """vLLM's planner refuses the configuration: a server does not start with it. The message is its reason.

    Attributes:
        memory: whether the reason is that there is too little of it.
    """

    def __init__(self, reason: str, *, memory: bool = False) -> None:
        self.memory = memory
        super().__init__(reason)


class UnknownFieldError(AttributeError):
    """vLLM reads a field of its configuration that the stand-in lacks: this version of vLLM is not the one that it was made for."""


class _Fields(SimpleNamespace):
    """A part of VllmConfig. What it lacks must not pass for a configuration that vLLM refuses."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownFieldError(
            f"hsx plan gives vLLM no {name!r}, which it reads; it was checked against vllm 0.23.0 and vllm-ascend 0.23.0: install these"
        )


def load() -> None:
    """Import vLLM with vllm-ascend's patches applied, as a server on Ascend has them.

    Reason: vllm-ascend replaces a part of the planner (patch/platform/patch_kv_cache_utils.py) and the alignment of hybrid models
    (patch_mamba_config.py) when its general plugins are loaded. It cannot be imported without torch_npu; where there is none, the emulated
    one is put on the path of this process, for its import alone: no device is used.

    Raises:
        PlannerMissingError: vllm or vllm-ascend is not installed.
    """
    if missing := [name for name in ("vllm", "vllm_ascend") if find_spec(name) is None]:
        raise PlannerMissingError(
            f"hsx plan asks vLLM's own planner, and {' and '.join(missing)} is not installed here: "
            "install vllm 0.23.0 with vllm-ascend 0.23.0, or set up the emulated NPU with `make setup`"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if find_spec("torch_npu") is None:
        from vllm_ascend_hsx.emulator.launch import SITE

        sys.path.insert(0, str(SITE))
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)


def step_tokens(options: EngineOptions, layout: Layout) -> int:
    """Most tokens of one step. Upstream has no chunked prefill (vllm/config/vllm.py:764), so that one takes a whole request."""
    batched = options.max_num_batched_tokens
    return max(batched, options.max_model_len) if layout is Layout.UPSTREAM else batched


def plan_layout(shape: ModelShape, options: EngineOptions, layout: Layout, num_extracted: int, kv_bytes: int) -> Capacity:
    """Ask vLLM's planner what KV cache an NPU has.

    Reason: KCU:1956 (get_kv_cache_configs) groups layers, unifies their pages, checks that a request fits and counts the blocks; KCU:899
    (get_max_concurrency_for_kv_cache_config) times max_model_len is the size that the server logs (KCU:1720).

    Args:
        shape: the target.
        options: of the server.
        layout: where the hidden states are.
        num_extracted: layers that are extracted.
        kv_bytes: memory of an NPU that is left for the KV cache.

    Raises:
        LayoutError: such a server does not start.
        UnknownFieldError: another version of vLLM.
    """
    planner = importlib.import_module(PLANNER)
    try:
        config = _stand_in(shape, options, layout)
        specs = _specs(shape, config, layout, num_extracted)
        cache = planner.get_kv_cache_configs(config, [specs], [kv_bytes])[0]
        concurrency = planner.get_max_concurrency_for_kv_cache_config(config, cache)
    except UnknownFieldError:
        raise
    except Exception as error:  # whatever it is, it is what the server would end with
        # KCU:713 (_check_enough_kv_cache_memory)
        memory = isinstance(error, ValueError) and ("KV cache is needed" in str(error) or "No available memory" in str(error))
        raise LayoutError(_reason(error), memory=memory) from error
    if layout is Layout.UPSTREAM and not shape.is_hybrid:
        _require_own_tensor(cache, CACHE_ONLY.format(shape.num_layers))
    return Capacity(
        block_size=config.cache_config.block_size,
        num_blocks=cache.num_blocks,
        block_bytes=sum(tensor.size for tensor in cache.kv_cache_tensors) // max(cache.num_blocks, 1),
        groups=tuple((len(group.layer_names), group.kv_cache_spec.block_size) for group in cache.kv_cache_groups),
        tokens=int(concurrency * options.max_model_len),
    )


def _require_own_tensor(cache: Any, name: str) -> None:
    """Refuse what passes the planner and stops the runner.

    Reason: a layer that shares a tensor with the drafter's gets one tensor (MR:4119) where MR:4542 unpacks a pair of keys and values, but
    for models with Mamba layers, where all have one.
    """
    for tensor in cache.kv_cache_tensors:
        if name in tensor.shared_by and len(tensor.shared_by) > 1:
            raise LayoutError(
                "ValueError: too many values to unpack (expected 2), in _reshape_kv_cache_tensors "
                "(vllm_ascend/worker/model_runner_v1.py): hidden states share a tensor with attention"
            )


def _stand_in(shape: ModelShape, options: EngineOptions, layout: Layout) -> Any:
    """The fields of VllmConfig that the functions called here read, as a server has them after its start.

    * `speculative_config`: none without extraction. Upstream has one draft token, hence one more Mamba state per request; our plugin
      makes it none (compat.drafts.schedule_no_drafts).
    * Upstream goes without chunked prefill, and a hybrid model then without prefix caching (vllm/model_executor/models/config.py:372).
    * `block_size`: vllm-ascend's refresh_block_size (utils.py:1369) makes it 128; that of a hybrid model follows from its state.
    """
    torch = importlib.import_module("torch")
    upstream = layout is Layout.UPSTREAM
    drafts = {Layout.PLAIN: None, Layout.HSX: 0, Layout.UPSTREAM: 1}[layout]
    config = _Fields(
        cache_config=_Fields(
            block_size=options.block_size,
            cache_dtype="auto",
            enable_prefix_caching=options.prefix_caching and not (upstream and shape.is_hybrid),
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
            max_num_batched_tokens=step_tokens(options, layout),
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

    Reason: its patch_mamba_config.verify_and_update_config takes the place of vLLM's HybridAttentionMambaModelConfig. It finds the
    model's class in vLLM's registry, which would import the model, and asks it for the state's shapes; these are given to it instead.
    Before it, vLLM takes the recurrent state's dtype from config.json for some classes (models/config.py:536, in MODELS_CONFIG_MAP).
    """
    per_class = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP.get(shape.architecture)
    if per_class is not None:
        per_class.verify_and_update_config(config)
    shapes, dtypes = _state(shape, config)
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


def _state(shape: ModelShape, config: Any) -> tuple[Any, Any]:
    """Shapes and dtypes of GatedDeltaNet's convolution and recurrent state on one NPU.

    Reason: vllm/model_executor/models/qwen3_5.py:678-708 and qwen3_next.py ask the same calculators, and so does the layer
    (vllm_ascend/ops/gdn.py:45).
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
        _drafts(config),
    )
    dtypes = utils.MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        config.model_config.dtype, config.cache_config.mamba_cache_dtype, config.cache_config.mamba_ssm_cache_dtype
    )
    return shapes, dtypes


def _drafts(config: Any) -> int:
    return config.speculative_config.num_speculative_tokens if config.speculative_config else 0


def _specs(shape: ModelShape, config: Any, layout: Layout, num_extracted: int) -> dict[str, Any]:
    """The KVCacheSpec of every layer, in the order of MR:4907 (get_kv_cache_spec): attention, the drafter's layer, then Mamba.

    Attention pages smaller than those of Mamba are padded (MR:5021). The drafter's layer is a HiddenStateCacheSpec with upstream (MR:5003);
    ours has none.
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
        # vllm/model_executor/models/extract_hidden_states.py:285: a head per layer that is extracted.
        specs[CACHE_ONLY.format(shape.num_layers)] = interface.HiddenStateCacheSpec(
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
    """As vllm/model_executor/layers/attention/attention.py:566 makes it; latent attention as MR:4991 does."""
    sizes: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": config.model_config.get_num_kv_heads(config.parallel_config),
        "head_size": shape.head_dim,
        "dtype": config.model_config.dtype,
    }
    if kind is LayerKind.LATENT:
        return importlib.import_module(ASCEND_SPECS).AscendMLAAttentionSpec(**sizes)
    interface = importlib.import_module(SPECS)
    if kind is LayerKind.SLIDING:
        return interface.SlidingWindowSpec(sliding_window=shape.sliding_window, **sizes)
    return interface.FullAttentionSpec(**sizes)


def _state_spec(shape: ModelShape, config: Any) -> Any:
    """As vllm/model_executor/layers/mamba/abstract.py (MambaBase.get_kv_cache_spec) makes it."""
    shapes, dtypes = _state(shape, config)
    cache = config.cache_config
    return importlib.import_module(SPECS).MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=_drafts(config),
    )


def _reason(error: Exception) -> str:
    """What a server's log would end with, in one line; an assertion without words is told by where it stands."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).split("\n")[0].split(". ")[0].strip() or f"in {where.name} ({where.filename.rsplit('site-packages/', 1)[-1]})"
    return f"{type(error).__name__}: {text}"
