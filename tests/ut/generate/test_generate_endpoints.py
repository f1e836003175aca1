"""The choice of the server for the next request, and pauses of failed servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from selectors import DefaultSelector
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.endpoints import FAULTS_TO_PAUSE, LONGEST_PAUSE_S, Balancer, Endpoint
from vllm_ascend_hsx.generate.errors import Failure, RequestError


class Instant(DefaultSelector):
    """A selector that never waits: time passes immediately."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for ever"
        self.now += timeout
        return super().select(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    selector = Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def balancer(count: int, proven: bool = True) -> Balancer:
    made = Balancer([f"http://{number}" for number in range(count)], 1.0)
    for endpoint in made.endpoints:
        endpoint.proven = proven
    return made


async def acquired_at_once(made: Balancer, failed_at: Endpoint | None = None) -> Endpoint | None:
    """Return an endpoint without a pause, if there is one."""
    task = asyncio.ensure_future(made.acquire(failed_at))
    for _ in range(20):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


def answer(made: Balancer, endpoint: Endpoint) -> None:
    """A request succeeds."""
    made.note_answer(endpoint)
    made.give_back(endpoint)


def fail(
    made: Balancer, endpoint: Endpoint, failure: Failure, retry_after: float | None = None
) -> bool:
    """A request fails. Return True if the endpoint begins to pause."""
    begins = made.note_failure(endpoint, RequestError("as the test wants", failure, retry_after))
    made.give_back(endpoint)
    return begins


def now() -> float:
    return round(asyncio.get_running_loop().time(), 3)


def test_least_busy_endpoint_gets_the_next_request() -> None:
    async def scenario() -> None:
        made = balancer(3)
        for _ in range(6):
            await made.acquire()
        assert [endpoint.in_flight for endpoint in made.endpoints] == [2, 2, 2]
        for _ in range(2):
            answer(made, made.endpoints[1])
        assert [(await made.acquire()).url for _ in range(2)] == ["http://1", "http://1"]

    run(scenario)


def test_row_goes_to_the_endpoint_with_its_prefix_unless_that_is_busier() -> None:
    async def scenario() -> None:
        made = balancer(2)
        near, other = made.endpoints
        assert [await made.acquire(near=near) for _ in range(6)] == [
            near,
            near,
            near,
            other,
            near,
            other,
        ]
        fail(made, near, Failure.UNREACHED)
        assert await made.acquire(near=near) is other, "it pauses"

    run(scenario)


def test_pause_of_a_failing_endpoint_doubles_and_ends_with_one_trial() -> None:
    async def scenario() -> None:
        made = balancer(1)
        (endpoint,) = made.endpoints
        for _ in range(3):
            await made.acquire()
        # All three requests fail for the same reason, so there is one pause.
        assert [fail(made, endpoint, Failure.BROKEN) for _ in range(3)] == [True, False, False]
        ends = 0.0
        for pause in (1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S):
            ends += pause
            assert endpoint.pause_left() == pytest.approx(pause)
            assert await made.acquire() is endpoint and now() == ends
            assert await acquired_at_once(made) is None, "the trial is not over"
            assert fail(made, endpoint, Failure.UNREACHED)
        answer(made, await made.acquire())
        assert await acquired_at_once(made) and await acquired_at_once(made)  # no longer on trial
        fail(made, endpoint, Failure.UNREACHED)
        assert endpoint.pause_left() == pytest.approx(1)

    run(scenario)


def test_pause_that_ends_during_the_choice_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is in flight, so nothing else would wake a waiting request."""
    pauses = [1e-6]
    monkeypatch.setattr(Endpoint, "pause_left", lambda self: pauses.pop() if pauses else 0.0)

    async def scenario() -> None:
        made = balancer(1)
        assert await acquired_at_once(made) is made.endpoints[0]

    run(scenario)


def test_other_endpoints_are_used_during_a_pause() -> None:
    async def scenario() -> None:
        made = balancer(2)
        down, well = made.endpoints
        assert await made.acquire() is down
        fail(made, down, Failure.UNREACHED)
        assert [await made.acquire() for _ in range(4)] == [well] * 4
        await asyncio.sleep(1)
        assert await made.acquire() is down  # it has no requests in flight
        assert await made.acquire() is well  # the trial has not ended

    run(scenario)


@pytest.mark.parametrize("proven", [True, False])
def test_wrong_answers_pause_a_new_endpoint_immediately_and_a_proven_one_after_three(
    proven: bool,
) -> None:
    async def scenario() -> None:
        made = balancer(1, proven)
        for faults in [2, 1] if proven else []:  # a good answer in between resets the faults
            for _ in range(faults):
                assert not fail(made, await made.acquire(), Failure.WRONG)
            answer(made, await made.acquire())
        faults = 1
        while not fail(made, await made.acquire(), Failure.UNCLEAR):
            faults += 1
        assert faults == (FAULTS_TO_PAUSE if proven else 1)

    run(scenario)


def test_retry_after_is_respected() -> None:
    async def scenario() -> None:
        made = balancer(2)
        fail(made, await made.acquire(), Failure.WRONG, retry_after=50)
        assert {(await made.acquire()).url for _ in range(3)} == {"http://1"}
        await asyncio.sleep(50)
        assert (await made.acquire()).url == "http://0"

    run(scenario)


@pytest.mark.parametrize("failure", [None, Failure.REFUSED])
def test_new_endpoint_gets_one_request_at_a_time_and_waiters_are_woken(
    failure: Failure | None,
) -> None:
    async def scenario() -> None:
        made = balancer(1, proven=False)
        endpoint = await made.acquire()
        waiting = asyncio.ensure_future(made.acquire())
        assert await acquired_at_once(made) is None and not waiting.done()
        if failure is None:
            made.give_back(endpoint)  # the run was stopped meanwhile
        else:
            fail(made, endpoint, failure)
        assert await waiting is endpoint and now() == 0

    run(scenario)


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        pytest.param([{}, {"in_flight": 50}], 1, id="another, however busy"),
        pytest.param([{}, {"pauses": 1}], 1, id="another on trial"),
        pytest.param(
            [{}, {"pauses": 1}, {"in_flight": 50}], 2, id="one that works before one on trial"
        ),
        pytest.param(
            [{}, {"proven": False}, {"in_flight": 50}], 2, id="one that works before an unknown one"
        ),
        pytest.param([{}, {"faults": 1}, {"in_flight": 50}], 2, id="one without faults"),
        pytest.param(
            [{}, {"in_flight": 5}, {"in_flight": 4}], 2, id="the least busy of those that work"
        ),
        pytest.param([{}, {"paused_until": 9.0}], 0, id="the same while the other pauses"),
        pytest.param(
            [{}, {"pauses": 1, "in_flight": 1}],
            0,
            id="the same while the trial of the other is not over",
        ),
        pytest.param(
            [{"paused_until": 5.0}, {"paused_until": 9.0}], 0, id="the first whose pause ends"
        ),
        pytest.param([{}], 0, id="the only one"),
    ],
)
def test_a_row_that_has_failed_goes_to_another_endpoint(
    states: list[dict[str, Any]], chosen: int
) -> None:
    async def scenario() -> None:
        made = balancer(len(states))
        for endpoint, state in zip(made.endpoints, states, strict=True):
            vars(endpoint).update(state)
        assert (await made.acquire(made.endpoints[0])).url == f"http://{chosen}"

    run(scenario)


REFUSALS = [Failure.REFUSED, Failure.ABSENT]


@pytest.mark.parametrize("failure", Failure)
def test_refusals_and_late_files_count_as_answers(
    failure: Failure,
) -> None:
    async def scenario() -> None:
        made = balancer(1)
        (endpoint,) = made.endpoints
        endpoint.faults = FAULTS_TO_PAUSE - 1
        fail(made, await made.acquire(), failure)
        assert (endpoint.answered, endpoint.failed) == ((1, 0) if failure in REFUSALS else (0, 1))
        assert endpoint.pauses == (failure not in REFUSALS)
        endpoint.paused_until = 0.0
        endpoint.proven, endpoint.failed = False, 0
        fail(made, await made.acquire(), failure)
        assert endpoint.failed == (failure is not Failure.REFUSED), (
            "it has never written a file here"
        )

    run(scenario)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([*Failure, None])), max_size=60),
    st.integers(1, 3),
)
def test_all_requests_are_counted(events: list[tuple[int, Failure | None]], count: int) -> None:
    async def scenario() -> None:
        made = balancer(count)
        held: list[Endpoint] = []
        failed_at: Endpoint | None = None
        for which, failure in events:
            if which < len(held):
                failed_at = held.pop(which)
                if failure is None:
                    answer(made, failed_at)
                else:
                    fail(made, failed_at, failure)
            elif (endpoint := await acquired_at_once(made, failed_at)) is not None:
                held.append(endpoint)
            assert Counter(each.url for each in held) == Counter(
                {each.url: each.in_flight for each in made.endpoints if each.in_flight}
            )
        for endpoint in held:
            made.give_back(endpoint)
        await made.acquire()
        assert now() <= LONGEST_PAUSE_S

    run(scenario)
