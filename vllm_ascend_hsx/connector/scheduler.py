"""Scheduler side: which requests are extracted, by which rank, into which file, and when new ones have to wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart, WorkerReport
from vllm_ascend_hsx.connector.stats import BackPressureRecorder, HsxStats
from vllm_ascend_hsx.sinks.names import file_name

PATH_KEY = "hidden_states_path"
ERROR_KEY = "hidden_states_error"
OPT_OUT_KEY = "hidden_states"
OUTPUT_KEY = "include_output_tokens"


@dataclass
class _Request:
    path: str
    num_bytes: int
    include_output: bool
    owner: int | None = None
    error: str | None = None
    decided: bool = False


class ExtractionScheduler:
    """The state of every request that is extracted, from its arrival to its end.

    Args:
        directory: where the files go.
        row_bytes: bytes of one token's rows, all layers.
        num_ranks: tensor-parallel ranks; each can own requests.
        max_backlog: bytes computed but not yet written on a rank above which no new request is given to it.
        include_output: whether rows of generated tokens are wanted of requests that do not say so themselves.
    """

    def __init__(self, directory: Path, row_bytes: int, num_ranks: int, max_backlog: int, include_output: bool = False) -> None:
        self._directory = directory
        self._row_bytes = row_bytes
        self._max_backlog = max_backlog
        self._include_output = include_output
        self._requests: dict[str, _Request] = {}
        self._refused: dict[str, str] = {}
        self._ended: list[RequestEnd] = []
        self._ended_bytes: dict[str, tuple[int, int]] = {}
        self._outstanding = [0] * num_ranks
        self._backlog = [0] * num_ranks
        self._stuck: set[int] = set()
        self._back_pressure = BackPressureRecorder()

    def on_new_request(self, request: Any) -> None:
        """Decide whether the request is extracted; if so, have it compute every one of its rows.

        Args:
            request: vllm.v1.request.Request, which has just entered the waiting queue.
        """
        params = request.kv_transfer_params or {}
        wanted, include_output = params.get(OPT_OUT_KEY, True), params.get(OUTPUT_KEY, self._include_output)
        if wanted is False or request.pooling_params is not None:
            return
        if wanted is not True:
            self._refused[request.request_id] = f"kv_transfer_params.{OPT_OUT_KEY} is {wanted!r}; use true or false"
        elif not isinstance(include_output, bool):
            self._refused[request.request_id] = f"kv_transfer_params.{OUTPUT_KEY} is {include_output!r}; use true or false"
        elif request.prompt_token_ids is None:
            self._refused[request.request_id] = "prompt_embeds have no token ids to store; send token ids or text"
        elif request.resumable:
            self._refused[request.request_id] = "streaming input is not supported; send the whole prompt at once"
        else:
            path = self._directory / file_name(request.request_id)
            num_rows = len(request.prompt_token_ids) + (request.max_tokens if include_output else 0)
            self._requests[request.request_id] = _Request(str(path), num_rows * self._row_bytes, include_output)
            # A cached prefix is not computed, so its rows would be missing. Other requests go on using the prefix cache.
            request.skip_reading_prefix_cache = True

    def extracts(self, request_id: str) -> bool:
        """Whether the request is to be extracted."""
        return request_id in self._requests

    def must_wait(self, request_id: str) -> bool:
        """Whether the request is to be extracted and its owner-to-be is too far behind with writing."""
        request = self._requests.get(request_id)
        if request is not None and request.owner is None:
            rank = self._least_loaded()
            # A rank whose storage does not answer refuses the request at once: that is better than to wait for nobody knows how long.
            if self._backlog[rank] > self._max_backlog and rank not in self._stuck:
                self._back_pressure.held(request_id)
                return True
        self._back_pressure.let_go(request_id)
        return False

    def build_metadata(self, scheduler_output: Any) -> HsxConnectorMetadata:
        """What the workers have to know of this step.

        Args:
            scheduler_output: vllm.v1.core.sched.output.SchedulerOutput; not modified.
        """
        metadata = HsxConnectorMetadata(ended=self._ended)
        self._ended = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None and request.owner is None:
                request.owner = self._least_loaded()
                self._outstanding[request.owner] += request.num_bytes
                token_ids = np.asarray(new.prompt_token_ids, dtype=np.int64)
                metadata.started.append(RequestStart(new.req_id, request.path, request.owner, token_ids, request.include_output))
        return metadata

    def on_worker_report(self, report: WorkerReport) -> None:
        """Take note of files that were decided and of how far behind the ranks are."""
        for rank, num_bytes in report.backlog.items():
            self._backlog[rank] = num_bytes
            (self._stuck.add if rank in report.stuck else self._stuck.discard)(rank)
        for request_id, error in report.outcomes.items():
            request = self._requests.get(request_id)
            if request is not None and not request.decided:
                assert request.owner is not None
                request.decided, request.error = True, error
                self._outstanding[request.owner] -= request.num_bytes
            elif request_id in self._ended_bytes:
                owner, num_bytes = self._ended_bytes.pop(request_id)
                self._outstanding[owner] -= num_bytes

    def take_stats(self) -> HsxStats | None:
        """For how long, since the last call, requests had to wait; None if none had to."""
        return self._back_pressure.take()

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended, for whatever reason, scheduled or not.

        Returns:
            What goes into the response as `kv_transfer_params`: the file's path, and the error if it is known already. Nothing for a
            request whose KV another connector hands to a decoding server: it has params of its own, and MultiConnector stops the
            engine over two (multi_connector.py:498).
        """
        self._back_pressure.let_go(request.request_id)
        answer = self._end(request)
        return None if (request.kv_transfer_params or {}).get("do_remote_decode") else answer

    def _end(self, request: Any) -> dict[str, Any] | None:
        request_id = request.request_id
        if reason := self._refused.pop(request_id, None):
            return {ERROR_KEY: reason}
        state = self._requests.pop(request_id, None)
        if state is None or state.owner is None:
            return None
        end = RequestEnd(request_id, aborted=request.status.name == "FINISHED_ABORTED" and not _stopped_by_string(request))
        if state.include_output and not end.aborted:
            end = replace(end, output_token_ids=np.asarray(request.output_token_ids[:-1], dtype=np.int64))
        self._ended.append(end)
        if not state.decided:
            self._ended_bytes[request_id] = (state.owner, state.num_bytes)
        answer: dict[str, Any] = {PATH_KEY: state.path}
        if state.error is not None:
            answer[ERROR_KEY] = state.error
        return answer

    def _least_loaded(self) -> int:
        return min(range(len(self._outstanding)), key=self._outstanding.__getitem__)


def _stopped_by_string(request: Any) -> bool:
    """Whether a request that was aborted while it generated may have come to its end.

    Stop strings are looked for where the text is, in the API server, which then aborts the request in the scheduler just as it does for
    a client that has gone (vllm/v1/engine/output_processor.py, 0.23.0). So a file may be published that nobody waits for; the other
    choice would throw away what somebody does wait for.
    """
    return bool(request.num_output_tokens and request.sampling_params is not None and request.sampling_params.stop)
