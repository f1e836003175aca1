"""Which server gets the next request of `hsx generate`, and when a failed one is tried again; the clock is the test's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.backoff import LONGEST, Backoff
from vllm_ascend_hsx.generate.clock import Clock
from vllm_ascend_hsx.generate.endpoints import FAULTS_TO_REST, LONGEST_REST, Balancer, Endpoint, Lease
from vllm_ascend_hsx.generate.errors import Fault


class TestClock(Clock):
    """Time goes on when nobody can do anything but wait."""

    __test__ = False

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.time + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let so much time pass; whoever's sleep ends meanwhile goes on."""
        end = self.time + seconds
        await settle()
        while due := sorted((each for each in self._sleepers if each[0] <= end), key=lambda each: each[0]):
            self.time, future = due[0]
            self._sleepers.remove(due[0])
            if not future.done():
                future.set_result(None)
            await settle()
        self.time = end


async def settle() -> None:
    """Until nobody can go on."""
    for _ in range(20):
        await asyncio.sleep(0)


class Stand:
    """A balancer with known endpoints."""

    def __init__(self, count: int, concurrency: int = 8, known: bool = True) -> None:
        self.clock = TestClock()
        self.endpoints = [Endpoint(f"http://{number}", known=known) for number in range(count)]
        self.balancer = Balancer(self.endpoints, concurrency, 1.0, self.clock)

    async def try_acquire(self) -> Lease | None:
        """A lease, if there is one at once."""
        task = asyncio.ensure_future(self.balancer.acquire())
        await settle()
        if task.done():
            return task.result()
        task.cancel()
        return None


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_the_endpoint_with_the_least_under_way_gets_the_next_request() -> None:
    async def scenario() -> None:
        stand = Stand(3)
        leases = [await stand.balancer.acquire() for _ in range(6)]
        assert [endpoint.in_flight for endpoint in stand.endpoints] == [2, 2, 2]
        for lease in leases:
            if lease.endpoint is stand.endpoints[1]:
                stand.balancer.release(lease, Fault.NONE)
        assert [(await stand.balancer.acquire()).endpoint.url for _ in range(2)] == ["http://1", "http://1"]

    run(scenario())


