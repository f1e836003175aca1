"""Choose an endpoint for each request: the least busy, with a preference for the row's prefix.

If a file lists the endpoints, it is read again every few seconds, so they may change during a run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.generate.client import check_url
from vllm_ascend_hsx.generate.errors import (
    DOWN,
    Failure,
    InputError,
    RequestError,
    UnauthorizedError,
)
from vllm_ascend_hsx.generate.options import read_endpoints

LONGEST_PAUSE_S = 30.0
REREAD_S = 5.0
FAULTS_TO_PAUSE = 3  # consecutive failures of an endpoint that answers
# Additional requests in flight that the endpoint with a row's prefix may have. Two keep a
# conversation on one endpoint. A longer queue would cost more than computing the prefix again.
NEAR = 2


@dataclass(eq=False)
class Endpoint:
    """A server.

    Attributes:
        url: base URL without /v1.
        model: the model's name there; None until the server has answered.
        proven: True once the server has stored a row.
        in_flight: number of requests in flight.
        answered, failed: numbers of ended requests.
        faults: failures since the last good answer.
        pauses: pauses since the last good answer.
        paused_until: end of the pause, in the event loop's time.
        is_used: False if it gets no more requests: it is no longer listed, or was set aside.
        is_late: True if it was first listed during the run.
    """

    url: str
    model: str | None = None
    proven: bool = False
    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    faults: int = 0
    pauses: int = 0
    paused_until: float = 0.0
    is_used: bool = True
    is_late: bool = False

    @property
    def is_on_trial(self) -> bool:
        """True while the server gets one request at a time, until a request succeeds."""
        return not self.proven or self.pauses > 0

    def pause_left(self) -> float:
        """Return the seconds until the server gets requests again."""
        return max(0.0, self.paused_until - asyncio.get_running_loop().time())


class Balancer:
    """Distribute requests over endpoints.

    Args:
        urls: URLs of at least one server.
        first_pause: seconds of an endpoint's first pause; doubled for each further pause.
    """

    def __init__(self, urls: Sequence[str], first_pause: float) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self._first_pause = first_pause
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._listed = set(urls)

    @property
    def used(self) -> list[Endpoint]:
        """Endpoints that get requests."""
        return [each for each in self.endpoints if each.is_used]

    def replace(self, urls: Sequence[str]) -> tuple[list[Endpoint], list[Endpoint]]:
        """Use these servers from now on. Requests in flight at other servers continue.

        A server that was set aside is used again if it was removed from the list and added again,
        or if no other server is left.

        Returns:
            Added endpoints, and removed endpoints.
        """
        removed = [each for each in self.used if each.url not in urls]
        kept = {each.url for each in self.used} & set(urls)
        added = [
            Endpoint(url, is_late=True)
            for url in urls
            if url not in kept and (url not in self._set_aside() or not kept)
        ]
        for each in removed:
            each.is_used = False
        self.endpoints += added
        self._listed = set(urls)
        self._changed.set()
        return added, removed

    def _set_aside(self) -> set[str]:
        """Return the listed endpoints that get no requests."""
        return self._listed - {each.url for each in self.used}

    def go_on_without(self, endpoint: Endpoint, error: InputError) -> bool:
        """Stop using the endpoint, or pause it, if others can do the rows.

        A server that was added during the run and has done no row is not used any more. A server
        that has done rows and now rejects the key is paused.

        Returns:
            False if the run must end.
        """
        if endpoint.proven:
            return isinstance(error, UnauthorizedError) and self.may_do_elsewhere(endpoint)
        if endpoint.is_late and any(each is not endpoint for each in self.used):
            endpoint.is_used = False
        return not endpoint.is_used

    async def acquire(
        self, failed_at: Endpoint | None = None, near: Endpoint | None = None
    ) -> Endpoint:
        """Wait for an endpoint that may get a request. First come, first served.

        Args:
            failed_at: endpoint where the row has just failed. Another endpoint is preferred, with
                the fewest faults.
            near: endpoint that has published a prefix of the row.
        """
        async with self._turn:
            while True:
                # Read before `_choose`, because a pause may end meanwhile.
                pauses = [left for each in self.used if (left := each.pause_left())]
                if (endpoint := self._choose(failed_at, near)) is not None:
                    endpoint.in_flight += 1
                    return endpoint
                self._changed.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(pauses, default=None))

    def note_answer(self, endpoint: Endpoint) -> None:
        """Record a good answer."""
        endpoint.answered += 1
        endpoint.faults = endpoint.pauses = 0

    def note_failure(self, endpoint: Endpoint, error: RequestError) -> bool:
        """Record a failed request. Return True if the endpoint begins to pause."""
        # A server without locks may publish the file after the answer.
        if error.failure is Failure.REFUSED or (
            error.failure is Failure.ABSENT and endpoint.proven
        ):
            self.note_answer(endpoint)
            return False
        endpoint.failed += 1
        endpoint.faults += 1
        pause = error.retry_after or 0.0
        # Failures of requests sent before the pause do not extend it.
        begins = not endpoint.pause_left() and (
            error.failure in DOWN or endpoint.faults >= FAULTS_TO_PAUSE or endpoint.is_on_trial
        )
        if begins:
            pause = max(
                pause, min(LONGEST_PAUSE_S, self._first_pause * 2 ** min(endpoint.pauses, 32))
            )
            endpoint.pauses += 1
            endpoint.faults = 0
        endpoint.paused_until = max(
            endpoint.paused_until, asyncio.get_running_loop().time() + pause
        )
        return begins

    def give_back(self, endpoint: Endpoint) -> None:
        """End a request."""
        endpoint.in_flight -= 1
        self._changed.set()

    def may_do_elsewhere(self, endpoint: Endpoint) -> bool:
        """Return True if another endpoint has no recorded faults."""
        return any(
            not (each.faults or each.pause_left()) for each in self.used if each is not endpoint
        )

    def _choose(self, failed_at: Endpoint | None, near: Endpoint | None) -> Endpoint | None:
        free = [
            each
            for each in self.used
            if not each.pause_left() and not (each.is_on_trial and each.in_flight)
        ]

        def order(each: Endpoint) -> tuple[int, ...]:
            least_busy = (
                each.in_flight - NEAR * (each is near),
                each is not near,
                each.answered + each.failed,
            )
            if failed_at is None:
                return least_busy
            return (each is failed_at, each.is_on_trial, each.faults, *least_busy)

        return min(free, key=order, default=None)


@contextmanager
def reread(path: Path | None, balancer: Balancer, say: Callable[[str], None]) -> Iterator[None]:
    """Update `balancer` during the block whenever a file of endpoints changes.

    An invalid file is reported once and changes nothing. A daemon thread reads the file, because
    its storage may hang. Do nothing if `path` is None.
    """
    if path is None:
        yield
        return
    ended, loop = threading.Event(), asyncio.get_running_loop()

    def use(urls: Sequence[str]) -> None:
        added, removed = balancer.replace(urls)
        for each in added:
            say(f"{each.url} is used from now on")
        for each in removed:
            say(f"{each.url} gets no new requests; {each.in_flight} in flight")

    def watch() -> None:
        used: Sequence[str] = [each.url for each in balancer.endpoints]
        problem = ""
        while not ended.wait(REREAD_S):
            try:
                urls = read_endpoints(path)
                for url in urls:
                    check_url(url)
            except InputError as error:
                if str(error) != problem:
                    say(f"{error}; the servers listed before are still used")
                problem = str(error)
                continue
            problem = ""
            if urls != used:
                used = urls
                with suppress(RuntimeError):  # the run ended while the file was read
                    loop.call_soon_threadsafe(use, urls)

    threading.Thread(target=watch, name="hsx-endpoints", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
