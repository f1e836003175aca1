"""Preemption, KV loading, answers and sleep of an engine that extracts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import BEFORE_0_30, SINCE_0_23, V0_23, V0_26
from vllm_ascend_hsx.config import CONNECTOR_NAME
from vllm_ascend_hsx.protocol.api import ERROR_KEY

BALANCE_SCHEDULE = "vllm_ascend.patch.platform.patch_balance_schedule"
MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
OUTPUTS = "vllm.v1.engine.output_processor"
COMPLETIONS = "vllm.entrypoints.openai.completion.serving"
KV_C8 = "vllm_ascend.quantization.methods.kv_c8"
SCHEDULER = "vllm.v1.core.sched.scheduler"
KV_CACHE = "vllm.v1.core.kv_cache_manager"
KV_DELIVERY = "vllm_ascend.patch.platform.patch_kv_delivery_preemption"
KV_TRANSFER = "vllm.distributed.kv_transfer"
RECOMPUTE = "vllm_ascend.core.recompute_scheduler"

_ENGINES = "hsx_data_parallel_size"
_NAMES_FAILURE = "a response names the failure of the file"


class Share(NamedTuple):
    """One rank and the number of ranks.

    Attributes:
        number, of: the rank, from 0, and the number of ranks.
    """

    number: int
    of: int


def remember_engines(parallel: Any) -> None:
    """Remember the number of data-parallel ranks in vllm.config.ParallelConfig.

    Reason: an engine whose target has no experts sets the number to 1 before it creates the
    connector (v1/engine/core.py:1161, 0.23.0). The rank stays in `data_parallel_index`.
    """
    if not hasattr(parallel, _ENGINES):
        setattr(parallel, _ENGINES, parallel.data_parallel_size)


def engine_of(parallel: Any) -> Share:
    """Return the data-parallel rank of this process, and the number of data-parallel ranks."""
    return Share(parallel.data_parallel_index, getattr(parallel, _ENGINES))


def methods(connector: Any, name: str) -> Iterator[Any]:
    """Yield a method of our connector, alone or as a child of MultiConnector."""
    for each in getattr(connector, "_connectors", [connector]):
        if method := getattr(each, name, None):
            yield method


@patch(
    BALANCE_SCHEDULE,
    "_disable_preemption_on_prefill_node",
    V0_23,
    why="requests are preempted when the KV cache is full",
)
def keep_preemption(original: Any, vllm_config: Any) -> bool:
    """Allow vLLM's scheduler to preempt requests although `kv_role` is `kv_producer`.

    Reason: vllm-ascend takes every producer for the prefill side of a disaggregated pair, where
    requests never decode, and disables preemption (patch/platform/patch_balance_schedule.py:47 in
    0.23.0). On a server that extracts, requests may decode; if they filled the KV cache, the server
    would hang. We hold no KV block, so preempting is safe. Another producer in MultiConnector may
    hold some; then vllm-ascend's choice stays. Since 0.26 vLLM asks the connector
    (`requires_kv_delivery`).
    """
    transfer = vllm_config.kv_transfer_config
    ours = transfer is not None and transfer.kv_connector == CONNECTOR_NAME
    return not ours and bool(original(vllm_config))


@patch(
    KV_C8,
    "AscendC8KVCacheAttentionMethod.create_weights",
    V0_23,
    why="targets with an int8 KV cache compute with it",
)
def keep_int8_cache(original: Any, self: Any, layer: Any) -> None:
    """Make a target with an int8 KV cache (C8) compute with it although `kv_role` is `kv_producer`.

    Reason: vllm-ascend takes every producer for the prefill side of a disaggregated pair, where KV
    is sent unquantised. The cache then has the target's dtype (quantization/methods/kv_c8.py:117 in
    0.23.0), and decodes compute nothing: their output is uninitialised memory
    (attention/attention_v1.py:1611). We send no KV. Another producer in MultiConnector does; then
    vllm-ascend's choice stays.
    """
    transfer = layer.impl.vllm_config.kv_transfer_config
    ours = transfer is not None and transfer.kv_connector == CONNECTOR_NAME
    if ours:
        self.is_kv_producer = False
    original(self, layer)
    if ours:
        config = layer.impl.vllm_config = copy.copy(layer.impl.vllm_config)
        config.kv_transfer_config = None  # the layer reads this when it computes


@patch(
    MULTI_CONNECTOR,
    "MultiConnector.__init__",
    SINCE_0_23,
    why="misspelt request parameters are refused",
)
def name_other_connectors(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Notify our connector that other connectors read request parameters, too.

    Reason: each connector gets a configuration that names only itself (multi_connector.py:225).
    """
    original(self, *args, **kwargs)
    if len(self._connectors) > 1:
        for beside_others in methods(self, "beside_others"):
            beside_others()


