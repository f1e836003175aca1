"""Which server gets the next request: the one with the least under way; one that fails is left alone for a while, then tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_hsx.generate.clock import Clock
from vllm_ascend_hsx.generate.errors import Fault

LONGEST_REST = 30.0  # seconds
FAULTS_TO_REST = 3  # in a row, of an endpoint that answers


@dataclass
class Endpoint:
    """A server.

    Attributes:
        url: without /v1.
        known: whether it has been found to serve the right thing. Until then it gets one request at a time.
        in_flight: requests under way.
        answered, failed: how many have ended how.
        downs: how often it was down since it answered last.
    """

    url: str
    known: bool = False
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    downs: int = 0
    _faults: int = field(default=0, repr=False)
    _resting_until: float = field(default=0.0, repr=False)
    # Of requests that were sent before it was found to be down, the answers say nothing new.
    _period: int = field(default=0, repr=False)

    @property
    def is_on_trial(self) -> bool:
        """Whether one request at a time has to show that it is well (again)."""
        return not self.known or self.downs > 0

    def rest_left(self, now: float) -> float:
        return max(0.0, self._resting_until - now)


@dataclass(frozen=True)
class Lease:
    """The right to send one request."""

    endpoint: Endpoint
    period: int
    is_trial: bool


class Balancer:
    """Gives out leases: never more than `concurrency` at a time.

    Args:
        endpoints: at least one.
        concurrency: requests under way, over all endpoints.
        first_rest: seconds that an endpoint is left alone when it is down for the first time; doubled each time.
        clock: for the rests.
    """

    def __init__(self, endpoints: Sequence[Endpoint], concurrency: int, first_rest: float, clock: Clock) -> None:
        self.endpoints = endpoints
        self._concurrency = concurrency
        self._first_rest = first_rest
        self._clock = clock
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._on_trial: set[str] = set()

    async def acquire(self) -> Lease:
        """Wait until a request may be sent, and say where to. Who came first is served first."""
        async with self._turn:
            while (endpoint := self._choose()) is None:
                self._changed.clear()
                await self._wait()
            endpoint.in_flight += 1
            if endpoint.is_on_trial:
                self._on_trial.add(endpoint.url)
            return Lease(endpoint, endpoint._period, endpoint.is_on_trial)

    def release(self, lease: Lease, fault: Fault | None, retry_after: float | None = None) -> bool:
        """The request has ended.

        Args:
            lease: of `acquire`; not used again.
            fault: what it says of the endpoint; None if it was given up before it could say anything.
            retry_after: seconds that the endpoint asked to be left alone.

        Returns:
            Whether the endpoint was found to be down, and that was not known.
        """
        endpoint = lease.endpoint
        endpoint.in_flight -= 1
        if lease.is_trial:
            self._on_trial.discard(endpoint.url)
        self._changed.set()
        if fault is None:
            return False
        if fault is Fault.NONE:
            endpoint.answered += 1
            endpoint._faults = endpoint.downs = 0
            return False
        endpoint.failed += 1
        if lease.period != endpoint._period:
            return False
        endpoint._faults += 1
        if fault is Fault.DOWN or endpoint._faults >= FAULTS_TO_REST or endpoint.is_on_trial:
            self.put_to_rest(endpoint, retry_after)
            return True
        if retry_after:
            endpoint._resting_until = max(endpoint._resting_until, self._clock.now() + retry_after)
        return False

    def put_to_rest(self, endpoint: Endpoint, retry_after: float | None = None) -> None:
        """Leave an endpoint alone for a while, because it is down."""
        rest = min(LONGEST_REST, self._first_rest * 2 ** min(endpoint.downs, 32))
        endpoint._resting_until = self._clock.now() + max(rest, retry_after or 0.0)
        endpoint._period += 1
        endpoint._faults = 0
        endpoint.downs += 1

    def _choose(self) -> Endpoint | None:
        if sum(endpoint.in_flight for endpoint in self.endpoints) >= self._concurrency:
            return None
        now = self._clock.now()
        free = [each for each in self.endpoints if not each.rest_left(now) and each.url not in self._on_trial]
        return min(free, key=lambda each: (each.in_flight, each.answered + each.failed), default=None)

    async def _wait(self) -> None:
        """Until a lease comes back or a rest is over."""
        now = self._clock.now()
        rests = [rest for rest in (endpoint.rest_left(now) for endpoint in self.endpoints) if rest]
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(self._changed.wait())]
        if rests:
            waits.append(asyncio.ensure_future(self._clock.sleep(min(rests))))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
