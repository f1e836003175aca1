"""Messages between the two sides of the connector, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_ascend_hsx.protocol.placeholders import Placeholder


class Prefix(NamedTuple):
    """The first rows of a request, which are copied instead of computed.

    Attributes:
        source: number of the request whose file has them; see RequestStart.
        num_rows: number of rows.
    """

    source: int
    num_rows: int


@dataclass(frozen=True)
class RequestStart:
    """A request whose first rows are computed in this step.

    Attributes:
        request_id: vLLM's internal id.
        path: the file that receives its rows.
        owner: tensor-parallel rank that copies and writes them.
        token_ids: int64 [rows], the prompt: one row for each.
        include_output: whether rows of generated tokens are extracted too.
        arrived_ns: when the API server received it, in nanoseconds since the epoch; None if that is
            not known.
        lora: vllm.lora.request.LoRARequest of its adapter; None without one.
        placeholders: of the images in the prompt.
        number: of the request; no other one of this engine has it. The owner keeps its file open
            for other requests, until `HsxConnectorMetadata.released` has the number.
        prefix: rows that are copied; None if all are computed.
        keeps_source: whether the owner keeps the file open.
    """

    request_id: str
    path: str
    owner: int
    token_ids: np.ndarray
    include_output: bool = False
    arrived_ns: int | None = None
    lora: Any = None
    placeholders: tuple[Placeholder, ...] = ()
    number: int = 0
    prefix: Prefix | None = None
    keeps_source: bool = False


def placeholders_in(request: Any) -> tuple[Placeholder, ...]:
    """Return where the images of a request are in its prompt, whose tokens vLLM has expanded.

    A range has all tokens of an image, also those that a model puts among its features.

    Args:
        request: vllm.v1.request.Request; `mm_features` describes its images.
    """
    places = [(item.modality, item.mm_position) for item in request.mm_features]
    return tuple(sorted((Placeholder(modality, place.offset, place.length) for modality, place in places), key=lambda each: each.start))


@dataclass(frozen=True)
class RequestEnd:
    """A request that the scheduler has removed. No later step computes rows of it.

    Attributes:
        request_id: vLLM's internal id.
        aborted: whether the file is to be discarded.
        output_token_ids: int64 [generated - 1], the generated tokens that were an input of the
            model: all but the last. Empty if rows of generated tokens are not extracted.
    """

    request_id: str
    aborted: bool
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass
class HsxConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers. Ends come first: an id may end and start again in one step.

    Attributes:
        ended: requests that have ended since the last step.
        released: numbers of requests whose files are no longer kept open. No request that starts in
            this step or later has one of them as its prefix.
        started: requests that start in this step.
        stats_wanted: whether the workers send stats with this step even if they counted nothing.
            vLLM asks the scheduler's side for stats only if workers have sent some
            (v1/core/sched/scheduler.py:1352 in 0.23.0).
        unresponsive: ranks whose storage is unresponsive.
    """

    ended: list[RequestEnd] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    started: list[RequestStart] = field(default_factory=list)
    stats_wanted: bool = False
    unresponsive: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankState:
    """Progress of a rank, in bytes, bytes per second and steps per second.

    A rate is None until it is known.

    Attributes:
        backlog: rows that were computed but are not yet in their files.
        coming: rows of the running requests' prompts that are not computed.
        started: number of requests that the rank has been given. The other numbers cover exactly
            these.
        write_rate: bytes per second that storage takes.
        prompt_rate: bytes per second that the engine makes while it computes prompts.
        step_rate: steps per second.
        paused: whether storage has not answered for so long that no new request should start.
        unresponsive: whether it has not answered for so long that the rank refuses new requests.
        opens_slowly: whether a step had to wait for the files of its new requests.
        needs_space: whether the files that it keeps open should be released; see OpenSources.
    """

    backlog: int = 0
    coming: int = 0
    started: int = 0
    write_rate: float | None = field(default=None, compare=False)
    prompt_rate: float | None = field(default=None, compare=False)
    step_rate: float | None = field(default=None, compare=False)
    paused: bool = False
    unresponsive: bool = False
    opens_slowly: bool = False
    needs_space: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        outcomes: requests whose file was finished since the last report. None for a complete file
            or one discarded after an abort, else the reason of the failure.
        ranks: progress of the ranks.
        sources: numbers of those requests whose files are kept open.
    """

    outcomes: dict[str, str | None] = field(default_factory=dict)
    ranks: dict[int, RankState] = field(default_factory=dict)
    sources: frozenset[int] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.outcomes | other.outcomes, self.ranks | other.ranks, self.sources | other.sources)
