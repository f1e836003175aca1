"""The touches on vLLM and vllm-ascend internals, each with its reason and the version it was checked against.

Checked against vllm 0.23.0 and vllm-ascend 0.23.0. Nothing here is imported at module level from either: a general plugin is
loaded before the platform is resolved, and an early import of vllm_ascend would run its patches too soon.
MR below is vllm_ascend/worker/model_runner_v1.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch

from vllm_ascend_hsx.config import CONNECTOR_NAME, METHOD, HsxConfigError
from vllm_ascend_hsx.targets.supported import ARCHITECTURES

CHECKED_VERSIONS = {"vllm": "0.23.0", "vllm-ascend": "0.23.0"}

SPEC_DECODE_MODULE = "vllm_ascend.spec_decode"
BALANCE_SCHEDULE_MODULE = "vllm_ascend.patch.platform.patch_balance_schedule"
CONFIG_MODULE = "vllm.config.vllm"
MULTI_CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
PROPOSER_MODULE = "vllm.v1.spec_decode.extract_hidden_states"
RUNNER_MODULE = "vllm_ascend.worker.model_runner_v1"
DEEPSEEK_MODULE = "vllm.model_executor.models.deepseek_v2"
SAMPLING_MODULE = "vllm.sampling_params"
WORKER_MODULE = "vllm_ascend.worker.worker"
PROPOSER_NAME = "AscendExtractHiddenStatesProposer"
# What HsxProposer calls on the runner; the v2 runner of vllm-ascend 0.23.0 has neither.
RUNNER_HOOKS = ("_pad_for_sequence_parallelism", "_sync_metadata_across_dp")


class IncompatibleVersionError(RuntimeError):
    """Something that we rely on in vLLM or vllm-ascend is not there."""

    def __init__(self, what: str) -> None:
        checked = ", ".join(f"{name} {version}" for name, version in CHECKED_VERSIONS.items())
        super().__init__(f"vllm-ascend-hsx needs {what}. It was checked against {checked}; install these versions.")


def replace_proposer(spec_decode: Any, proposer: type) -> None:
    """Let vllm-ascend construct `proposer` for the method extract_hidden_states.

    Reason: `get_spec_decode_method` (vllm_ascend/spec_decode/__init__.py:36-55) knows no registry, but looks the class up in its
    module when it is called, and MR:644 and MR:1750 only assert `isinstance`, which a subclass satisfies.

    Args:
        spec_decode: the imported module `vllm_ascend.spec_decode`.
        proposer: a subclass of what stands there under `AscendExtractHiddenStatesProposer`.

    Raises:
        IncompatibleVersionError: no such class there, or `proposer` is not a subclass of it.
    """
    current = getattr(spec_decode, PROPOSER_NAME, None)
    if current is None or not issubclass(proposer, current):
        raise IncompatibleVersionError(f"{SPEC_DECODE_MODULE}.{PROPOSER_NAME} as the base class of {proposer.__name__}")
    setattr(spec_decode, PROPOSER_NAME, proposer)


def keep_preemption(balance_schedule: Any) -> None:
    """Let vLLM's scheduler preempt requests although `kv_role` is `kv_producer`.

    Reason: vllm-ascend takes every producer for the prefill side of a disaggregated pair, whose requests never decode, and switches
    preemption off (patch/platform/patch_balance_schedule.py:47 in 0.23.0). On a server that extracts, requests may decode: once they
    fill the KV cache, none could go on, and the server would stand still. We hold no KV block, so preempting is safe. A producer beside
    us in MultiConnector may hold some; then vllm-ascend's choice stays.

    Args:
        balance_schedule: that module.

    Raises:
        IncompatibleVersionError: its function is not there.
    """
    original = getattr(balance_schedule, "_disable_preemption_on_prefill_node", None)
    if original is None:
        raise IncompatibleVersionError(f"{BALANCE_SCHEDULE_MODULE}._disable_preemption_on_prefill_node")

    def disable_preemption(vllm_config: Any) -> bool:
        transfer = vllm_config.kv_transfer_config
        ours = transfer is not None and transfer.kv_connector == CONNECTOR_NAME
        return not ours and bool(original(vllm_config))

    balance_schedule._disable_preemption_on_prefill_node = disable_preemption


def schedule_no_drafts(config_module: Any) -> None:
    """Have an engine that extracts hidden states schedule no draft tokens: `num_speculative_tokens` becomes 0.

    Reason: the method is a speculative one in name only, but vLLM accepts no number below 1 (config/speculative.py:990) and then treats
    each decode as one of two tokens: twice the work, another sampler (the same seed gives other text), graphs for two tokens a request,
    Mamba state for the draft. With 0 scheduler, sampler, graphs and KV cache are those of a server without extraction; the runner calls
    the drafter all the same (MR:2503).

    VllmConfig checks its parts again whenever a copy is made of it (`with_hf_config`, for the text part of a multimodal model), and then
    derives sizes from them in `__post_init__`. So the number is what vLLM accepts during the check, and 0 from there on. With data
    parallelism each engine calls `__post_init__` alone once more (vllm/v1/engine/core.py:1038).

    Args:
        config_module: the module `vllm.config.vllm`.

    Raises:
        IncompatibleVersionError: no VllmConfig there that has both steps.
    """
    config = getattr(config_module, "VllmConfig", None)
    check, derive = getattr(config, "__init__", None), getattr(config, "__post_init__", None)
    if config is None or check is None or derive is None:
        raise IncompatibleVersionError(f"{CONFIG_MODULE}.VllmConfig with __init__ and __post_init__")

    @functools.wraps(check)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        speculative: Any = kwargs.get("speculative_config")
        if _extracts(speculative) and speculative.num_speculative_tokens == 0:
            speculative.num_speculative_tokens = 1
        check(self, *args, **kwargs)

    @functools.wraps(derive)
    def post_init(self: Any) -> None:
        speculative = self.speculative_config
        if _extracts(speculative):
            if speculative.num_speculative_tokens not in (0, 1):
                raise HsxConfigError(
                    "speculative_config.num_speculative_tokens",
                    speculative.num_speculative_tokens,
                    f"has no meaning: {METHOD} proposes no tokens",
                    "Set it to 1, the least that vLLM takes.",
                )
            speculative.num_speculative_tokens = 0
        derive(self)

    config.__init__ = init
    config.__post_init__ = post_init


def _extracts(speculative: Any) -> bool:
    return getattr(speculative, "method", None) == METHOD


def set_up_proposer_without_drafts(proposer_module: Any) -> None:
    """Let vLLM's proposer be made although no draft tokens are scheduled.

    Reason: its constructor asserts one token (vllm/v1/spec_decode/extract_hidden_states.py:32). It is the base class of ours, and vLLM's
    runner makes one itself before vllm-ascend's does (vllm/v1/worker/gpu_model_runner.py:607).

    Args:
        proposer_module: the module `vllm.v1.spec_decode.extract_hidden_states`.

    Raises:
        IncompatibleVersionError: no such class there.
    """
    proposer_class = getattr(proposer_module, "ExtractHiddenStatesProposer", None)
    if proposer_class is None:
        raise IncompatibleVersionError(f"{PROPOSER_MODULE}.ExtractHiddenStatesProposer")
    original = proposer_class.__init__

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _one_draft(vllm_config.speculative_config):
            original(self, vllm_config, *args, **kwargs)

    proposer_class.__init__ = init


def set_up_drafter_without_drafts(runner_module: Any) -> None:
    """Let the runner set its drafter up although no draft tokens are scheduled.

    Reason: `_set_up_drafter` (MR:618) asserts a positive number. Everything else in the runner takes 0 as what it says.

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner sets its drafter up elsewhere.
    """
    runner_class = getattr(runner_module, "NPUModelRunner", None)
    original = getattr(runner_class, "_set_up_drafter", None)
    if runner_class is None or original is None:
        raise IncompatibleVersionError(f"{RUNNER_MODULE}.NPUModelRunner._set_up_drafter")

    @functools.wraps(original)
    def set_up_drafter(self: Any) -> None:
        if not _extracts(self.speculative_config):
            original(self)
            return
        require_no_drafts(self.vllm_config)
        with _one_draft(self.speculative_config):
            original(self)
        self.decode_token_per_req = 1

    runner_class._set_up_drafter = set_up_drafter


def keep_mamba_states_without_drafts(runner_module: Any) -> None:
    """Have a hybrid target's Mamba states handled as on a server without a speculative method.

    Reason: the runner counts accepted drafts whenever there is a speculative method (MR:755), with an event that it has only if draft
    tokens are scheduled (vllm/v1/worker/gpu_model_runner.py:871), and has buffers and copies for it (gpu_model_runner.py:1016, MR:2187).

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner does it elsewhere.
    """
    runner_class = getattr(runner_module, "NPUModelRunner", None)
    for name in ("_update_states_after_model_execute", "_get_mamba_bufs"):
        original = getattr(runner_class, name, None)
        if runner_class is None or original is None:
            raise IncompatibleVersionError(f"{RUNNER_MODULE}.NPUModelRunner.{name}")
        setattr(runner_class, name, _without_speculative_method(original))


def _without_speculative_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        speculative = self.speculative_config
        if not _extracts(speculative):
            return method(self, *args, **kwargs)
        self.speculative_config = None
        try:
            return method(self, *args, **kwargs)
        finally:
            self.speculative_config = speculative

    return call


def take_logits_parameters(sampling_module: Any) -> None:
    """Let requests use `min_p` and `logit_bias`.

    Reason: vLLM refuses both with any speculative method (sampling_params.py:828), since they are not applied to drafts. There are none.

    Args:
        sampling_module: the module `vllm.sampling_params`.

    Raises:
        IncompatibleVersionError: the check is elsewhere.
    """
    params = getattr(sampling_module, "SamplingParams", None)
    original = getattr(params, "_validate_spec_decode", None)
    if params is None or original is None:
        raise IncompatibleVersionError(f"{SAMPLING_MODULE}.SamplingParams._validate_spec_decode")

    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        if not _extracts(speculative_config):
            original(self, speculative_config)

    params._validate_spec_decode = validate


def have_no_drafts_to_take(runner_module: Any) -> None:
    """Let the runner answer, when the engine asks for draft tokens, that there are none.

    Reason: with asynchronous scheduling and structured outputs the engine asks whatever the number of draft tokens is, and stops if the
    runner has no answer (v1/engine/core.py:583); with no draft tokens it has none (v1/worker/gpu_model_runner.py:4693).

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner is not asked this way.
    """
    runner_class = getattr(runner_module, "NPUModelRunner", None)
    original = getattr(runner_class, "take_draft_token_ids", None)
    if runner_class is None or original is None:
        raise IncompatibleVersionError(f"{RUNNER_MODULE}.NPUModelRunner.take_draft_token_ids")

    @functools.wraps(original)
    def take_draft_token_ids(self: Any) -> Any:
        if not _extracts(self.speculative_config):
            return original(self)
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds([], [])

    runner_class.take_draft_token_ids = take_draft_token_ids


def apply_logits_processors(runner_module: Any) -> None:
    """Have the runner apply `min_p`, `logit_bias` and custom logits processors.

    Reason: `build_logitsprocs` (vllm/v1/sample/logits_processor/__init__.py:201) leaves them out with any speculative method.

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`, which has imported that function (MR:86).

    Raises:
        IncompatibleVersionError: it has not.
    """
    original = getattr(runner_module, "build_logitsprocs", None)
    if original is None:
        raise IncompatibleVersionError(f"{RUNNER_MODULE}.build_logitsprocs")

    @functools.wraps(original)
    def build_logitsprocs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _extracts(vllm_config.speculative_config):
            vllm_config = copy(vllm_config)
            vllm_config.speculative_config = None
        return original(vllm_config, *args, **kwargs)

    runner_module.build_logitsprocs = build_logitsprocs


@contextmanager
def _one_draft(speculative: Any) -> Iterator[None]:
    number, speculative.num_speculative_tokens = speculative.num_speculative_tokens, 1
    try:
        yield
    finally:
        speculative.num_speculative_tokens = number


def collect_ends_of_deepseek(deepseek: Any) -> None:
    """Have DeepSeek-V2, -V3 and Kimi-K2 return the embedding output (id 0) and the state after the last layer, if they are wanted.

    Reason: DeepseekV2Model.forward collects before each layer only (models/deepseek_v2.py:1328), so the last id is never in what it
    returns, and before the first layer it adds a residual that is None. Every other target of vllm 0.23.0 that can be extracted uses
    `_maybe_add_hidden_state` (interfaces.py:1289), which does neither.

    Args:
        deepseek: that module.

    Raises:
        IncompatibleVersionError: no DeepseekV2Model there.
    """
    model_class = getattr(deepseek, "DeepseekV2Model", None)
    original = getattr(model_class, "forward", None)
    if model_class is None or original is None:
        raise IncompatibleVersionError(f"{DEEPSEEK_MODULE}.DeepseekV2Model.forward")

    @functools.wraps(original)
    def forward(self: Any, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
        wanted, last = self.aux_hidden_state_layers, len(self.layers)
        if 0 not in wanted and last not in wanted:
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
        # One pipeline stage, which is what extraction is allowed with: from the embedding to the norm.
        stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        options = getattr(self.config, "llama_4_scaling", None)
        scaling = options and deepseek._get_llama_4_scaling(options["original_max_position_embeddings"], options["beta"], positions)
        collected = []
        for index, layer in enumerate(self.layers):
            if index in wanted:
                collected.append(stream if residual is None else stream + residual)
            stream, residual = layer(positions, stream, residual, scaling)
        if last in wanted:
            collected.append(stream + residual)
        stream, _ = self.norm(stream, residual)
        return stream, collected

    model_class.forward = forward


def require_no_drafts(vllm_config: Any) -> None:
    """Refuse an engine whose configuration was made before our plugin was loaded.

    Raises:
        HsxConfigError: draft tokens would be scheduled.
    """
    number = vllm_config.speculative_config.num_speculative_tokens
    if number != 0:
        raise HsxConfigError(
            "speculative_config.num_speculative_tokens",
            number,
            "would be scheduled as draft tokens: this configuration was made before our plugin was loaded",
            "Make it with vLLM's EngineArgs, which loads plugins first, and have ascend_hsx in VLLM_PLUGINS if that is set.",
        )


def compute_what_is_extracted(multi_module: Any) -> None:
    """Beside us in MultiConnector, no connector loads KV for a request that is extracted.

    Reason: what is loaded is not computed, and has no rows. `skip_reading_prefix_cache` keeps vLLM's own prefix cache away
    (v1/core/kv_cache_manager.py:212), but no connector looks at it. The others are asked all the same and are then not chosen, as happens
    whenever two of them offer tokens (multi_connector.py:397), so they are prepared for it.

    Args:
        multi_module: the module `vllm.distributed.kv_transfer.kv_connector.v1.multi_connector`; vllm-ascend's MultiConnector inherits it.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    multi_class = getattr(multi_module, "MultiConnector", None)
    original = getattr(multi_class, "get_num_new_matched_tokens", None)
    if multi_class is None or original is None:
        raise IncompatibleVersionError(f"{MULTI_CONNECTOR_MODULE}.MultiConnector.get_num_new_matched_tokens")

    @functools.wraps(original)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, load_async = original(self, request, num_computed_tokens)
        if tokens and any(extracts(request) for each in self._connectors if (extracts := getattr(each, "extracts", None))):
            self._requests_to_connector.pop(request.request_id, None)
            return 0, False
        return tokens, load_async

    multi_class.get_num_new_matched_tokens = get_num_new_matched_tokens


def copy_before_sleep(worker_module: Any) -> None:
    """Have a worker that is put to sleep wait until our copies have been made.

    Reason: `NPUWorker.sleep` (worker/worker.py:216) unmaps the memory that was allocated with the weights, which the staging slots were,
    and a copy may still be waiting behind a full ring. No row is staged while the engine sleeps, and what a slot holds needs not be kept.

    Args:
        worker_module: the module `vllm_ascend.worker.worker`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    worker_class = getattr(worker_module, "NPUWorker", None)
    original = getattr(worker_class, "sleep", None)
    if worker_class is None or original is None:
        raise IncompatibleVersionError(f"{WORKER_MODULE}.NPUWorker.sleep")

    @functools.wraps(original)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            group = get_kv_transfer_group()
            for connector in getattr(group, "_connectors", [group]):  # MultiConnector's children, or the only one
                if drain_copies := getattr(connector, "drain_copies", None):
                    drain_copies()
        return original(self, *args, **kwargs)

    worker_class.sleep = sleep


def require_collecting_target(model_config: Any) -> None:
    """Refuse a target whose class does not collect hidden states.

    Reason: the runner refuses it too, but only when all weights are loaded, and does not say what would do (MR:3758).

    Args:
        model_config: vllm.config.ModelConfig of the target.

    Raises:
        HsxConfigError: it does not; the message lists what does.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, architecture = model_config.registry.resolve_model_cls(model_config.architectures, model_config=model_config)
    if not supports_eagle3(model_class):
        raise HsxConfigError(
            "model",
            architecture,
            "collects no hidden states: its class in vLLM lacks the interface SupportsEagle3",
            f"Targets that can be extracted are {', '.join(ARCHITECTURES)}.",
        )


def require_runner_hooks(runner: Any) -> None:
    """Refuse a runner without the two methods that keep DP ranks in step.

    Reason: `_pad_for_sequence_parallelism` (MR:2876) and `_sync_metadata_across_dp` (MR:673) are private methods of the v1
    NPUModelRunner.

    Raises:
        IncompatibleVersionError: no runner, or one without a method; at start-up instead of an AttributeError in the first step.
    """
    if runner is None:
        raise IncompatibleVersionError("the model runner, which vllm-ascend hands to its proposers, but got None")
    missing = [name for name in RUNNER_HOOKS if not callable(getattr(runner, name, None))]
    if missing:
        raise IncompatibleVersionError(
            f"{' and '.join(missing)} on the model runner, which {type(runner).__name__} does not have "
            "(the v2 runner is not supported: unset VLLM_USE_V2_MODEL_RUNNER)"
        )


class BatchRow(NamedTuple):
    """The rows of one request in the runner's current batch."""

    request_id: str
    first: int
    num_rows: int
    row: int


def batch_layout(runner: Any, query_start_loc: torch.Tensor) -> list[BatchRow]:
    """Who is in the runner's current batch, in batch order.

    Reason: `propose` is given tensors without request ids; `input_batch` (vllm/v1/worker/gpu_input_batch.py) holds both the ids and
    the position of each request's first token. Without draft tokens `num_computed_tokens_cpu` is exact also with asynchronous scheduling.

    Args:
        runner: the NPUModelRunner.
        query_start_loc: int32 [requests + 1] on the host; row at which each request begins.
    """
    input_batch = runner.input_batch
    starts = query_start_loc.tolist()
    positions = input_batch.num_computed_tokens_cpu
    return [
        BatchRow(request_id, int(positions[index]), starts[index + 1] - starts[index], starts[index])
        for index, request_id in enumerate(input_batch.req_ids)
    ]


def forward_context(
    metadata: dict[str, Any], vllm_config: Any, num_tokens: int, num_tokens_across_dp: torch.Tensor | None
) -> AbstractContextManager[None]:
    """vLLM's forward context for the cache-only layer.

    Reason: with DP>1 and a MoE target `set_forward_context` (vllm/forward_context.py:280) posts a hidden [4, dp] collective when it is
    given no token counts, which the other ranks do not answer. So the counts are required here.

    Raises:
        ValueError: DP>1 without token counts.
    """
    from vllm.forward_context import set_forward_context

    if vllm_config.parallel_config.data_parallel_size > 1 and num_tokens_across_dp is None:
        raise ValueError("num_tokens_across_dp is None with data_parallel_size > 1: vLLM would post a collective of its own")
    context: AbstractContextManager[None] = set_forward_context(
        metadata,
        vllm_config,
        num_tokens=num_tokens,
        num_tokens_across_dp=num_tokens_across_dp,
        slot_mapping={},
    )
    return context


def transfers_to_connector(function: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's decorator that calls the connector's `save_kv_layer` after an attention layer ran.

    Reason: model_executor/layers/attention/kv_transfer_utils.py:22; it finds layer and metadata in the forward context and reaches a
    connector inside MultiConnector too.
    """
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

    decorated: Callable[..., Any] = maybe_transfer_kv_layer(function)
    return decorated


def register_layer(vllm_config: Any, name: str, layer: Any) -> None:
    """Make an attention layer known to vLLM.

    Reason: vLLM's attention layers enter themselves into `static_forward_context`, its registry of them; the forward context, the
    connector's hook and the drafter look layers up there.

    Raises:
        ValueError: a layer of that name exists.
    """
    layers = vllm_config.compilation_config.static_forward_context
    if name in layers:
        raise ValueError(f"a layer named {name!r} exists already")
    layers[name] = layer


def find_layers(vllm_config: Any, layer_type: type) -> dict[str, Any]:
    """The layers of a type that were registered while models were loaded in this process, by name.

    Reason: `static_forward_context` is vLLM's registry of attention layers.
    """
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, layer_type)}


def tensor_parallel_rank() -> int:
    """This worker's rank among those that hold the same rows. Reason: vllm.distributed names it so since 0.6."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank
