"""Admission: limit files per API request, and hold requests that would make steps wait."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_ascend_hsx.connector.metadata import RankState
from vllm_ascend_hsx.connector.stats import SchedulerRecorder
from vllm_ascend_hsx.connector.storage_watch import Reminder
from vllm_ascend_hsx.protocol.api import shown
from vllm_ascend_hsx.protocol.request_ids import split_id

FILES_OPTION = "kv_connector_extra_config.max_files_per_request"
BYTES_OPTION = "kv_connector_extra_config.max_bytes_per_request"

# Most other API requests that may arrive between two prompts or samples of one API request.
_REMEMBERED = 1024
_LOG_SECONDS = 10.0
_MIB = 1 << 20
_HELD_LONG_S = 5.0  # seconds after which a log line reports held requests
# Sort key of a held request: priority, arrival time and id, as in vLLM.
_Place = tuple[int, float, str]

logger = logging.getLogger(__name__)


class Cost(NamedTuple):
    """Upper bounds of a request's row bytes.

    Attributes:
        prompt, output: bytes of the rows of the prompt, and of generated tokens.
    """

    prompt: int
    output: int


class RankLoad:
    """The debt of one rank. New requests are held while it would exceed the ring.

    The debt is the bytes of computed rows that are not written, plus a share of the prompt rows
    that are not computed. The share is 1 - W / P, where storage takes W bytes per second and
    prompts make P. Storage writes the remaining rows while prompts are computed. The share is 1
    until both rates are known, and 0 if storage is fast enough.

    Args:
        ring_bytes: memory for rows that wait to be written.
        row_bytes: bytes of one token's rows.

    Attributes:
        state: the rank's last report.
        unfinished: bytes of all rows of the undecided requests, including written rows.
    """

    def __init__(self, ring_bytes: int, row_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._row_bytes = row_bytes
        self._unreported: deque[Cost] = deque()
        self._promised: list[Cost] = []
        self._generating = 0
        self.state = RankState()
        self.unfinished = 0

    def report(self, state: RankState) -> None:
        """Record the state that the rank has reported."""
        for _ in range(state.started - self.state.started):
            self._unreported.popleft()
        self.state = state

    def promise(self, cost: Cost) -> None:
        """Add an admitted request. It has not started until `start` lists it."""
        self._promised.append(cost)
        self._generating += cost.output > 0
        self.unfinished += sum(cost)

    def start(self, costs: list[Cost]) -> None:
        """Record the admitted requests that start. The caller removes all others with `end`."""
        self._promised = []
        self._unreported.extend(costs)

    def end(self, cost: Cost) -> None:
        """Remove an admitted request that makes no more rows."""
        self._generating -= cost.output > 0
        self.unfinished -= sum(cost)

    @property
    def coming(self) -> int:
        """Bytes of the prompts' rows that are not computed."""
        return self.state.coming + sum(cost.prompt for cost in (*self._unreported, *self._promised))

    def admits(self, cost: Cost) -> bool:
        """Return whether a request may start.

        A request larger than the ring starts when half of the ring is free. Waiting for an empty
        ring would leave storage idle until the first rows arrive. A request that generates makes a
        row per step, perhaps for a long time. One such request may always run. More may run if the
        ring holds all their rows, or if storage keeps up.
        """
        state = self.state
        if state.paused or (state.opens_slowly and (self._unreported or self._promised)):
            return False
        share = self._unwritten_share(state.prompt_rate)
        if cost.output and self._generating and self.unfinished + sum(cost) > self._ring_bytes:
            row_rate = state.step_rate and state.step_rate * self._row_bytes * (
                self._generating + 1
            )
            if self._unwritten_share(row_rate or state.prompt_rate):
                return False
        own = share * cost.prompt
        debt = state.backlog + share * self.coming
        return debt + (own if own <= self._ring_bytes else self._ring_bytes / 2) <= self._ring_bytes

    def _unwritten_share(self, rate: float | None) -> float:
        """Return the share of rows that storage cannot write if rows arrive at `rate`."""
        return max(0.0, 1 - (self.state.write_rate or 0.0) / rate) if rate else 1.0


class Ranks(NamedTuple):
    """The tensor-parallel ranks of an engine. Each can own requests.

    Attributes:
        number: number of ranks.
        ring_bytes: memory of a rank for rows that wait to be written.
        row_bytes: bytes of one token's rows, all layers.
    """

    number: int
    ring_bytes: int
    row_bytes: int


