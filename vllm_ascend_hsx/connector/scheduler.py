"""Scheduler side: choose the requests to extract, their owner rank and file, and their start."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_ascend_hsx.connector.admission import Cost, RankLoad
from vllm_ascend_hsx.connector.limits import RefusalLog, RequestLimits
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart, WorkerReport, placeholders_in
from vllm_ascend_hsx.connector.stats import HsxStats, SchedulerRecorder
from vllm_ascend_hsx.connector.storage_watch import Reminder
from vllm_ascend_hsx.protocol.api import (
    ERROR_KEY,
    ParamsError,
    RequestParams,
    ServerParams,
    one_file_for_all,
    path_in_use,
    read_params,
)
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.request_ids import split_id
from vllm_ascend_hsx.sinks.destination import Destination

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_HELD_LONG_S = 5.0  # seconds after which a log line reports held requests
# Sort key of a held request: priority, arrival time and id, as in vLLM.
_Place = tuple[int, float, str]


@dataclass
class _Request:
    path: str
    prompt_tokens: int
    cost: Cost
    max_output_rows: int
    include_output: bool
    arrived_ns: int
    placeholders: tuple[Placeholder, ...]
    owner: int | None = None
    error: str | None = None
    decided: bool = False
    ended: bool = False
    place: _Place | None = None  # set while the request is held
    # an ended request whose file has the same name and is not finished
    predecessor: _Request | None = None


class ExtractionScheduler:
    """The state of every extracted request, from its arrival to its end.

    Args:
        destination: destination of the rows.
        row_bytes: bytes of one token's rows, all layers.
        num_ranks: tensor-parallel ranks; each can own requests.
        ring_bytes: a rank's memory for rows that wait to be written.
        include_output: whether rows of generated tokens are extracted by default.
        allow_path: whether a request may choose its file.
        extract_all: whether requests are extracted by default.
        limits: limits on what one API request may store; None for no limits.
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
        self._refusals = RefusalLog()
        self._ended: list[RequestEnd] = []
        self._undecided: dict[str, _Request] = {}  # requests that have ended
        self._writing: dict[str, _Request] = {}  # by path, until the file is finished
        self._outstanding = [0] * num_ranks
        self._loads = tuple(RankLoad(ring_bytes, row_bytes) for _ in range(num_ranks))
        self._promised: dict[str, int] = {}  # ranks of requests admitted since the last step
        self._held: list[_Place] = []  # sorted
        self._reminder = Reminder(_HELD_LONG_S)
        self._recorder = SchedulerRecorder()
        self._stopping = False

    def on_new_request(self, request: Any) -> None:
        """Decide whether the request is extracted. If so, make it compute all of its rows.

        Args:
            request: vllm.v1.request.Request, which has just entered the waiting queue.
        """
        if request.pooling_params is not None:
            return
        try:
            params = read_params(request.kv_transfer_params, self._params)
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
            self._requests[request.request_id] = self._writing[path] = _Request(
                path,
                prompt_tokens,
                Cost(prompt_tokens * self._row_bytes, output_rows * self._row_bytes),
                output_rows,
                params.include_output,
                int(request.arrival_time * 1e9),
                placeholders_in(request),
                predecessor=self._writing.get(path),
            )
            # Rows of a cached prefix would not be computed. Other requests keep using the prefix
            # cache.
            request.skip_reading_prefix_cache = True

    def _refusal(self, request: Any, params: RequestParams, path: str, num_rows: int) -> str | None:
        if request.prompt_token_ids is None:
            return "prompt_embeds have no token ids to store; send token ids or text"
        if others := {item.modality for item in request.mm_features} - {"image"}:
            return f"a prompt with {' and '.join(sorted(others))} is not extracted; of media, only images are supported"
        if request.resumable:
            return "streaming input is not supported; send the whole prompt at once"
        if params.path is not None and not set(split_id(request.request_id)[1]) <= {"", "0"}:
            return one_file_for_all(path)
        # The worker would detect this by the lock, if locks are enabled. Here it is known before
        # anything is computed.
        if (other := self._writing.get(path)) is not None and not other.ended:
            return path_in_use(path)
        return None if self._limits is None else self._limits.refusal(request.request_id, num_rows)

    def _refuse(self, request_id: str, reason: str) -> None:
        self._refused[request_id] = reason
        self._refusals.add(request_id, reason)

    def extracts(self, request_id: str) -> bool:
        """Return whether the request is extracted."""
        return request_id in self._requests

    def must_wait(self, request: Any) -> bool:
        """Return whether the request must wait because storage could not take its rows in time.

        It also waits if an earlier extracted request waits.

        Args:
            request: vllm.v1.request.Request, which is in the waiting queue.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.owner is not None or request.request_id in self._promised:
            return False
        # Workers report with steps, so a file may have been finished while the engine was idle. The
        # next step reports it. Until then an outcome could be attributed to the wrong request of
        # this id.
        if (same := self._undecided.get(request.request_id)) is not None:
            assert same.owner is not None
            if not self._loads[same.owner].state.stuck:
                return True
            self._stop_holding(state)
            self._let_go_of(self._requests.pop(request.request_id))
            self._refuse(request.request_id, "an earlier request of this id has not ended, because the storage does not answer")
            return False
        if (before := state.predecessor) is not None and not before.decided:
            assert before.owner is not None
            if not self._loads[before.owner].state.stuck:
                return True
            rank = before.owner  # refuses it, and leaves the reason when that file has ended
        else:
            rank = self._least_loaded()
        place = (request.priority, request.arrival_time, request.request_id)
        load = self._loads[rank]
        # Requests start in order. If small ones could overtake, large ones would wait forever. vLLM
        # asks about new requests before held ones.
        first = not self._held or place <= self._held[0]
        # A rank whose storage is stuck refuses the request at once, so that it does not wait
        # indefinitely.
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
            self._recorder.held(len(self._held))
        return True

    def build_metadata(self, scheduler_output: Any) -> HsxConnectorMetadata:
        """Return the message to the workers for this step.

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
                    RequestStart(
                        new.req_id,
                        request.path,
                        rank,
                        token_ids,
                        request.include_output,
                        request.max_output_rows,
                        request.arrived_ns,
                        new.lora_request,
                        request.placeholders,
                    )
                )
        for request_id, rank in promised.items():  # did not fit into the KV cache
            self._outstanding[rank] -= sum(self._requests[request_id].cost)
        for load, costs in zip(self._loads, started, strict=True):
            load.start(costs)
        return metadata

    def on_worker_report(self, report: WorkerReport) -> None:
        """Record finished files and the progress of the ranks."""
        for rank, state in report.ranks.items():
            self._loads[rank].report(state)
        for request_id, error in report.outcomes.items():
            request = self._undecided.pop(request_id, None) or self._requests.get(request_id)
            if request is not None and request.owner is not None and not request.decided:
                request.decided, request.error = True, error
                self._outstanding[request.owner] -= sum(request.cost)
                self._let_go_of(request)

    def take_stats(self) -> HsxStats | None:
        """Return held time and refused requests since the last call, or None if there are none."""
        return self._recorder.take()

    def server_stops(self) -> None:
        """Treat later aborts as caused by the server's stop, not by clients.

        Workers do not learn of these. When closed, they leave a reason for each unfinished request.
        """
        self._stopping = True

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """Process the end of the request, for whatever reason, scheduled or not.

        Returns:
            The response's `kv_transfer_params`: where the rows are, and the error if it is already
            known. None if there is nothing to report, and for a request that has ended before.
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
            self._recorder.held(len(self._held))
            request.place = None
            if not self._held:
                self._reminder.end()

    def _warn_of_held(self) -> None:
        rank = self._least_loaded()
        load = self._loads[rank]
        logger.warning(
            "slow storage: new requests have been held back for %.0f s, %d now, until admitted "
            "requests can be written to %s: at least %.1f MiB, of which %.1f MiB are computed, "
            "and storage takes %.1f MiB/s. Use faster storage, raise pinned_ring_bytes or "
            "extract fewer layers.",
            self._reminder.seconds,
            len(self._held),
            self._destination.directory or "the Mooncake store",
            load.owed / _MIB,
            load.state.backlog / _MIB,
            (load.state.write_rate or 0) / _MIB,
        )
        self._reminder.logged()

    def _let_go_of(self, request: _Request) -> None:
        before, request.predecessor = request.predecessor, None
        if self._writing.get(request.path) is request:
            if before is not None and not before.decided:
                self._writing[request.path] = before
            else:
                del self._writing[request.path]

    def _least_loaded(self) -> int:
        """Return the rank that owes least, of those whose storage answers if there are any."""
        states = [load.state for load in self._loads]
        return min(range(len(states)), key=lambda rank: (states[rank].stuck, states[rank].quiet, self._outstanding[rank]))


def _stopped_by_string(request: Any) -> bool:
    """Return whether a request that was aborted while generating may have ended by a stop string.

    The API server looks for stop strings, because it has the text, and then aborts the request just
    as if the client had disconnected (vllm/v1/engine/output_processor.py, 0.23.0). So a file may be
    published that no client waits for. The alternative would discard files that clients do wait
    for.
    """
    return bool(request.num_output_tokens and request.sampling_params is not None and request.sampling_params.stop)
