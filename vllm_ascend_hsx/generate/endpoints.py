"""Choose an endpoint for each request: the least busy, or nearly so with the row's prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vllm_ascend_hsx.generate.errors import Fault

LONGEST_REST_S = 30.0
FAULTS_TO_REST = 3  # in a row, of an endpoint that answers
# Requests by which the endpoint that has a row's prefix may be busier than the others. Two keep a
# conversation where it is while rows come and go one by one; a long queue costs more than a prefix.
NEAR = 2


@dataclass
class Endpoint:
    """A server.

    Attributes:
        url: without /v1.
        model: its name there; None until the server has been reached.
        proven: True once a row has arrived from the server.
        in_flight: requests under way.
        answered, failed: requests that have ended.
        faults: failures since the last good answer.
        downs: rests since the last good answer.
        resting_until: in the event loop's time.
    """

    url: str
    model: str | None = None
    proven: bool = False
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    faults: int = 0
    downs: int = 0
    resting_until: float = 0.0

    @property
    def is_on_trial(self) -> bool:
        """True while the server gets one request at a time, until one succeeds."""
        return not self.proven or self.downs > 0

    def rest_left(self) -> float:
        """Return the seconds until the server gets requests again."""
        return max(0.0, self.resting_until - asyncio.get_running_loop().time())


class Balancer:
    """Distribute requests over endpoints.

    Args:
        urls: of at least one server.
        first_rest: seconds of an endpoint's first rest; doubled for each further one.
    """

    def __init__(self, urls: Sequence[str], first_rest: float) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self._first_rest = first_rest
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def acquire(self, failed_at: Endpoint | None = None, near: Endpoint | None = None) -> Endpoint:
        """Wait for an endpoint that may get a request. First come, first served.

        Args:
            failed_at: where the row has just failed. It gets another endpoint if one may have it,
                and the one about which least is known to be wrong.
            near: has published a prefix of the row.
        """
        async with self._turn:
            while (endpoint := self._choose(failed_at, near)) is None:
                self._changed.clear()
                rests = [rest for each in self.endpoints if (rest := each.rest_left())]
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(rests, default=None))
            endpoint.in_flight += 1
            return endpoint

    def release(self, endpoint: Endpoint, fault: Fault | None, retry_after: float | None = None) -> bool:
        """End a request.

        Args:
            endpoint: of `acquire`.
            fault: of the request; None if it was given up.
            retry_after: seconds that the server asks to be left alone.

        Returns:
            True if the endpoint begins to rest.
        """
        endpoint.in_flight -= 1
        self._changed.set()
        if fault is None:
            return False
        if fault is Fault.NONE:
            endpoint.answered += 1
            endpoint.faults = endpoint.downs = 0
            return False
        endpoint.failed += 1
        endpoint.faults += 1
        rest = retry_after or 0.0
        # Requests that were sent before the rest began say nothing new.
        begins = not endpoint.rest_left() and (fault is Fault.DOWN or endpoint.faults >= FAULTS_TO_REST or endpoint.is_on_trial)
        if begins:
            doubled = self._first_rest * 2 ** min(endpoint.downs, 32)
            rest = max(rest, min(LONGEST_REST_S, doubled))
            endpoint.downs += 1
            endpoint.faults = 0
        if rest:
            until = asyncio.get_running_loop().time() + rest
            endpoint.resting_until = max(endpoint.resting_until, until)
        return begins

    def may_do_elsewhere(self, endpoint: Endpoint) -> bool:
        """Return whether nothing is known against another endpoint, which may be untried."""
        return any(not (each.faults or each.rest_left()) for each in self.endpoints if each is not endpoint)

    def _choose(self, failed_at: Endpoint | None, near: Endpoint | None) -> Endpoint | None:
        free = [each for each in self.endpoints if not each.rest_left() and not (each.is_on_trial and each.in_flight)]

        def order(each: Endpoint) -> tuple[int, ...]:
            least_busy = each.in_flight - NEAR * (each is near), each is not near, each.answered + each.failed
            if failed_at is None:
                return least_busy
            return (each is failed_at, each.is_on_trial, each.faults, *least_busy)

        return min(free, key=order, default=None)