@patch(
    MULTI_CONNECTOR,
    "MultiConnector.get_num_new_matched_tokens",
    SINCE_0_23,
    why="extracted tokens are computed although another connector could load them",
)
def compute_extracted_tokens(
    original: Any, self: Any, request: Any, num_computed_tokens: int
) -> tuple[int | None, bool]:
    """Keep other connectors in MultiConnector from loading KV for an extracted request.

    Reason: loaded tokens are not computed and have no rows. `skip_reading_prefix_cache` excludes
    vLLM's own prefix cache (v1/core/kv_cache_manager.py:212), but no connector reads it. The others
    are still asked and then not chosen. They are prepared for this, because it happens whenever two
    of them offer tokens (multi_connector.py:397). vllm-ascend's MultiConnector inherits the method.
    """
    tokens, load_async = original(self, request, num_computed_tokens)
    if tokens and any(extracts(request) for extracts in methods(self, "extracts")):
        self._requests_to_connector.pop(request.request_id, None)
        return 0, False
    return tokens, load_async


_REUSES = "extracted requests read the prefix cache only as far as their rows are reusable"
_FORGETS = "rows of earlier weights are not reused"


class _Limited:
    """A request that may read only the first tokens, for KVCacheManager.get_computed_blocks."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens + 1  # the last token of a request is always computed
        self.skip_reading_prefix_cache = not num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def limit_prefix_cache(request: Any, reusable_rows: Callable[[Any, int], int]) -> None:
    """Limit an extracted request's prefix cache hits to tokens with reusable rows.

    Args:
        request: vllm.v1.request.Request.
        reusable_rows: called with the request and the number of tokens per block of
            `request.block_hashes` whenever the request could start or resume. Returns the number of
            first tokens that may be read.
    """
    request.hsx_reusable_rows = reusable_rows


@patch(KV_CACHE, "KVCacheManager.get_computed_blocks", SINCE_0_23, why=_REUSES)
def read_where_rows_are(original: Any, self: Any, request: Any) -> Any:
    """Read the prefix cache for an extracted request only as far as the rows are reusable.

    Reason: tokens that are read from the cache are not computed and make no rows. vLLM offers all
    or nothing (`skip_reading_prefix_cache`), but generated tokens and requests without extraction
    add entries to the cache for which there are no rows (v1/core/kv_cache_manager.py:196 in
    0.23.0). In the statistics of the prefix cache such a request counts with the tokens that it may
    read.
    """
    reusable_rows = getattr(request, "hsx_reusable_rows", None)
    if reusable_rows is None or not self.enable_caching or request.skip_reading_prefix_cache:
        return original(self, request)
    num_tokens = reusable_rows(request, self.block_pool.hash_block_size)
    return original(
        self, request if num_tokens >= request.num_tokens else _Limited(request, num_tokens)
    )


@patch(SCHEDULER, "Scheduler.reset_prefix_cache", SINCE_0_23, why=_FORGETS)
@patch(KV_DELIVERY, "KVDeliveryScheduler.reset_prefix_cache", V0_26, why=_FORGETS)
def reset_rows_with_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make our connector drop reusable rows when the prefix cache is reset.

    Reason: a reset follows a change of weights, but vLLM notifies connectors only on request
    (`reset_connector`, v1/core/sched/scheduler.py:1988 in 0.23.0). vllm-ascend 0.26's scheduler has
    a copy of the method (patch/platform/patch_kv_delivery_preemption.py:1190).
    """
    for reset_prefixes in methods(self.connector, "reset_prefixes"):
        reset_prefixes()
    is_empty = original(self, *args, **kwargs)
    if is_empty:
        for prefix_cache_is_empty in methods(self.connector, "prefix_cache_is_empty"):
            prefix_cache_is_empty()
    return is_empty


