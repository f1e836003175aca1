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
from vllm_ascend_hsx.protocol.weights import WeightVersion


class Prefix(NamedTuple):
    """The first rows of a request, copied from another request instead of computed.

    Attributes:
        source: number of the request with these rows; see RequestStart.
        num_rows: number of rows.
    """

    source: int
    num_rows: int


@dataclass(frozen=True)
class RequestStart:
    """A request whose first rows are computed in this step.

    Attributes:
        request_id: vLLM's internal id.
        path: file that receives the rows.
        owner: tensor-parallel rank that copies and writes the rows.
        token_ids: int64 [rows], the prompt: one row per token.
        include_output: whether rows of generated tokens are extracted too.
        arrived_ns: arrival time at the API server, in nanoseconds since the epoch; None if unknown.
        lora: vllm.lora.request.LoRARequest of the adapter; None without an adapter.
        placeholders: placeholders of the images in the prompt.
        number: number of the request, unique in this engine. The owner keeps the file open for
            other requests until `HsxConnectorMetadata.released` has the number.
        prefix: rows that are copied; None if all are computed.
        keeps_source: whether the owner keeps the file open.
        weights: version of the weights in this step.
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
    weights: tuple[WeightVersion, ...] = ()


def placeholders_in(request: Any) -> tuple[Placeholder, ...]:
    """Return the token positions of a request's images in the expanded prompt.

    A placeholder covers all tokens of an image, including tokens that a model inserts between
    image features.

    Args:
        request: vllm.v1.request.Request; `mm_features` describes the images.
    """
    places = [(item.modality, item.mm_position) for item in request.mm_features]
    return tuple(
        sorted(
            (Placeholder(modality, place.offset, place.length) for modality, place in places),
            key=lambda each: each.start,
        )
    )


@dataclass(frozen=True)
class RequestEnd:
    """A request that the scheduler has removed. No later step computes rows for this request.

    Attributes:
        request_id: vLLM's internal id.
        aborted: whether the request ended early, and the file is discarded unless rows are kept.
        output_token_ids: int64 [generated - 1], the generated tokens that were an input of the
            model: all but the last. Empty if rows of generated tokens are not extracted. Of an
            aborted request all generated tokens, because the last may have been an input.
        most_kept: most rows to keep of an aborted request; 0 to discard the file.
    """

    request_id: str
    aborted: bool
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    most_kept: int = 0


@dataclass
class HsxConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers. Ends come first: an id may end and start again in one step.

    Attributes:
        ended: requests that have ended since the last step.
        released: numbers of requests whose files are no longer kept open. No request that starts in
            this step or later copies from these files.
        started: requests that start in this step.
        weights: other requests whose rows are computed by a new version of the weights from this
            step on, and the versions that have computed their rows; see WeightHistory.
        stats_wanted: whether the workers send stats with this step even if they counted nothing.
            vLLM asks the scheduler's side for stats only if workers have sent some
            (v1/core/sched/scheduler.py:1352 in 0.23.0).
        unresponsive: ranks whose storage is unresponsive.
        check: number of the last requested check for removed files; see DirectoryBudget.
    """

    ended: list[RequestEnd] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    started: list[RequestStart] = field(default_factory=list)
    weights: dict[str, tuple[WeightVersion, ...]] = field(default_factory=dict)
    stats_wanted: bool = False
    unresponsive: frozenset[int] = frozenset()
    check: int = 0


@dataclass(frozen=True)
class RankState:
    """Progress of a rank, in bytes, bytes per second and steps per second.

    A rate is None until it is known.

    Attributes:
        backlog: rows that were computed but are not yet in their files.
        coming: rows of the running requests' prompts that are not computed.
        started: number of requests that the rank has received. All other numbers cover exactly
            these requests.
        write_rate: bytes per second that storage takes.
        prompt_rate: bytes per second that the engine makes while it computes prompts.
        step_rate: steps per second.
        paused: whether storage has not answered for so long that no new request should start.
        unresponsive: whether storage has not answered for so long that the rank refuses new
            requests.
        opens_slowly: whether a step had to wait for new files; see StorageWatch.
        needs_space: whether the rank's open sources should be released; see OpenSources.
        stored: bytes of the rank's files in the storage directory; see StoredFiles.
        checked: number of the last completed check for removed files; 0 before the first.
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
    stored: int = 0
    checked: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        outcomes: requests that were decided or refused since the last report. None if the file is
            complete or was discarded after an abort, else the reason of the failure.
        ranks: progress of the ranks.
        sources: numbers of the requests among `outcomes` whose files are kept open.
    """

    outcomes: dict[str, str | None] = field(default_factory=dict)
    ranks: dict[int, RankState] = field(default_factory=dict)
    sources: frozenset[int] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.outcomes | other.outcomes, self.ranks | other.ranks, self.sources | other.sources
        )
