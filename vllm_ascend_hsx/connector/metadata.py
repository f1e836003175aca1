"""What the two sides of the connector tell each other, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class RequestStart:
    """A request whose first rows are computed in this step.

    Attributes:
        request_id: vLLM's internal id.
        path: the file that is to receive its rows.
        owner: tensor-parallel rank that copies and writes them.
        token_ids: int64 [rows], the prompt: one row for each.
        include_output: rows of generated tokens are wanted too.
    """

    request_id: str
    path: str
    owner: int
    token_ids: np.ndarray
    include_output: bool = False


@dataclass(frozen=True)
class RequestEnd:
    """A request that the scheduler has let go of; no step after this one computes rows of it.

    Attributes:
        request_id: vLLM's internal id.
        aborted: nobody wants its file any more.
        output_token_ids: int64 [generated - 1], the generated tokens that were an input of the model: all but the last. Empty if rows of
            generated tokens are not wanted.
    """

    request_id: str
    aborted: bool
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass
class HsxConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers. Ends come first: an id may end and start again in one step.

    Attributes:
        stats_wanted: the workers are to send stats with this step even if they have counted nothing, for the scheduler has, and vLLM asks
            it for stats only if they have sent some (v1/core/sched/scheduler.py:1352 in 0.23.0).
    """

    ended: list[RequestEnd] = field(default_factory=list)
    started: list[RequestStart] = field(default_factory=list)
    stats_wanted: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        outcomes: requests whose file was decided since the last report: None for a complete file or one discarded after an abort, else
            why it failed.
        backlog: bytes of rows that were computed but are not yet in their files, by rank.
        stuck: ranks whose storage has not answered for so long that they refuse new requests.
    """

    outcomes: dict[str, str | None] = field(default_factory=dict)
    backlog: dict[int, int] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.outcomes | other.outcomes, self.backlog | other.backlog, self.stuck | other.stuck)