def test_no_more_than_the_concurrency_are_under_way_and_who_waits_is_woken() -> None:
    async def scenario() -> None:
        stand = Stand(2, concurrency=3)
        leases = [await stand.balancer.acquire() for _ in range(3)]
        waiting = [asyncio.ensure_future(stand.balancer.acquire()) for _ in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        stand.balancer.release(leases[0], Fault.NONE)
        await settle()
        assert [task.done() for task in waiting].count(True) == 1
        stand.balancer.release(leases[1], None)
        await settle()
        assert all(task.done() for task in waiting)

    run(scenario())


def test_an_endpoint_that_is_down_rests_twice_as_long_each_time_and_comes_back_with_one_trial() -> None:
    async def scenario() -> None:
        stand = Stand(1)
        endpoint = stand.endpoints[0]
        leases = [await stand.balancer.acquire() for _ in range(3)]
        # All three fail for the same reason: that is one rest, not three.
        assert [stand.balancer.release(lease, Fault.DOWN) for lease in leases] == [True, False, False]
        for rest in (1, 2, 4, 8, 16, LONGEST_REST, LONGEST_REST):
            assert endpoint.rest_left(stand.clock.now()) == rest
            waiting = [asyncio.ensure_future(stand.balancer.acquire()) for _ in range(2)]
            await stand.clock.advance(rest - 0.5)
            assert not any(task.done() for task in waiting)
            await stand.clock.advance(0.5)
            assert [task.done() for task in waiting].count(True) == 1  # the trial
            trial = next(task for task in waiting if task.done()).result()
            assert stand.balancer.release(trial, Fault.DOWN)
            for task in waiting:
                task.cancel()
        await stand.clock.advance(LONGEST_REST)
        stand.balancer.release(await stand.balancer.acquire(), Fault.NONE)
        assert await stand.try_acquire() and await stand.try_acquire()  # well again: no trial any more
        stand.balancer.release(await stand.balancer.acquire(), Fault.DOWN)
        assert endpoint.rest_left(stand.clock.now()) == 1

    run(scenario())


def test_others_do_the_work_while_one_rests() -> None:
    async def scenario() -> None:
        stand = Stand(2)
        down, well = stand.endpoints
        stand.balancer.release(await stand.balancer.acquire(), Fault.DOWN)
        leases = [await stand.balancer.acquire() for _ in range(4)]
        assert {lease.endpoint.url for lease in leases} == {well.url}
        await stand.clock.advance(1)
        assert (await stand.balancer.acquire()).endpoint is down  # it has nothing under way
        assert (await stand.balancer.acquire()).endpoint is well  # the trial is not over

    run(scenario())


@pytest.mark.parametrize("known", [True, False])
def test_an_endpoint_that_answers_wrongly_rests_after_some_faults_in_a_row_or_at_once_while_it_is_unknown(known: bool) -> None:
    async def scenario() -> None:
        stand = Stand(1, known=known)
        faults = 0
        while not stand.endpoints[0].rest_left(0):
            stand.balancer.release(await stand.balancer.acquire(), Fault.ILL)
            faults += 1
        assert faults == (FAULTS_TO_REST if known else 1)

    run(scenario())


def test_a_good_answer_in_between_ends_the_row_of_faults() -> None:
    async def scenario() -> None:
        stand = Stand(1)
        for fault in [Fault.ILL, Fault.ILL, Fault.NONE] * 3:
            stand.balancer.release(await stand.balancer.acquire(), fault)
        assert stand.endpoints[0].rest_left(0) == 0

    run(scenario())


def test_an_endpoint_is_left_alone_for_as_long_as_it_asks() -> None:
    async def scenario() -> None:
        stand = Stand(2)
        stand.balancer.release(await stand.balancer.acquire(), Fault.ILL, retry_after=50)
        assert {(await stand.balancer.acquire()).endpoint.url for _ in range(3)} == {"http://1"}
        await stand.clock.advance(50)
        assert (await stand.balancer.acquire()).endpoint.url == "http://0"

    run(scenario())


def test_an_unknown_endpoint_gets_one_request_at_a_time() -> None:
    async def scenario() -> None:
        stand = Stand(1, known=False)
        lease = await stand.balancer.acquire()
        assert await stand.try_acquire() is None
        stand.balancer.release(lease, None)
        assert await stand.try_acquire() is not None

    run(scenario())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from([*Fault, None])), max_size=60), st.integers(1, 3), st.integers(1, 5))
def test_whatever_happens_leases_are_counted_and_none_is_lost(events: list[tuple[int, Fault | None]], count: int, concurrency: int) -> None:
    async def scenario() -> None:
        stand = Stand(count, concurrency)
        held: list[Lease] = []
        for which, fault in events:
            if which < len(held):
                stand.balancer.release(held.pop(which), fault)
            elif (lease := await stand.try_acquire()) is not None:
                held.append(lease)
            assert Counter(lease.endpoint.url for lease in held) == Counter({e.url: e.in_flight for e in stand.endpoints if e.in_flight})
            assert len(held) <= concurrency
        for lease in held:
            stand.balancer.release(lease, None)
        await stand.clock.advance(LONGEST_REST)
        assert await stand.try_acquire() is not None

    run(scenario())


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0.01, 10), st.none() | st.floats(0, 500))
def test_back_off_doubles_is_scattered_and_never_shorter_than_the_server_wants(attempt: int, first: float, wanted: float | None) -> None:
    seconds = Backoff(first, random.Random(attempt)).seconds(attempt, wanted)
    doubled = min(LONGEST, first * 2.0 ** min(attempt - 1, 32))
    assert seconds >= (wanted or 0)
    assert 0.5 * doubled <= seconds < 1.5 * doubled or seconds == wanted
