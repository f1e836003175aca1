"""Scheduler side: which requests are extracted, by which rank, into which file, and when new ones have to wait."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_ascend_hsx.connector.admission import Cost, RankLoad
from vllm_ascend_hsx.connector.limits import RequestLimits
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart, WorkerReport
from vllm_ascend_hsx.connector.reminder import Reminder
from vllm_ascend_hsx.connector.stats import HsxStats, SchedulerRecorder
from vllm_ascend_hsx.protocol.api import ERROR_KEY, PATH_KEY, ParamsError, ServerParams, read_params, shown
from vllm_ascend_hsx.sinks.destination import Destination

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_HELD_LONG_S = 5.0  # after which the log says that requests are held back
# A request's place among those that are held back: what vLLM calls its priority, its arrival, and its id.
_Place = tuple[int, float, str]


@dataclass
class _Request:
    path: str
    prompt_tokens: int
    cost: Cost
    max_output_rows: int
    include_output: bool
    owner: int | None = None
    error: str | None = None
    decided: bool = False
    ended: bool = False
    place: _Place | None = None  # while it is held back
    predecessor: _Request | None = None  # which has ended, with a file of the same name that was not decided yet


class ExtractionScheduler:
    """The state of every request that is extracted, from its arrival to its end.

    Args:
        destination: where rows go.
        row_bytes: bytes of one token's rows, all layers.
        num_ranks: tensor-parallel ranks; each can own requests.
        ring_bytes: memory of a rank in which rows wait until they are written.
        include_output: whether rows of generated tokens are wanted of requests that do not say so themselves.
        allow_path: whether a request may choose its file.
        extract_all: whether requests that say nothing of hidden states are extracted.
        limits: how much one API request may store; None for as much as it likes.
    """

    def __init__(
        self,
        destination: Destination,
        row_bytes: int,
        num_ranks: int,
        ring_bytes: int,
        include_output: bool = False,
        allow_path: bool = False,
        extract_all: bool = True,
        limits: RequestLimits | None = None,
    ) -> None:
        self._destination = destination
        self._row_bytes = row_bytes
        self._params = ServerParams(destination.directory, include_output, allow_path, extract_all)
        self._limits = limits
        self._requests: dict[str, _Request] = {}
        self._refused: dict[str, str] = {}
        self._ended: list[RequestEnd] = []
        self._undecided: dict[str, _Request] = {}  # that have ended
        self._writing: dict[str, _Request] = {}  # by the path of its file, until that is decided
        self._outstanding = [0] * num_ranks
        self._loads = tuple(RankLoad(ring_bytes, row_bytes) for _ in range(num_ranks))
        self._promised: dict[str, int] = {}  # the rank of those that were let through since the last step
        self._held: list[_Place] = []  # in order
        self._reminder = Reminder(_HELD_LONG_S)
        self._recorder = SchedulerRecorder()
        self._stopping = False

    def on_new_request(self, request: Any) -> None:
        """Decide whether the request is extracted; if so, have it compute every one of its rows.

        Args:
            request: vllm.v1.request.Request, which has just entered the waiting queue.
        """
        if request.pooling_params is not None:
            return
        try:
            params = read_params(request.kv_transfer_params, self._params)
        except ParamsError as error:
            self._refused[request.request_id] = str(error)
            return
        if not params.extract:
            return
        path = str(params.path or self._destination.of(request.request_id))
        prompt_tokens = len(request.prompt_token_ids or ())
        output_rows = max(0, request.max_tokens - 1) if params.include_output else 0
        if request.prompt_token_ids is None:
            self._refused[request.request_id] = "prompt_embeds have no token ids to store; send token ids or text"
        elif request.resumable:
            self._refused[request.request_id] = "streaming input is not supported; send the whole prompt at once"
        elif (other := self._writing.get(path)) is not None and not other.ended:
            # The worker would see it by the lock, if the server has one; here it is known before anything is computed.
            self._refused[request.request_id] = (
                f"kv_transfer_params.{PATH_KEY} is {shown(path)}, which another request is writing; choose another name"
            )
        elif self._limits is not None and (reason := self._limits.refusal(request.request_id, prompt_tokens + output_rows)):
            self._refused[request.request_id] = reason
        else:
            self._requests[request.request_id] = self._writing[path] = _Request(
                path,
                prompt_tokens,
                Cost(prompt_tokens * self._row_bytes, output_rows * self._row_bytes),
                output_rows,
                params.include_output,
                predecessor=other,
            )
            # A cached prefix is not computed, so its rows would be missing. Other requests go on using the prefix cache.
            request.skip_reading_prefix_cache = True

    def extracts(self, request_id: str) -> bool:
        """Whether the request is to be extracted."""
        return request_id in self._requests

    def must_wait(self, request: Any) -> bool:
        """Whether the request is to be extracted and storage could not take its rows in time, or those of one that waits already.

        Args:
            request: vllm.v1.request.Request, which is in the waiting queue.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.owner is not None or request.request_id in self._promised:
            return False
        # Workers report with steps: a file may have been decided while the engine had nothing to do. The next step tells.
        if request.request_id in self._undecided:  # what is reported of that one would be taken for this one's outcome
            return True
        if (before := state.predecessor) is not None and not before.decided:
            assert before.owner is not None
            if not self._loads[before.owner].state.stuck:
                return True
        place = (request.priority, request.arrival_time, request.request_id)
        rank = self._least_loaded()
        load = self._loads[rank]
        # Nobody overtakes: where large requests wait, there would always be room for a small one. vLLM asks for new ones first.
        first = not self._held or place <= self._held[0]
        # A rank whose storage does not answer refuses the request at once: that is better than to wait for nobody knows how long.
        if load.state.stuck or (first and load.admits(state.cost)):
            self._stop_holding(state)
            load.promise(state.cost)
            self._promised[request.request_id] = rank
            self._outstanding[rank] += sum(state.cost)
            return False
        if state.place is None:
            state.place = place
            insort(self._held, place)
            self._reminder.begin()
            self._recorder.held(request.request_id)
        return True

    def build_metadata(self, scheduler_output: Any) -> HsxConnectorMetadata:
        """What the workers have to know of this step.

        Args:
            scheduler_output: vllm.v1.core.sched.output.SchedulerOutput; not modified.
        """
        if self._held and self._reminder.due_in() == 0:
            self._warn_of_held()
        metadata = HsxConnectorMetadata(ended=self._ended, stats_wanted=self._recorder.has_news)
        self._ended = []
        promised, self._promised = self._promised, {}
        started: list[list[Cost]] = [[] for _ in self._loads]
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None and request.owner is None:
                rank = promised.pop(new.req_id, None)
                if rank is None:
                    rank = self._least_loaded()
                    self._outstanding[rank] += sum(request.cost)
                request.owner = rank
                started[rank].append(request.cost)
                token_ids = np.asarray(new.prompt_token_ids, dtype=np.int64)
                metadata.started.append(
                    RequestStart(new.req_id, request.path, rank, token_ids, request.include_output, request.max_output_rows)
                )
        for request_id, rank in promised.items():  # for which there was no room in the KV cache
            self._outstanding[rank] -= sum(self._requests[request_id].cost)
        for load, costs in zip(self._loads, started, strict=True):
            load.start(costs)
        return metadata

    def on_worker_report(self, report: WorkerReport) -> None:
        """Take note of files that were decided and of how far behind the ranks are."""
        for rank, state in report.ranks.items():
            self._loads[rank].report(state)
        for request_id, error in report.outcomes.items():
            request = self._undecided.pop(request_id, None) or self._requests.get(request_id)
            if request is not None and request.owner is not None and not request.decided:
                request.decided, request.error = True, error
                self._outstanding[request.owner] -= sum(request.cost)
                self._let_go_of(request)

    def take_stats(self) -> HsxStats | None:
        """For how long, since the last call, requests had to wait, and how many were refused; None if none."""
        return self._recorder.take()

    def server_stops(self) -> None:
        """Requests that are aborted from now on are not given up by their clients. Workers hear nothing of it: when they are closed, they
        leave the reason in place of each file that is not complete."""
        self._stopping = True

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended, for whatever reason, scheduled or not.

        Returns:
            What goes into the response as `kv_transfer_params`: where the rows are, and the error if it is known already. None if there
            is nothing to say, and for a request that has ended before.
        """
        request_id = request.request_id
        if reason := self._refused.pop(request_id, None):
            self._recorder.refused()
            return {ERROR_KEY: reason}
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        if state.owner is None:
            self._stop_holding(state)
            self._let_go_of(state)
            return None
        state.ended = True
        aborted = request.status.name == "FINISHED_ABORTED"
        if self._stopping and aborted:
            return None
        end = RequestEnd(request_id, aborted=aborted and not _stopped_by_string(request))
        if state.include_output and not end.aborted:
            end = replace(end, output_token_ids=np.asarray(request.output_token_ids[:-1], dtype=np.int64))
        self._ended.append(end)
        if not state.decided:
            self._undecided[request_id] = state
        answer = self._destination.answer(state.path, state.prompt_tokens + len(end.output_token_ids), state.include_output)
        if state.error is not None:
            answer[ERROR_KEY] = state.error
        return answer

    def _stop_holding(self, request: _Request) -> None:
        if request.place is not None:
            del self._held[bisect_left(self._held, request.place)]
            self._recorder.let_go(request.place[-1])
            request.place = None
            if not self._held:
                self._reminder.end()

    def _warn_of_held(self) -> None:
        rank = self._least_loaded()
        load = self._loads[rank]
        logger.warning(
            "slow storage: new requests have been held back for %.0f s, %d now, until what was admitted can be written to %s: "
            "at least %.1f MiB, of which %.1f MiB are computed, and it takes %.1f MiB/s. Faster storage, more pinned_ring_bytes or "
            "fewer layers let them through sooner.",
            self._reminder.seconds,
            len(self._held),
            self._destination.directory or "the Mooncake store",
            load.owed / _MIB,
            load.state.backlog / _MIB,
            (load.state.write_rate or 0) / _MIB,
        )
        self._reminder.told()

    def _let_go_of(self, request: _Request) -> None:
        before, request.predecessor = request.predecessor, None
        if self._writing.get(request.path) is request:
            if before is not None and not before.decided:
                self._writing[request.path] = before
            else:
                del self._writing[request.path]

    def _least_loaded(self) -> int:
        return min(range(len(self._outstanding)), key=self._outstanding.__getitem__)


def _stopped_by_string(request: Any) -> bool:
    """Whether a request that was aborted while it generated may have come to its end.

    Stop strings are looked for where the text is, in the API server, which then aborts the request in the scheduler just as it does for
    a client that has gone (vllm/v1/engine/output_processor.py, 0.23.0). So a file may be published that nobody waits for; the other
    choice would throw away what somebody does wait for.
    """
    return bool(request.num_output_tokens and request.sampling_params is not None and request.sampling_params.stop)