@patch(SCHEDULER, "Scheduler.update_from_output", SINCE_0_23, why=_NAMES_FAILURE)
@patch(KV_DELIVERY, "KVDeliveryScheduler.update_from_output", V0_26, why=_NAMES_FAILURE)
@patch(RECOMPUTE, "RecomputeScheduler.update_from_output", BEFORE_0_30, why=_NAMES_FAILURE)
def report_before_answers(
    original: Any, self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Give our connector the workers' report of a step before the step's requests are answered.

    Reason: `Scheduler.update_from_output` ends requests, and asks the connector for their answers,
    before it passes on the report of the workers (v1/core/sched/scheduler.py:1526 and 1597 in
    0.23.0). If the file of a one-step prompt could not be opened, the answer would still name it.
    vllm-ascend 0.26 replaces vLLM's scheduler with one that has a copy of the method
    (patch/platform/patch_kv_delivery_preemption.py:833). Before 0.30 the scheduler of decoding
    nodes that recompute has a copy, too (core/recompute_scheduler.py:831 in 0.23.0). The report is
    then passed on twice; the second time changes nothing.
    """
    output = model_runner_output.kv_connector_output
    meta = None if output is None else output.kv_connector_worker_meta
    if meta is not None:
        # MultiConnector's report has one report per child.
        children = getattr(self.connector, "_connectors", None)
        pairs = (
            [(self.connector, meta)]
            if children is None
            else zip(children, meta.metadata, strict=True)
        )
        for connector, report in pairs:
            if take_report := getattr(connector, "take_report", None):
                take_report(report)
    return original(self, scheduler_output, model_runner_output)


@patch(
    SCHEDULER,
    "Scheduler._connector_finished",
    SINCE_0_23,
    why="a response names the file beside another connector's answer",
)
def answer_beside_others(
    original: Any, self: Any, request: Any
) -> tuple[bool, dict[str, Any] | None]:
    """Make a response name our file when another connector in MultiConnector answers too.

    Reason: a connector that sends KV to a decoding server answers with the address of the KV.
    MultiConnector, vllm-ascend's too, stops the engine if there is a second answer
    (multi_connector.py:498; vllm-ascend's distributed/kv_transfer/ascend_multi_connector.py:94). So
    our answer is taken before MultiConnector asks, and our connector has none left. If both answers
    have a key, the other connector's value stays.
    """
    ours: dict[str, Any] = {}
    if hasattr(self.connector, "_connectors"):
        for end_request in methods(self.connector, "end_request"):
            ours |= end_request(request) or {}
    delays_free, theirs = original(self, request)
    return delays_free, {**ours, **(theirs or {})} if ours else theirs


@patch(
    OUTPUTS,
    "RequestState.make_request_output",
    SINCE_0_23,
    why="a response names the errors of all its samples",
)
def name_errors_of_samples(
    original: Any,
    self: Any,
    new_token_ids: Any,
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make the response to a request with n > 1 name the errors of all samples.

    Reason: each sample is a separate request, and the response has the kv_transfer_params of the
    last one to end (v1/engine/output_processor.py:329).
    """
    answer, parent = kv_transfer_params or {}, self.parent_req
    if parent is not None and ERROR_KEY in answer:
        errors: dict[str, list[int]] = parent.__dict__.setdefault("_hsx_errors", {})
        errors.setdefault(answer[ERROR_KEY], []).append(self.request_index)
    if finish_reason is not None and (errors := getattr(parent, "_hsx_errors", {})):
        kv_transfer_params = {**answer, ERROR_KEY: _counted(errors, f"of {parent.n} samples")}
    return original(
        self,
        new_token_ids,
        pooling_output,
        finish_reason,
        stop_reason,
        kv_transfer_params,
        *args,
        **kwargs,
    )


@patch(
    COMPLETIONS,
    "OpenAIServingCompletion.request_output_to_completion_response",
    SINCE_0_23,
    why="a response names the errors of all its prompts",
)
def name_errors_of_prompts(
    original: Any, self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Make the response to several prompts name the errors of all prompts.

    Reason: the response has the kv_transfer_params of the first prompt
    (entrypoints/openai/completion/serving.py:594).
    """
    errors: dict[str, list[int]] = {}
    for index, prompt in enumerate(final_res_batch):
        if error := (prompt.kv_transfer_params or {}).get(ERROR_KEY):
            errors.setdefault(error, []).append(index)
    if errors and len(final_res_batch) > 1:
        first = final_res_batch[0]
        first.kv_transfer_params = {
            **(first.kv_transfer_params or {}),
            ERROR_KEY: _counted(errors, f"of {len(final_res_batch)} prompts"),
        }
    return original(self, final_res_batch, *args, **kwargs)


def _counted(errors: dict[str, list[int]], of_all: str) -> str:
    """Return each error with its count, the total and the first index that has it."""
    return "; ".join(
        f"{len(which)} {of_all} (first: {min(which)}): {error}" for error, which in errors.items()
    )


_SLEEP = "rows and the matrix of a rotated target survive sleep"
_ROWS = f"rows reach the connector, and {_SLEEP}"
uses(KV_TRANSFER, "has_kv_transfer_group", SINCE_0_23, takes="", why=_ROWS)
uses(KV_TRANSFER, "get_kv_transfer_group", SINCE_0_23, takes="", why=_ROWS)


@patch("vllm_ascend.worker.worker", "NPUWorker.sleep", SINCE_0_23, why=_SLEEP)
def copy_before_sleep(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy our device memory to the host before a worker sleeps.

    Reason: `NPUWorker.sleep` (worker/worker.py:216) unmaps all memory allocated with the weights.
    This includes staging slots (they may still hold rows that wait for space in the ring) and the
    matrix of a rotated target. Level 2 restores only the target's buffers. No row is staged while
    the engine sleeps, so the contents of a slot need not be kept. The memory cannot be allocated
    with the tag `sleep_persistent` (device_allocator/camem.py:138): a tag belongs to a segment, and
    torch_npu places most tensors in a segment that already has one.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        for before_sleep in methods(get_kv_transfer_group(), "before_sleep"):
            before_sleep()
    return original(self, *args, **kwargs)


def stopped_by_string(request: Any) -> bool:
    """Return True if a request aborted while generating may have ended at a stop string.

    The API server detects stop strings, because it has the text, and then aborts the request
    exactly as if the client had disconnected (vllm/v1/engine/output_processor.py, 0.23.0). So a
    file may be published although the client is gone. Otherwise files would be discarded while
    clients wait for them.
    """
    return bool(
        request.num_output_tokens
        and request.sampling_params is not None
        and request.sampling_params.stop
    )
