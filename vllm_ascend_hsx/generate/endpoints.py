"""Choose an endpoint for each request: the least busy, or nearly so with the row's prefix.

Endpoints may come and go during a run, if a file lists them: it is read again every few seconds.
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
FAULTS_TO_PAUSE = 3  # in a row, of an endpoint that answers
# Requests by which the endpoint that has a row's prefix may be busier than the others. Two keep a
# conversation where it is while rows come and go one by one; a long queue costs more than a prefix.
NEAR = 2


@dataclass(eq=False)
class Endpoint:
    """A server.

    Attributes:
        url: without /v1.
        model: its name there; None until the server has been reached.
        proven: True once a row has arrived from the server.
        in_flight: requests under way.
        answered, failed: requests that have ended.
        faults: failures since the last good answer.
        pauses: pauses since the last good answer.
        paused_until: in the event loop's time.
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
        """True while the server gets one request at a time, until one succeeds."""
        return not self.proven or self.pauses > 0

    def pause_left(self) -> float:
        """Return the seconds until the server gets requests again."""
        return max(0.0, self.paused_until - asyncio.get_running_loop().time())


class Balancer:
    """Distribute requests over endpoints.

    Args:
        urls: of at least one server.
        first_pause: seconds of an endpoint's first pause; doubled for each further one.
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
        """Use these servers from now on. The others finish their requests.

        Returns:
            Those that came, and those that went. One that was set aside comes back if its URL has
            been away, or if no other is left.
        """
        went = [each for each in self.used if each.url not in urls]
        stays = {each.url for each in self.used} & set(urls)
        came = [
            Endpoint(url, is_late=True)
            for url in urls
            if url not in stays and (url not in self._set_aside() or not stays)
        ]
        for each in went:
            each.is_used = False
        self.endpoints += came
        self._listed = set(urls)
        self._changed.set()
        return came, went

    def _set_aside(self) -> set[str]:
        """Return the listed endpoints that get no requests."""
        return self._listed - {each.url for each in self.used}

    def go_on_without(self, endpoint: Endpoint, error: InputError) -> bool:
        """Send the endpoint no more requests, or only after a pause, if other ones can do the rows.

        A server that appeared during the run and has done nothing is not used any more. One that
        has done rows and now rejects the key pauses.

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
            failed_at: where the row has just failed. It gets another endpoint if one may have it,
                and the one about which least is known to be wrong.
            near: has published a prefix of the row.
        """
        async with self._turn:
            while True:
                # First, because a pause may end while an endpoint is chosen.
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
        # A server without locks may publish after its answer.
        if error.failure is Failure.REFUSED or (
            error.failure is Failure.ABSENT and endpoint.proven
        ):
            self.note_answer(endpoint)
            return False
        endpoint.failed += 1
        endpoint.faults += 1
        pause = error.retry_after or 0.0
        # Requests that were sent before the pause began say nothing new.
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
    """Have `balancer` use the servers that a file lists, as often as it changes, during the block.

    A file that cannot be used changes nothing, and is reported once. It is read in a thread that
    nobody waits for, because its storage may hang. With None there is nothing to read.
    """
    if path is None:
        yield
        return
    ended, loop = threading.Event(), asyncio.get_running_loop()

    def use(urls: Sequence[str]) -> None:
        came, went = balancer.replace(urls)
        for each in came:
            say(f"{each.url} is used from now on")
        for each in went:
            say(f"{each.url} gets no more requests, and has {each.in_flight} under way")

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
                    say(f"{error}; until then the servers that it listed last are used")
                problem = str(error)
                continue
            problem = ""
            if urls != used:
                used = urls
                with suppress(RuntimeError):  # the run has ended while the file was read
                    loop.call_soon_threadsafe(use, urls)

    threading.Thread(target=watch, name="hsx-endpoints", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