class Admission:
    """Admit new requests to ranks in order, and hold them back while storage is behind.

    Args:
        ranks: the ranks.
        description: name of the storage in log lines.
        recorder: records the number of held requests.

    Attributes:
        loads: load of each rank.
    """

    def __init__(self, ranks: Ranks, description: str, recorder: SchedulerRecorder) -> None:
        self.loads = tuple(RankLoad(ranks.ring_bytes, ranks.row_bytes) for _ in range(ranks.number))
        self._description = description
        self._recorder = recorder
        self._promised: dict[str, tuple[int, Cost]] = {}  # requests admitted since the last step
        self._held: list[_Place] = []  # sorted
        self._places: dict[str, _Place] = {}  # the same, by request
        self._reminder = Reminder(_HELD_LONG_S)

    def is_promised(self, request_id: str) -> bool:
        """Return whether the request was admitted since the last step."""
        return request_id in self._promised

    def admit(self, request: Any, rank: int, cost: Cost) -> bool:
        """Admit a request to a rank, or hold it back.

        Args:
            request: vllm.v1.request.Request in the waiting queue.
            rank: the rank that would own the request.
            cost: bytes of the rows.

        Returns:
            False if the request is held back.
        """
        place = (request.priority, request.arrival_time, request.request_id)
        load = self.loads[rank]
        # Requests start in order. If small requests could overtake, large requests would wait
        # forever. vLLM asks about new requests before held ones.
        first = not self._held or place <= self._held[0]
        # Ranks share the storage. While a rank is paused after a stall, a request on another rank
        # would stall the next step, too.
        is_paused = any(other.state.paused and not other.state.unresponsive for other in self.loads)
        # A rank with unresponsive storage refuses the request at once. Otherwise the request would
        # wait indefinitely.
        if load.state.unresponsive or (first and not is_paused and load.admits(cost)):
            self.stop_holding(request.request_id)
            self.promise(request.request_id, rank, cost)
            return True
        if request.request_id not in self._places:
            self._places[request.request_id] = place
            insort(self._held, place)
            self._reminder.begin()
            self._recorder.held(len(self._held))
        return False

    def stop_holding(self, request_id: str) -> None:
        """Remove a request that is admitted or has ended from the held requests."""
        place = self._places.pop(request_id, None)
        if place is not None:
            del self._held[bisect_left(self._held, place)]
            self._recorder.held(len(self._held))
            if not self._held:
                self._reminder.end()

    def promise(self, request_id: str, rank: int, cost: Cost) -> None:
        """Admit a request unconditionally."""
        self.loads[rank].promise(cost)
        self._promised[request_id] = rank, cost

    def start(self, started: Collection[str]) -> dict[str, tuple[int, Cost]]:
        """Record the admitted requests that start in this step. Return their ranks and costs.

        All other admitted requests did not fit into the KV cache.
        """
        if self._held and self._reminder.due_in() == 0:
            self._warn()
        promised, self._promised = self._promised, {}
        for request_id in promised.keys() - set(started):
            self.end(*promised[request_id])
        starts = {request_id: promised[request_id] for request_id in started}
        for rank, load in enumerate(self.loads):
            load.start([cost for owner, cost in starts.values() if owner == rank])
        return starts

    def end(self, rank: int, cost: Cost) -> None:
        """Record that an admitted or started request makes no more rows."""
        self.loads[rank].end(cost)

    @property
    def unresponsive(self) -> frozenset[int]:
        """Ranks whose storage is unresponsive."""
        return frozenset(rank for rank, load in enumerate(self.loads) if load.state.unresponsive)

    def least_loaded(self) -> int:
        """Return the rank with least unfinished bytes. Prefer ranks with responsive storage."""
        keys = [
            (load.state.unresponsive, load.state.paused, load.unfinished) for load in self.loads
        ]
        return keys.index(min(keys))

    def _warn(self) -> None:
        load = self.loads[self.least_loaded()]
        logger.warning(
            "slow storage: new requests have been held back for %.0f s, %d now, until the rows of "
            "admitted requests are written to %s: at least %.1f MiB, of which %.1f MiB are "
            "computed. Storage takes %.1f MiB/s. Use faster storage, raise pinned_ring_bytes or "
            "extract fewer layers.",
            self._reminder.seconds,
            len(self._held),
            self._description,
            (load.state.backlog + load.coming) / _MIB,
            load.state.backlog / _MIB,
            (load.state.write_rate or 0) / _MIB,
        )
        self._reminder.logged()


@dataclass
class _Account:
    """Stored files and bytes of an API request.

    `first_child` is a hash of the first prompt and sample. If it arrives again, a later API request
    has the same id.
    """

    first_child: int
    files: int = 0
    bytes: int = 0


class RequestLimits:
    """Count files and bytes of each API request. Data-parallel ranks count separately.

    Args:
        max_files: most files of an API request.
        max_bytes: most bytes of an API request.
        row_bytes: stored bytes of one token's rows, all layers.
    """

    def __init__(self, max_files: int, max_bytes: int, row_bytes: int) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        # The keys are hashes, because a client's id can be megabytes long.
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    def refusal(self, request_id: str, num_rows: int) -> str | None:
        """Count a file, or return the reason that the API request may store no more.

        Args:
            request_id: vLLM's internal id.
            num_rows: most rows that the file can have.
        """
        account = self._account(request_id)
        num_bytes = num_rows * self._row_bytes
        if account.files >= self._max_files:
            return (
                f"this API request has stored {account.files} files already, the limit of "
                f"{FILES_OPTION}; send fewer prompts or samples in one request"
            )
        if account.bytes + num_bytes > self._max_bytes:
            return (
                f"this API request would store up to {account.bytes + num_bytes} bytes, but "
                f"{BYTES_OPTION} is {self._max_bytes}; send fewer prompts or samples in one "
                "request or, with include_output_tokens, a smaller max_tokens"
            )
        account.files += 1
        account.bytes += num_bytes
        return None

    def _account(self, request_id: str) -> _Account:
        api_request, child = map(hash, split_id(request_id))
        account = self._accounts.pop(api_request, None)
        if account is None or account.first_child == child:
            account = _Account(child)
        self._accounts[api_request] = account
        if len(self._accounts) > _REMEMBERED:
            self._accounts.popitem(last=False)
        return account


class RefusalLog:
    """Log at most one refused request in ten seconds, and count the others.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = float("-inf")
        self._unlogged = 0

    def add(self, request_id: str, reason: str) -> None:
        """Log or count a refused request, by vLLM's internal id, with the reason."""
        now = self._clock()
        if now < self._quiet_until:
            self._unlogged += 1
            return
        self._quiet_until = now + _LOG_SECONDS
        others = (
            f" ({self._unlogged} others were refused since the last log line)"
            if self._unlogged
            else ""
        )
        self._unlogged = 0
        logger.warning("request %s is not extracted: %s%s", shown(request_id), reason, others)
