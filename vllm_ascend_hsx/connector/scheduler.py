"""Scheduler side: choose the requests to extract, and their owner, file and start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_ascend_hsx.compat.engine import limit_prefix_cache, stopped_by_string
from vllm_ascend_hsx.connector.admission import Admission, Cost, Ranks, RefusalLog, RequestLimits
from vllm_ascend_hsx.connector.budget import DIRECTORY_FULL, DirectoryBudget, Reservation
from vllm_ascend_hsx.connector.metadata import (
    HsxConnectorMetadata,
    RankState,
    RequestEnd,
    RequestStart,
    WorkerReport,
    placeholders_in,
)
from vllm_ascend_hsx.connector.prefixes import PrefixIndex, PrefixReuse, Reuse
from vllm_ascend_hsx.connector.stats import HsxStats, SchedulerRecorder
from vllm_ascend_hsx.connector.weights import Computation, WeightHistory
from vllm_ascend_hsx.protocol.api import (
    ERROR_KEY,
    REUSED_KEY,
    VERSIONS_KEY,
    ParamsError,
    RequestParams,
    ServerParams,
    one_file_for_all,
    path_in_use,
    read_params,
)
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.request_ids import split_id
from vllm_ascend_hsx.protocol.weights import numbers_and_names
from vllm_ascend_hsx.sinks.base import REFUSED
from vllm_ascend_hsx.sinks.destination import Destination

_NOT_ENDED = (
    "an earlier request with this id or name has not ended, because the storage does not answer"
)


@dataclass
class _Request:
    path: str
    prompt_tokens: int
    cost: Cost
    include_output: bool
    arrived_ns: int
    placeholders: tuple[Placeholder, ...]
    keep_aborted: bool = False
    owner: int | None = None
    error: str | None = None
    decided: bool = False
    reuse: Reuse | None = None  # None if rows are not reused
    num_rows: int = 0  # rows of the prompt; the end adds rows of generated tokens
    reservation: Reservation | None = None  # None without a budget
    skips_cache: bool = False  # whether the request would read no prefix cache without extraction


class ExtractionScheduler:
    """Keep the state of all extracted requests, from arrival to end.

    Args:
        destination: destination of the rows.
        ranks: the ranks that can own requests.
        params: settings for the parameters of requests.
        limits: limits of one API request; None for no limits.
        prefixes: index of files that are kept open for requests with the same first tokens; None
            if each request computes all rows.
        fingerprint: fingerprint of the weights that were loaded; empty if unknown.
        budget: limits the bytes of all files; None for no limit.

    Attributes:
        weights: the versions of the weights that compute rows.
    """

    def __init__(
        self,
        destination: Destination,
        ranks: Ranks,
        params: ServerParams,
        limits: RequestLimits | None = None,
        prefixes: PrefixIndex | None = None,
        fingerprint: str = "",
        budget: DirectoryBudget | None = None,
    ) -> None:
        self.weights = WeightHistory(fingerprint)
        self._destination = destination
        self._row_bytes = ranks.row_bytes
        self._params = params
        self._limits = limits
        self._budget = budget
        self._requests: dict[str, _Request] = {}
        self._refused: dict[str, tuple[str, str]] = {}  # reason and kind
        self._refusals = RefusalLog()
        self._ended: list[RequestEnd] = []
        self._undecided: dict[str, _Request] = {}  # requests that have ended
        self._undecided_paths: dict[str, _Request] = {}  # the same by path
        self._writing: dict[str, _Request] = {}  # by path: not ended, and not decided
        self._recorder = SchedulerRecorder()
        description = str(destination.directory or "the Mooncake store")
        self._admission = Admission(ranks, description, self._recorder)
        self._loads = self._admission.loads
        self._reuse = (
            None if prefixes is None else PrefixReuse(prefixes, self._loads, self._row_bytes)
        )
        self._stopping = False

    def beside_others(self) -> None:
        """Accept parameters of requests that another connector reads."""
        self._params = replace(self._params, has_others=True)

    def on_new_request(self, request: Any) -> None:
        """Decide whether to extract a request. If so, limit how much of the prefix cache it reads.

        Args:
            request: vllm.v1.request.Request that has just entered the waiting queue.
        """
        if request.pooling_params is not None:
            return
        try:
            params = read_params(request.kv_transfer_params, self._params, request.request_id)
        except ParamsError as error:
            self._refuse(request.request_id, str(error))
            return
        if not params.extract:
            return
        path = str(params.path or self._destination.of(request.request_id))
        prompt_tokens = len(request.prompt_token_ids or ())
        output_rows = max(0, request.max_tokens - 1) if params.include_output else 0
        if reason := self._refusal(request, params, path, prompt_tokens + output_rows):
            self._refuse(request.request_id, reason)
        else:
            # Hashes of cached blocks have an adapter's name, but not the weights; see PrefixReuse.
            reuse = (
                None
                if self._reuse is None or request.lora_request is not None
                else self._reuse.new()
            )
            state = _Request(
                path,
                prompt_tokens,
                Cost(prompt_tokens * self._row_bytes, output_rows * self._row_bytes),
                params.include_output,
                int(request.arrival_time * 1e9),
                placeholders_in(request),
                params.keep_aborted,
                reuse=reuse,
                num_rows=prompt_tokens,
            )
            if self._budget is not None:
                state.reservation = self._budget.reservation(
                    request, state.placeholders, prompt_tokens + output_rows
                )
                state.skips_cache = request.skip_reading_prefix_cache
                if self._has_space(state) is False:
                    self._refuse_without_space(request, state)
                    return
            self._requests[request.request_id] = self._writing[path] = state
            # Tokens that are read from the prefix cache are not computed and make no rows.
            # Requests that are not extracted read the cache without limits.
            if reuse is None:
                request.skip_reading_prefix_cache = True
            else:
                limit_prefix_cache(request, self.reusable_rows)

    def _has_space(self, state: _Request) -> bool | None:
        """Return whether the directory has space for a request, or None while ranks check."""
        if self._budget is None or state.reservation is None or state.reservation.reserved:
            return True
        return self._budget.admits(state.reservation, self._rank_states)

    def _refuse_without_space(self, request: Any, state: _Request) -> None:
        assert self._budget is not None and state.reservation is not None
        reason = self._budget.refusal(state.reservation, self._rank_states)
        self._refuse(request.request_id, reason, DIRECTORY_FULL)

    @property
    def _rank_states(self) -> list[RankState]:
        return [load.state for load in self._loads]

    def _refusal(self, request: Any, params: RequestParams, path: str, num_rows: int) -> str | None:
        if request.prompt_token_ids is None:
            return "prompt_embeds have no token ids to store; send token ids or text"
        if others := {item.modality for item in request.mm_features} - {"image"}:
            return (
                f"a prompt with {' and '.join(sorted(others))} is not extracted; images are the "
                "only supported media"
            )
        if request.resumable:
            return "streaming input is not supported; send the whole prompt at once"
        if params.path is not None and not set(split_id(request.request_id)[1]) <= {"", "0"}:
            return one_file_for_all(path)
        # The worker would detect this by the lock, if locks are enabled. The scheduler refuses
        # the request before anything is computed.
        if path in self._writing:
            return path_in_use(path)
        return None if self._limits is None else self._limits.refusal(request.request_id, num_rows)

    def _refuse(self, request_id: str, reason: str, kind: str = REFUSED) -> None:
        self._refused[request_id] = reason, kind
        self._refusals.add(request_id, reason)

    def extracts(self, request_id: str) -> bool:
        """Return whether the request is extracted."""
        return request_id in self._requests

    def reusable_rows(self, request: Any, block_size: int) -> int:
        """Return the number of first tokens that a request may read from the prefix cache.

        vLLM calls this for each request that could start or resume, before `must_wait`.

        Args:
            request: vllm.v1.request.Request that is extracted.
            block_size: tokens of each block in `request.block_hashes`.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.decided:  # no more rows are needed
            return int(request.num_tokens)
        assert self._reuse is not None and state.reuse is not None
        if state.owner is not None:
            return self._reuse.resume(state.reuse)
        return self._reuse.offer(state.reuse, request, state.prompt_tokens, block_size)

    def must_wait(self, request: Any, num_computed_tokens: int = 0) -> bool:
        """Return whether the request must wait because storage could not take the rows in time.

        The request also waits behind an earlier extracted request that waits, and for rows that
        another request is computing.

        Args:
            request: vllm.v1.request.Request in the waiting queue.
            num_computed_tokens: first tokens in the prefix cache; see `reusable_rows`.
        """
        state = self._requests.get(request.request_id)
        if (
            state is None
            or state.owner is not None
            or self._admission.is_promised(request.request_id)
        ):
            return False
        # Workers report with steps, so a file may have been finished while the engine was idle. The
        # next step reports this. Until then, an outcome could be attributed to the wrong request of
        # this id, and a worker could refuse a name that is about to be free.
        if (
            before := self._undecided.get(request.request_id)
            or self._undecided_paths.get(state.path)
        ) is not None:
            assert before.owner is not None
            if not self._loads[before.owner].state.unresponsive:
                return True
            self._admission.stop_holding(request.request_id)
            self._release(self._requests.pop(request.request_id))
            self._refuse(request.request_id, _NOT_ENDED)
            return False
        if (has_space := self._has_space(state)) is None:
            return True
        if not has_space:
            self._release(self._requests.pop(request.request_id))
            self._refuse_without_space(request, state)
            request.skip_reading_prefix_cache = state.skips_cache
            return True  # the next step reads the prefix cache without limits
        if state.reuse is not None and state.reuse.waits:
            return True
        rank = self._rank_for(state, num_computed_tokens)
        return not self._admission.admit(request, rank, self._cost(state, num_computed_tokens))

    def build_metadata(self, scheduler_output: Any) -> HsxConnectorMetadata:
        """Return the message to the workers for this step.

        Args:
            scheduler_output: vllm.v1.core.sched.output.SchedulerOutput; not modified.
        """
        metadata = HsxConnectorMetadata(
            ended=self._ended,
            stats_wanted=self._recorder.has_news,
            unresponsive=self._admission.unresponsive,
        )
        self._ended = []
        if self._reuse is not None:
            metadata.released = self._reuse.take_released()
        started = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None and request.owner is None:
                started.append((new, request))
                if not self._admission.is_promised(new.req_id):
                    num_computed = new.num_computed_tokens
                    self._admission.promise(
                        new.req_id,
                        self._rank_for(request, num_computed),
                        self._cost(request, num_computed),
                    )
        starts = self._admission.start([new.req_id for new, _ in started])
        for new, request in started:
            request.owner, request.cost = starts[new.req_id]
            metadata.started.append(self._start(new, request, request.owner))
        if self._budget is not None:
            metadata.check = self._budget.check
        metadata.weights = self.weights.follow(scheduler_output)
        return metadata

    def _start(self, new: Any, request: _Request, rank: int) -> RequestStart:
        if (
            self._budget is not None
            and request.reservation is not None
            and not request.reservation.reserved
        ):
            self._budget.reserve(request.reservation)  # vLLM did not call `must_wait`
        start = RequestStart(
            new.req_id,
            request.path,
            rank,
            np.asarray(new.prompt_token_ids, dtype=np.int64),
            request.include_output,
            request.arrived_ns,
            new.lora_request,
            request.placeholders,
            weights=self.weights.start(
                new.req_id, None if request.include_output else request.prompt_tokens
            ),
        )
        if self._reuse is None or request.reuse is None:
            return start
        prefix = self._reuse.start(
            request.reuse, rank, new.num_computed_tokens, request.include_output
        )
        if prefix is not None:
            self._recorder.reused(prefix.num_rows)
        keeps_source = self._reuse.keeps_source(request.reuse, request.include_output)
        return replace(start, number=request.reuse.number, prefix=prefix, keeps_source=keeps_source)

    def reset_prefixes(self) -> None:
        """Forget all rows computed so far, because the prefix cache is reset."""
        if self._reuse is not None:
            self._reuse.reset()

    def prefix_cache_is_empty(self) -> None:
        """Record that the prefix cache was reset."""
        if self._reuse is not None:
            self._reuse.prefix_cache_is_empty()

    def weights_may_change(self) -> None:
        """Begin a version of the weights. Reuse no rows until the prefix cache is reset."""
        self.weights.may_change()
        if self._reuse is not None:
            self._reuse.weights_may_change()

    def on_worker_report(self, report: WorkerReport) -> None:
        """Record finished files and the progress of the ranks."""
        for rank, state in report.ranks.items():
            self._loads[rank].report(state)
            if state.needs_space and self._reuse is not None:
                self._reuse.release_files_of(rank)
        for request_id, error in report.outcomes.items():
            request = self._undecided.pop(request_id, None) or self._requests.get(request_id)
            if request is not None and self._undecided_paths.get(request.path) is request:
                del self._undecided_paths[request.path]
            if request is not None and request.owner is not None and not request.decided:
                request.decided, request.error = True, error
                self._admission.end(request.owner, request.cost)
                self._release(request)
                if self._reuse is not None and request.reuse is not None:
                    has_open_source = request.reuse.number in report.sources
                    self._reuse.decide(
                        request.reuse, request.owner, request.num_rows, has_open_source
                    )
                    if error is not None:
                        self._reuse.fail(request.reuse)

    def take_stats(self) -> HsxStats | None:
        """Return the scheduler's statistics since the last call, or None if there are none."""
        return self._recorder.take()

    def server_stops(self) -> None:
        """Treat later aborts as caused by the server's stop, not by clients.

        Workers do not learn of these aborts. At `close`, they publish a reason for each unfinished
        request.
        """
        self._stopping = True

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """Process the end of the request, scheduled or not.

        Returns:
            The response's `kv_transfer_params`: the location of the rows, and the error if already
            known. None if there is nothing to report, and for a request that has ended before.
        """
        request_id = request.request_id
        if refused := self._refused.pop(request_id, None):
            self._recorder.refused(refused[1])
            return {ERROR_KEY: refused[0]}
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        if state.owner is None:
            self._release(state)
            self._admission.stop_holding(request_id)
            return None
        self._release_name(state)
        computation = self.weights.end(request_id)
        if self._stopping and request.status.name == "FINISHED_ABORTED":
            return None
        end = self._end_of(request, state, computation)
        self._ended.append(end)
        if self._budget is not None and state.reservation is not None and not state.decided:
            self._budget.limit(state.reservation, max(state.num_rows, end.most_kept))
        if not state.decided:
            self._undecided[request_id] = self._undecided_paths[state.path] = state
        answer = self._destination.answer(state.path, state.num_rows, state.include_output)
        answer[VERSIONS_KEY] = numbers_and_names(computation.versions)
        if state.reuse is not None and state.reuse.tokens:
            answer[REUSED_KEY] = state.reuse.tokens
        if state.error is not None:
            answer[ERROR_KEY] = state.error
        return answer

    def _end_of(self, request: Any, state: _Request, computation: Computation) -> RequestEnd:
        """Return the message to the owner, and count the rows of generated tokens."""
        aborted = request.status.name == "FINISHED_ABORTED" and not stopped_by_string(request)
        end = RequestEnd(request.request_id, aborted=aborted)
        if aborted and state.keep_aborted:
            return _keeping(end, request, state, computation)
        if aborted or not state.include_output:
            return end
        output_token_ids = np.asarray(request.output_token_ids[:-1], dtype=np.int64)
        state.num_rows += len(output_token_ids)
        if self._reuse is not None and state.reuse is not None:
            self._reuse.end(state.reuse, request, state.num_rows)
        return replace(end, output_token_ids=output_token_ids)

    def _release(self, request: _Request) -> None:
        """Release the name and the reservation of a request that makes no more rows."""
        self._release_name(request)
        if self._budget is not None and request.reservation is not None:
            self._budget.end(request.reservation)

    def _release_name(self, request: _Request) -> None:
        if self._writing.get(request.path) is request:
            del self._writing[request.path]

    def _rank_for(self, request: _Request, num_computed_tokens: int) -> int:
        """Return the rank with the source of the first rows, else the least loaded rank."""
        source = None if request.reuse is None else request.reuse.source
        return (
            source.rank
            if source is not None and num_computed_tokens
            else self._admission.least_loaded()
        )

    def _cost(self, request: _Request, num_computed_tokens: int) -> Cost:
        return request.cost._replace(
            prompt=(request.prompt_tokens - num_computed_tokens) * self._row_bytes
        )


def _keeping(
    end: RequestEnd, request: Any, state: _Request, computation: Computation
) -> RequestEnd:
    """Return the end of an aborted request whose rows are kept.

    Args:
        end: the end without rows.
        request: vllm.v1.request.Request.
        state: the request's state.
        computation: the weights that computed the rows.
    """
    generated = np.asarray(
        request.output_token_ids[:] if state.include_output else [], dtype=np.int64
    )
    most_kept = (
        request.num_computed_tokens
        if computation.restarted
        else state.prompt_tokens + len(generated)
    )
    return replace(end, output_token_ids=generated, most_kept=most_kept)
