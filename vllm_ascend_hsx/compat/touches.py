"""Every touch on vLLM and vllm-ascend in one table, and the check that what is installed still has them as we expect them.

`python -m vllm_ascend_hsx.compat.touches` imports what is touched and prints one line of JSON; `hsx doctor` runs it in a process of its
own, for an import of vllm_ascend may fail, or end the process. tests/ut/test_cli_doctor.py holds the table against the code.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from vllm_ascend_hsx.compat.beam_search import CHAT_MODULE, COMPLETION_MODULE, OFFLINE_MODULE, ONLINE_MODULE
from vllm_ascend_hsx.compat.drafts import CONFIG_MODULE, PROPOSER_MODULE, RUNNER_MODULE, SAMPLING_MODULE
from vllm_ascend_hsx.compat.engine import BALANCE_SCHEDULE_MODULE, MULTI_CONNECTOR_MODULE, SCHEDULER_MODULE, WORKER_MODULE
from vllm_ascend_hsx.compat.models import DEEPSEEK_MODULE
from vllm_ascend_hsx.compat.request_params import SCORING_MODULE, TOKENS_MODULE
from vllm_ascend_hsx.compat.runner import PROPOSER_NAME, RUNNER_HOOKS, SPEC_DECODE_MODULE
from vllm_ascend_hsx.compat.shutdown import (
    ASYNC_ENGINE_MODULE,
    CHAT_SERVING_MODULE,
    COMPLETION_SERVING_MODULE,
    ENGINE_CORE_MODULE,
    ENGINE_MANAGER_MODULE,
    EXECUTOR_MODULE,
    SERVE_MODULE,
)

FACTORY_MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"
CONFIG_FILES_MODULE = "vllm.transformers_utils.config"
MARK = "hsx-touches: "  # begins the line that is meant for `hsx doctor`; what is imported may print, too
_FIRST = "vllm_ascend.ops"  # before any other module of vllm_ascend 0.23.0: they import each other in circles


class Use(Enum):
    """What we do with it, which says what its signature may be.

    REPLACED: what stands in its place takes exactly these parameters. PASSED_ON: it takes these and passes any others on. CALLED: it is
    called with these, and may have others that need not be given. NAMED: it has to be there.
    """

    REPLACED = "replaced"
    PASSED_ON = "replaced, the rest passed on"
    CALLED = "called"
    NAMED = "used"


class Problem(NamedTuple):
    """Why a touch does not hold: one line, and whether its module could not even be imported."""

    text: str
    not_imported: bool = False


class Touch(NamedTuple):
    """One thing of vLLM or vllm-ascend that we rely on.

    Attributes:
        module: where it is.
        path: the attribute's name, or a class's and its attribute's.
        use: what we do with it.
        parameters: those that we give or take by position, in order, `self` included.
        keywords: those that we give or take by name.
        why: what does not work without it.
    """

    module: str
    path: tuple[str, ...]
    use: Use
    parameters: tuple[str, ...]
    keywords: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        return ".".join((self.module, *self.path))


def _touch(module: str, path: str, use: Use, parameters: str, why: str, keywords: str = "") -> Touch:
    return Touch(module, tuple(path.split(".")), use, tuple(parameters.split()), tuple(keywords.split()), why)


TOUCHES = (
    # plugin.py
    _touch(FACTORY_MODULE, "KVConnectorFactory.register_connector", Use.CALLED, "name module_path class_name", "the connector is known"),
    _touch(FACTORY_MODULE, "KVConnectorFactory._registry", Use.NAMED, "", "the plugin registers once"),
    _touch("vllm.model_executor.models", "ModelRegistry.register_model", Use.CALLED, "model_arch model_cls", "the drafter is known"),
    # beam_search.py
    _touch(OFFLINE_MODULE, "SamplingParams", Use.NAMED, "", "beams are not extracted"),
    _touch(OFFLINE_MODULE, "BeamSearchOfflineMixin.beam_search", Use.PASSED_ON, "self", "beams are not extracted"),
    _touch(ONLINE_MODULE, "SamplingParams", Use.NAMED, "", "beams are not extracted"),
    _touch(
        ONLINE_MODULE, "BeamSearchOnlineMixin.beam_search", Use.PASSED_ON, "self prompt request_id params", "beams are not extracted"
    ),
    _touch(COMPLETION_MODULE, "CompletionRequest.to_beam_search_params", Use.PASSED_ON, "self", "a beam search says why it has no rows"),
    _touch(CHAT_MODULE, "ChatCompletionRequest.to_beam_search_params", Use.PASSED_ON, "self", "a beam search says why it has no rows"),
    # drafts.py
    _touch(CONFIG_MODULE, "VllmConfig.__init__", Use.NAMED, "", "no draft tokens are scheduled"),
    _touch(CONFIG_MODULE, "VllmConfig.__post_init__", Use.REPLACED, "self", "no draft tokens are scheduled"),
    _touch(
        PROPOSER_MODULE, "ExtractHiddenStatesProposer.__init__", Use.PASSED_ON, "self vllm_config", "the proposer is made without drafts"
    ),
    _touch(RUNNER_MODULE, "NPUModelRunner._set_up_drafter", Use.REPLACED, "self", "the runner sets up without drafts"),
    _touch(RUNNER_MODULE, "NPUModelRunner.take_draft_token_ids", Use.REPLACED, "self", "structured outputs with asynchronous scheduling"),
    _touch("vllm.v1.outputs", "DraftTokenIds", Use.CALLED, "req_ids draft_token_ids", "structured outputs with asynchronous scheduling"),
    _touch(RUNNER_MODULE, "NPUModelRunner._update_states_after_model_execute", Use.PASSED_ON, "self", "states of hybrid targets"),
    _touch(RUNNER_MODULE, "NPUModelRunner._get_mamba_bufs", Use.PASSED_ON, "self", "states of hybrid targets"),
    _touch(
        SAMPLING_MODULE, "SamplingParams._validate_spec_decode", Use.REPLACED, "self speculative_config", "min_p and logit_bias are taken"
    ),
    _touch(RUNNER_MODULE, "build_logitsprocs", Use.PASSED_ON, "vllm_config", "logits processors are applied"),
    # engine.py
    _touch(BALANCE_SCHEDULE_MODULE, "_disable_preemption_on_prefill_node", Use.REPLACED, "vllm_config", "a full KV cache preempts"),
    _touch(
        MULTI_CONNECTOR_MODULE,
        "MultiConnector.get_num_new_matched_tokens",
        Use.REPLACED,
        "self request num_computed_tokens",
        "what is extracted is computed beside other connectors",
    ),
    _touch(
        SCHEDULER_MODULE,
        "Scheduler.update_from_output",
        Use.REPLACED,
        "self scheduler_output model_runner_output",
        "a response names the failure of its file",
    ),
    _touch(SCHEDULER_MODULE, "Scheduler._connector_finished", Use.REPLACED, "self request", "a file is named beside another connector"),
    _touch(WORKER_MODULE, "NPUWorker.sleep", Use.PASSED_ON, "self", "copies are made before a worker sleeps"),
    _touch("vllm.distributed.kv_transfer", "get_kv_transfer_group", Use.CALLED, "", "copies are made before a worker sleeps"),
    _touch("vllm.distributed.kv_transfer", "has_kv_transfer_group", Use.CALLED, "", "copies are made before a worker sleeps"),
    # logs.py
    _touch("vllm.logger", "init_logger", Use.CALLED, "name", "log lines go where vLLM's go"),
    # models.py
    _touch(
        DEEPSEEK_MODULE,
        "DeepseekV2Model.forward",
        Use.REPLACED,
        "self input_ids positions intermediate_tensors inputs_embeds",
        "first and last layer of DeepSeek and Kimi-K2",
    ),
    _touch(
        DEEPSEEK_MODULE,
        "_get_llama_4_scaling",
        Use.CALLED,
        "original_max_position_embeddings scaling_beta positions",
        "first and last layer of DeepSeek and Kimi-K2",
    ),
    _touch("vllm.model_executor.models.interfaces", "supports_eagle3", Use.CALLED, "model", "unusable targets are refused at once"),
    _touch(CONFIG_FILES_MODULE, "get_config", Use.CALLED, "model", "hsx serve reads a model's layers", "trust_remote_code revision"),
    _touch(CONFIG_FILES_MODULE, "get_hf_text_config", Use.CALLED, "config", "hsx serve reads a model's layers"),
    # request_params.py
    _touch(TOKENS_MODULE, "ServingTokens.serve_tokens", Use.PASSED_ON, "self request", "/inference/v1/generate hears its clients"),
    _touch(SCORING_MODULE, "SamplingParams", Use.NAMED, "", "/generative_scoring hears its clients"),
    _touch(
        SCORING_MODULE,
        "ServingGenerativeScoring.create_generative_scoring",
        Use.PASSED_ON,
        "self request",
        "/generative_scoring hears its clients",
    ),
    # runner.py
    _touch(SPEC_DECODE_MODULE, PROPOSER_NAME, Use.NAMED, "", "our proposer takes the place of vllm-ascend's"),
    _touch(
        RUNNER_MODULE, f"NPUModelRunner.{RUNNER_HOOKS[0]}", Use.CALLED, "self num_scheduled_tokens", "rows with sequence parallelism"
    ),
    _touch(
        RUNNER_MODULE,
        f"NPUModelRunner.{RUNNER_HOOKS[1]}",
        Use.CALLED,
        "self",
        "data-parallel ranks stay in step",
        "num_tokens is_draft_model cudagraph_mode allow_dp_padding",
    ),
    _touch(
        "vllm.forward_context",
        "set_forward_context",
        Use.CALLED,
        "attn_metadata vllm_config",
        "the cache-only layer runs",
        "num_tokens num_tokens_across_dp slot_mapping",
    ),
    _touch(
        "vllm.model_executor.layers.attention.kv_transfer_utils",
        "maybe_transfer_kv_layer",
        Use.CALLED,
        "func",
        "rows reach the connector",
    ),
    _touch("vllm.distributed", "get_tensor_model_parallel_rank", Use.CALLED, "", "one rank writes each row"),
    # shutdown.py
    _touch(
        ENGINE_MANAGER_MODULE,
        "CoreEngineProcManager.__init__",
        Use.PASSED_ON,
        "self",
        "rows are written when a server stops",
        "vllm_config",
    ),
    _touch(
        ENGINE_MANAGER_MODULE, "CoreEngineProcManager.shutdown", Use.REPLACED, "self timeout", "rows are written when a server stops"
    ),
    _touch(ENGINE_MANAGER_MODULE, "shutdown", Use.CALLED, "procs timeout", "rows are written when a server stops"),
    _touch(
        SERVE_MODULE,
        "wait_for_completion_or_failure",
        Use.PASSED_ON,
        "api_server_manager engine_manager",
        "several API servers answer the requests that the server's end cuts off",
    ),
    _touch(
        ASYNC_ENGINE_MODULE,
        "AsyncLLM.shutdown",
        Use.REPLACED,
        "self timeout",
        "several API servers answer the requests that the server's end cuts off",
    ),
    _touch(
        EXECUTOR_MODULE,
        "MultiprocExecutor._ensure_worker_termination",
        Use.REPLACED,
        "worker_procs",
        "rows are written when a server stops",
    ),
    _touch(
        COMPLETION_SERVING_MODULE,
        "OpenAIServingCompletion.completion_stream_generator",
        Use.PASSED_ON,
        "self",
        "a stream that the server's end cuts off ends with an error",
    ),
    _touch(
        CHAT_SERVING_MODULE,
        "OpenAIServingChat.chat_completion_stream_generator",
        Use.PASSED_ON,
        "self",
        "a stream that the server's end cuts off ends with an error",
    ),
    _touch(ENGINE_CORE_MODULE, "EngineCoreProc._handle_shutdown", Use.REPLACED, "self", "a file says that the server was stopped"),
    _touch(ENGINE_CORE_MODULE, "EngineCoreProc.shutdown", Use.REPLACED, "self", "rows are written when a server stops"),
    _touch(
        ENGINE_CORE_MODULE,
        "EngineCoreProc._send_abort_outputs_to_client",
        Use.REPLACED,
        "self req_ids client_index",
        "a request that the server's end cuts off is answered by an error",
    ),
    _touch(
        ENGINE_CORE_MODULE,
        "EngineCoreProc._send_error_outputs_to_client",
        Use.CALLED,
        "self req_ids client_index",
        "a request that the server's end cuts off is answered by an error",
    ),
    _touch(ENGINE_CORE_MODULE, "EngineShutdownState.REQUESTED", Use.NAMED, "", "rows are written when a server stops"),
)


def problem_of(touch: Touch, load: Callable[[str], Any] = importlib.import_module) -> Problem | None:
    """What is not as we expect it; None if the touch holds.

    Args:
        touch: what to look at.
        load: imports a module by its name.
    """
    try:
        found = load(touch.module)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        return Problem(_one_line(error), not_imported=True)
    for index, name in enumerate(touch.path):
        try:
            found = getattr(found, name)
        except AttributeError:
            return Problem(f"{'.'.join((touch.module, *touch.path[: index + 1]))} is not there")
    if touch.use is Use.NAMED:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return Problem(f"it has no signature: {_one_line(error)}")
    return _mismatch(touch, signature)


def _mismatch(touch: Touch, signature: inspect.Signature) -> Problem | None:
    parameters = signature.parameters
    names = tuple(parameters)
    expected = touch.parameters
    # What is called by position has its place, not its name; but another name means another thing in most cases.
    wrong = names[: len(expected)] != expected or not set(touch.keywords) <= set(names)
    others = [name for name in names[len(expected) :] if name not in touch.keywords]
    if touch.use is Use.REPLACED:
        wrong = wrong or bool(others)
    elif touch.use is Use.CALLED:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        wrong = wrong or any(parameters[n].default is inspect.Parameter.empty and parameters[n].kind not in variable for n in others)
    if not wrong:
        return None
    rest = {Use.REPLACED: "", Use.PASSED_ON: ", ...", Use.CALLED: ", optional ones"}[touch.use]
    return Problem(f"its parameters are ({', '.join(names)}), not ({', '.join((*expected, *touch.keywords))}{rest})")


def check(touches: Sequence[Touch] = TOUCHES) -> Iterator[tuple[Touch, Problem | None]]:
    """Each touch with its problem, or None."""
    if any(touch.module.startswith("vllm_ascend.") for touch in touches):
        problem_of(Touch(_FIRST, (), Use.NAMED, (), (), ""))  # what is wrong with it shows again with those that need it
    for touch in touches:
        yield touch, problem_of(touch)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__


def main() -> int:
    """Prints MARK and a list of [name, use, why, problem: [text, not imported] or null]; returns 0."""
    found = [[touch.name, touch.use.value, touch.why, problem] for touch, problem in check()]
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
