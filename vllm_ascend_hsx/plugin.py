"""What is plugged in where: the one module that knows vLLM's registries."""

from __future__ import annotations

from types import ModuleType

from vllm_ascend_hsx.compat.beam_search import (
    CHAT_MODULE,
    COMPLETION_MODULE,
    OFFLINE_MODULE,
    ONLINE_MODULE,
    extract_no_offline_beams,
    extract_no_online_beams,
    keep_params_of_chat,
    keep_params_of_completion,
)
from vllm_ascend_hsx.compat.drafts import (
    CONFIG_MODULE,
    PROPOSER_MODULE,
    RUNNER_MODULE,
    SAMPLING_MODULE,
    apply_logits_processors,
    have_no_drafts_to_take,
    keep_mamba_states_without_drafts,
    schedule_no_drafts,
    set_up_drafter_without_drafts,
    set_up_proposer_without_drafts,
    take_logits_parameters,
)
from vllm_ascend_hsx.compat.engine import (
    BALANCE_SCHEDULE_MODULE,
    MULTI_CONNECTOR_MODULE,
    SCHEDULER_MODULE,
    WORKER_MODULE,
    answer_beside_others,
    compute_what_is_extracted,
    copy_before_sleep,
    hear_outcomes_before_answers,
    keep_preemption,
)
from vllm_ascend_hsx.compat.logs import log_as_vllm_does
from vllm_ascend_hsx.compat.models import DEEPSEEK_MODULE, collect_ends_of_deepseek
from vllm_ascend_hsx.compat.request_params import SCORING_MODULE, TOKENS_MODULE, pass_params_of_scoring, pass_params_of_tokens
from vllm_ascend_hsx.compat.runner import SPEC_DECODE_MODULE, replace_proposer
from vllm_ascend_hsx.compat.shutdown import (
    ASYNC_ENGINE_MODULE,
    CHAT_SERVING_MODULE,
    COMPLETION_SERVING_MODULE,
    ENGINE_CORE_MODULE,
    ENGINE_MANAGER_MODULE,
    EXECUTOR_MODULE,
    SERVE_MODULE,
    answer_before_api_server_stops,
    answer_with_errors,
    end_chat_streams_with_errors,
    end_completion_streams_with_errors,
    stop_engines_before_api_servers,
    stop_in_order,
    wait_for_engines,
    wait_for_workers,
)
from vllm_ascend_hsx.config import CONNECTOR_NAME

DRAFTER_ARCHITECTURE = "ExtractHiddenStatesModel"


def register() -> None:
    """vLLM calls this in every process (entry point group `vllm.general_plugins`), sometimes more than once.

    Nothing of vllm_ascend is imported here: plugins are loaded before its own patches are applied.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models import ModelRegistry
    from wrapt import register_post_import_hook

    log_as_vllm_does()
    if CONNECTOR_NAME in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR_NAME, "vllm_ascend_hsx.connector.connector", CONNECTOR_NAME)
    ModelRegistry.register_model(DRAFTER_ARCHITECTURE, "vllm_ascend_hsx.drafter.model:AscendExtractHiddenStatesModel")
    ModelRegistry.register_model("Qwen3NextForCausalLM", "vllm_ascend_hsx.compat.qwen3_next:Qwen3NextForCausalLM")
    register_post_import_hook(_use_hsx_proposer, SPEC_DECODE_MODULE)
    register_post_import_hook(keep_preemption, BALANCE_SCHEDULE_MODULE)
    register_post_import_hook(schedule_no_drafts, CONFIG_MODULE)
    register_post_import_hook(set_up_proposer_without_drafts, PROPOSER_MODULE)
    register_post_import_hook(set_up_drafter_without_drafts, RUNNER_MODULE)
    register_post_import_hook(have_no_drafts_to_take, RUNNER_MODULE)
    register_post_import_hook(keep_mamba_states_without_drafts, RUNNER_MODULE)
    register_post_import_hook(collect_ends_of_deepseek, DEEPSEEK_MODULE)
    register_post_import_hook(apply_logits_processors, RUNNER_MODULE)
    register_post_import_hook(compute_what_is_extracted, MULTI_CONNECTOR_MODULE)
    register_post_import_hook(hear_outcomes_before_answers, SCHEDULER_MODULE)
    register_post_import_hook(answer_beside_others, SCHEDULER_MODULE)
    register_post_import_hook(copy_before_sleep, WORKER_MODULE)
    register_post_import_hook(take_logits_parameters, SAMPLING_MODULE)
    register_post_import_hook(wait_for_engines, ENGINE_MANAGER_MODULE)
    register_post_import_hook(stop_engines_before_api_servers, SERVE_MODULE)
    register_post_import_hook(answer_before_api_server_stops, ASYNC_ENGINE_MODULE)
    register_post_import_hook(wait_for_workers, EXECUTOR_MODULE)
    register_post_import_hook(stop_in_order, ENGINE_CORE_MODULE)
    register_post_import_hook(answer_with_errors, ENGINE_CORE_MODULE)
    register_post_import_hook(end_completion_streams_with_errors, COMPLETION_SERVING_MODULE)
    register_post_import_hook(end_chat_streams_with_errors, CHAT_SERVING_MODULE)
    register_post_import_hook(extract_no_offline_beams, OFFLINE_MODULE)
    register_post_import_hook(extract_no_online_beams, ONLINE_MODULE)
    register_post_import_hook(keep_params_of_completion, COMPLETION_MODULE)
    register_post_import_hook(keep_params_of_chat, CHAT_MODULE)
    register_post_import_hook(pass_params_of_tokens, TOKENS_MODULE)
    register_post_import_hook(pass_params_of_scoring, SCORING_MODULE)


def _use_hsx_proposer(spec_decode: ModuleType) -> None:
    """Runs when a worker has imported `vllm_ascend.spec_decode`, or at once if it was imported already."""
    from vllm_ascend_hsx.drafter.proposer import HsxProposer

    replace_proposer(spec_decode, HsxProposer)
