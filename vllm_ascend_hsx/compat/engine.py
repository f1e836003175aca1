"""How the engine preempts, loads, answers and sleeps while requests are extracted."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ascend_hsx.compat.versions import require
from vllm_ascend_hsx.config import CONNECTOR_NAME

BALANCE_SCHEDULE_MODULE = "vllm_ascend.patch.platform.patch_balance_schedule"
MULTI_CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
WORKER_MODULE = "vllm_ascend.worker.worker"


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
    _, original = require(balance_schedule, BALANCE_SCHEDULE_MODULE, "_disable_preemption_on_prefill_node")

    def disable_preemption(vllm_config: Any) -> bool:
        transfer = vllm_config.kv_transfer_config
        ours = transfer is not None and transfer.kv_connector == CONNECTOR_NAME
        return not ours and bool(original(vllm_config))

    balance_schedule._disable_preemption_on_prefill_node = disable_preemption


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
    multi_class, original = require(multi_module, MULTI_CONNECTOR_MODULE, "MultiConnector", "get_num_new_matched_tokens")

    @functools.wraps(original)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, load_async = original(self, request, num_computed_tokens)
        if tokens and any(extracts(request) for each in self._connectors if (extracts := getattr(each, "extracts", None))):
            self._requests_to_connector.pop(request.request_id, None)
            return 0, False
        return tokens, load_async

    multi_class.get_num_new_matched_tokens = get_num_new_matched_tokens


def hear_outcomes_before_answers(scheduler_module: Any) -> None:
    """Have our connector know what its workers report of a step before the requests that end in this step are answered.

    Reason: `Scheduler.update_from_output` ends requests, and asks the connector what their answers are to say, before it passes on the
    report of the workers (v1/core/sched/scheduler.py:1526 and 1597 in 0.23.0). A prompt of one step whose file could not be opened would
    be answered as if it had one. The report is passed on twice then; the second time it changes nothing.

    Args:
        scheduler_module: the module `vllm.v1.core.sched.scheduler`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    scheduler_class, original = require(scheduler_module, SCHEDULER_MODULE, "Scheduler", "update_from_output")

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        output = model_runner_output.kv_connector_output
        meta = None if output is None else output.kv_connector_worker_meta
        if meta is not None:
            children = getattr(self.connector, "_connectors", None)  # MultiConnector's, whose report is one of each
            pairs = [(self.connector, meta)] if children is None else zip(children, meta.metadata, strict=True)
            for connector, report in pairs:
                if hear := getattr(connector, "hear", None):
                    hear(report)
        return original(self, scheduler_output, model_runner_output)

    scheduler_class.update_from_output = update_from_output


def answer_beside_others(scheduler_module: Any) -> None:
    """Have a response name our file when another connector in MultiConnector answers too.

    Reason: a connector that hands KV on to a decoding server answers with where it is, and MultiConnector, vllm-ascend's too, ends the
    engine over a second answer (multi_connector.py:498; vllm-ascend's distributed/kv_transfer/ascend_multi_connector.py:94). So ours is
    taken before MultiConnector asks, after which our connector has nothing more to say. Where both have a key, the other's value stays.

    Args:
        scheduler_module: the module `vllm.v1.core.sched.scheduler`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    scheduler_class, original = require(scheduler_module, SCHEDULER_MODULE, "Scheduler", "_connector_finished")

    @functools.wraps(original)
    def connector_finished(self: Any, request: Any) -> tuple[bool, dict[str, Any] | None]:
        ours: dict[str, Any] = {}
        for each in getattr(self.connector, "_connectors", ()):  # MultiConnector's children
            if end_request := getattr(each, "end_request", None):
                ours |= end_request(request) or {}
        delays_free, theirs = original(self, request)
        return delays_free, {**ours, **(theirs or {})} if ours else theirs

    scheduler_class._connector_finished = connector_finished


def copy_before_sleep(worker_module: Any) -> None:
    """Have a worker that is put to sleep wait until our copies have been made.

    Reason: `NPUWorker.sleep` (worker/worker.py:216) unmaps the memory that was allocated with the weights, which the staging slots were,
    and a copy may still be waiting behind a full ring. No row is staged while the engine sleeps, and what a slot holds needs not be kept.

    Args:
        worker_module: the module `vllm_ascend.worker.worker`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    worker_class, original = require(worker_module, WORKER_MODULE, "NPUWorker", "sleep")

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
