"""Admission: rows fit into the ring and into the limits of an API request."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.connector.admission import Cost, RankLoad, RefusalLog, RequestLimits
from vllm_ascend_hsx.connector.metadata import RankState
from vllm_ascend_hsx.connector.progress import RankProgress, StepRate, WriteRate
from vllm_ascend_hsx.connector.storage_watch import Reminder
from vllm_ascend_hsx.drafter.spans import Span


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=50)
@given(
    ring=st.integers(50, 400),
    prompts=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    made=st.integers(10, 60),
    share=st.floats(0.2, 1.5),
    known=st.booleans(),
)
def test_admitted_prompts_fit_into_the_ring_and_all_prompts_are_admitted(
    ring: int, prompts: list[int], made: int, share: float, known: bool
) -> None:
    """Only a prompt larger than the ring may fill the ring.

    Steps produce `made` bytes of one prompt after another, and storage writes `share` of them.
    Reports of the worker arrive one step late.
    """
    load = RankLoad(ring, row_bytes=1)
    rates = {"write_rate": made * share, "prompt_rate": float(made)} if known else {}
    waiting, running, begun = list(prompts), [], 0
    backlog, late = 0.0, RankState()
    for _ in range(3_000):
        while waiting and load.admits(Cost(waiting[0], 0)):
            load.promise(Cost(waiting[0], 0))
            running.append(waiting.pop(0))
            begun += 1
        load.start([Cost(size, 0) for size in prompts[begun - len(load._promised) : begun]])
        comes = min(made, sum(running))
        too_large = [size for size in prompts if size * (1 - share if known else 1) > ring]
        backlog = max(0.0, backlog + comes - made * share)
        # All rows of a step arrive at once, and written rows are known in whole bytes.
        assert backlog <= ring + made + 1 or too_large
        left = comes
        while left:
            part = min(left, running[0])
            running[0] -= part
            left -= part
            if not running[0]:
                running.pop(0)
        load.report(late)
        whole = int(backlog)
        late = RankState(backlog=whole, coming=sum(running), started=begun, **rates)
        if not waiting and not running:
            return
    pytest.fail(f"{len(waiting)} prompts were never admitted")


@pytest.mark.parametrize(
    ("state", "request_cost", "admitted"),
    [
        (RankState(), Cost(80, 0), True),
        (RankState(), Cost(81, 0), False),
        (
            RankState(backlog=30),
            Cost(101, 0),
            True,
        ),  # larger than the ring, and half of the ring is free
        (RankState(backlog=31), Cost(101, 0), False),
        (RankState(coming=50, started=1), Cost(50, 0), True),
        (RankState(coming=50, started=1), Cost(51, 0), False),
        (
            RankState(prompt_rate=10.0, write_rate=5.0, backlog=60),
            Cost(60, 0),
            True,
        ),  # storage writes half of the rows while they are computed
        (RankState(prompt_rate=10.0, write_rate=5.0, backlog=60), Cost(61, 0), False),
        (RankState(prompt_rate=10.0, write_rate=10.0, backlog=100), Cost(1000, 0), True),
        (RankState(prompt_rate=10.0, write_rate=10.0, backlog=101), Cost(1, 0), False),
        (RankState(paused=True), Cost(1, 0), False),
    ],
)
def test_request_is_admitted_if_the_debt_fits_and_storage_responds(
    state: RankState, request_cost: Cost, admitted: bool
) -> None:
    load = RankLoad(ring_bytes=100, row_bytes=1)
    load.promise(Cost(20, 0))
    if state.started:
        load.start([Cost(20, 0)])
    load.report(state)
    assert load.admits(request_cost) == admitted


@pytest.mark.parametrize(
    ("state", "admitted"),
    [
        (RankState(), False),
        (RankState(write_rate=100.0), False),
        (
            RankState(write_rate=100.0, step_rate=10.0),
            True,
        ),  # two requests of 5 bytes at 10 steps per second
        (RankState(write_rate=99.0, step_rate=10.0), False),
        (RankState(write_rate=99.0, step_rate=10.0, prompt_rate=99.0), False),
        (RankState(write_rate=99.0, prompt_rate=99.0), True),  # no request has generated for long
    ],
)
def test_second_request_generates_if_storage_keeps_up_with_both(
    state: RankState, admitted: bool
) -> None:
    load = RankLoad(ring_bytes=1000, row_bytes=5)
    load.report(state)
    assert load.admits(Cost(5, 5000)), "one may always generate"
    load.promise(Cost(5, 5000))
    assert load.admits(Cost(5, 5)) == admitted
    assert load.admits(Cost(5, 0)), "its prompt alone fits"
    load.end(Cost(5, 5000))
    assert load.admits(Cost(5, 5))


def test_prompt_rows_are_expected_until_computed_or_decided() -> None:
    progress = RankProgress(row_bytes=10, num_writers=1)
    one, two = object(), object()
    progress.begin(one, 5)  # type: ignore[arg-type]
    progress.begin(two, 7)  # type: ignore[arg-type]

    def coming() -> int:
        news = progress.end_step(
            paused=False, unresponsive=False, opens_slowly=False, needs_space=False
        )
        assert news is not None
        return news[0].coming

    assert coming() == 120
    progress.staged(4, [(one, Span("one", 0, 3, 0)), (two, Span("two", 0, 1, 3))])  # type: ignore[list-item]
    assert coming() == 80
    progress.staged(3, [(one, Span("one", 3, 3, 0))])  # type: ignore[list-item]
    assert coming() == 60, "the last row is of a generated token"
    progress.decide(two, "broken")  # type: ignore[arg-type]
    progress.staged(1, [(two, Span("two", 1, 1, 0))])  # type: ignore[list-item]
    assert coming() == 0


@pytest.mark.parametrize(
    ("rates", "second", "admitted"),
    [
        ({}, Cost(10, 50), True),  # all rows of both requests fit into the ring
        ({}, Cost(10, 51), False),  # the write rate is unknown
        ({"prompt_rate": 100.0, "write_rate": 20.0, "step_rate": 10.0}, Cost(10, 51), True),
        ({"prompt_rate": 100.0, "write_rate": 19.0, "step_rate": 10.0}, Cost(10, 51), False),
    ],
)
def test_requests_generate_together_if_rows_fit_or_storage_keeps_up(
    rates: dict[str, float], second: Cost, admitted: bool
) -> None:
    load = RankLoad(100, row_bytes=1)
    first = Cost(10, 30)
    load.promise(first)
    load.start([first])
    load.report(RankState(started=1, **rates))
    assert load.admits(second) == admitted


# Rates


def test_write_rate_counts_all_threads_and_ignores_idle_time() -> None:
    clock = Clock()
    rate = WriteRate(2, clock)
    assert rate.value() is None
    for _ in range(50):
        rate.begin(100)
        clock.now += 0.5
        rate.end(100)
        clock.now += 60.0
    assert rate.value() == pytest.approx(400.0)


def test_long_write_lowers_the_rate_before_it_ends() -> None:
    clock = Clock()
    rate = WriteRate(1, clock)
    for _ in range(100):
        rate.begin(100)
        clock.now += 0.1
        rate.end(100)
    assert rate.value() == pytest.approx(1000.0)
    rate.begin(100)
    clock.now += 0.2
    assert rate.value() == pytest.approx(500.0)
    clock.now += 9.8
    assert rate.value() == pytest.approx(10.0)
    rate.end(100)
    assert rate.value() == pytest.approx(10.0, rel=0.1)


def test_write_rate_follows_a_change_of_speed() -> None:
    clock = Clock()
    rate = WriteRate(2, clock)
    for size in (10_000, 100):
        for _ in range(200):
            rate.begin(size)
            clock.now += 0.1
            rate.end(size)
    assert rate.value() == pytest.approx(2000.0, rel=0.1)


def test_step_rates_are_peaks_and_exclude_waiting_time() -> None:
    clock = Clock()
    steps = StepRate(clock)
    for waited in (0.0, 0.0, 50.0, 0.0, 0.0, 3.0):
        clock.now += 0.5 + waited
        steps.waited(waited)
        steps.stepped(100)
    assert steps.bytes_per_s == pytest.approx(200.0)
    assert steps.steps_per_s == pytest.approx(2.0)
    for _ in range(20):
        clock.now += 5.0
        steps.stepped(100)
    assert steps.bytes_per_s == pytest.approx(200.0, rel=0.05)


def test_steps_without_rows_do_not_change_the_step_rate() -> None:
    clock = Clock()
    steps = StepRate(clock)
    for index in range(40):
        clock.now += 0.001
        steps.stepped(100 if index % 4 == 0 else 0)
    assert steps.bytes_per_s == pytest.approx(100 / 0.004)
    assert steps.steps_per_s is None


def test_idle_time_is_not_a_long_step() -> None:
    clock = Clock()
    steps = StepRate(clock)
    assert steps.longest == 1.0
    for seconds in (0.02, 0.03, 0.02, 100.0, 0.02):
        clock.now += seconds
        steps.stepped(0)
    assert steps.longest == pytest.approx(0.03)


# Lines in the log


def test_log_line_is_due_soon_and_then_every_ten_seconds() -> None:
    clock = Clock()
    reminder = Reminder(0.5, clock)
    told = []
    reminder.begin()
    for tenth in range(350):
        clock.now = 1000.0 + tenth / 8
        if reminder.due_in() == 0:
            told.append(tenth / 8)
            reminder.logged()
    assert told == [0.5, 10.5, 20.5, 30.5, 40.5]
    assert reminder.end() == pytest.approx(349 / 8)
    assert reminder.end() == 0.0


def test_problem_that_returns_within_ten_seconds_counts_as_the_same() -> None:
    clock = Clock()
    reminder = Reminder(0.5, clock)
    for _ in range(3):
        reminder.begin()
        assert reminder.due_in() > 0
        clock.now += 0.125
        reminder.end()
        clock.now += 1.0
    reminder.begin()
    assert reminder.due_in() == 0.125
    clock.now += 0.125
    assert reminder.due_in() == 0
    assert reminder.seconds == 0.5
    reminder.end()
    clock.now += 10.0
    reminder.begin()
    assert reminder.due_in() == 0.5


# The limits of an API request hold for any prompts, samples and names

ROW_BYTES = 64
DIGITS = "0123abcd"


def make_limits(files: int = 4, rows: int = 1000) -> RequestLimits:
    return RequestLimits(files, rows * ROW_BYTES, ROW_BYTES)


def completion(name: str, prompts: int, samples: int = 1, digits: str = DIGITS) -> list[str]:
    """Return vLLM's ids of a completion request."""
    return [
        "".join(
            (
                f"{sample}_" if samples > 1 else "",
                f"cmpl-{name}-{prompt}",
                f"-{digits}" if digits else "",
            )
        )
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def chat(name: str, samples: int = 1, digits: str = DIGITS) -> list[str]:
    return [
        f"{sample}_chatcmpl-{name}-{digits}" if samples > 1 else f"chatcmpl-{name}-{digits}"
        for sample in range(samples)
    ]


def stored(limits: RequestLimits, ids: list[str], rows: int = 1) -> int:
    """Return the number of files that are allowed."""
    return sum(limits.refusal(each, rows) is None for each in ids)


@pytest.mark.parametrize(
    "digits", [DIGITS, ""], ids=["random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"]
)
@pytest.mark.parametrize(
    "name", ["x", "sample-17", "0-0", "3_x", "a/../b\nc", "deadbeef", "cmpl-x-0-deadbeef", ""]
)
@pytest.mark.parametrize(("prompts", "samples"), [(9, 1), (1, 9), (3, 3)])
def test_prompts_and_samples_of_a_completion_are_counted_together(
    name: str, digits: str, prompts: int, samples: int
) -> None:
    assert stored(make_limits(), completion(name, prompts, samples, digits)) == 4


@given(name=st.text(max_size=60))
def test_samples_are_counted_together_for_any_request_id(name: str) -> None:
    assert stored(make_limits(), chat(name, samples=9)) == 4
    assert stored(make_limits(), completion(name, 3, 3)) == 4


@pytest.mark.parametrize(
    "digits", [DIGITS, ""], ids=["random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"]
)
def test_items_of_one_score_request_are_counted_together(digits: str) -> None:
    ids = [f"generative-scoring-row-7-{item}{'-' if digits else ''}{digits}" for item in range(9)]
    assert stored(make_limits(), ids) == 4


def test_numbered_request_ids_are_counted_separately() -> None:
    limits = make_limits()
    ids = [
        each
        for number in range(30)
        for sep in "-_"
        for each in chat(f"row{sep}{number}") + completion(f"row{sep}{number}", 1)
    ]
    assert stored(limits, ids) == len(ids)


def test_requests_with_the_same_id_are_counted_separately() -> None:
    limits = make_limits()
    assert [stored(limits, completion("same", 1, digits=f"{n:08x}")) for n in range(9)] == [1] * 9
    assert [stored(limits, completion("same", 3, digits=f"{n:08x}")) for n in range(9)] == [3] * 9
    assert [stored(limits, chat("same", 3, digits=f"{n:08x}")) for n in range(9)] == [3] * 9


def test_late_prompts_are_counted_with_the_first_despite_other_requests() -> None:
    limits = make_limits()
    assert (
        sum(
            stored(limits, [each, *completion(f"other-{n}", 2)])
            for n, each in enumerate(completion("big", 500))
        )
        == 4 + 500 * 2
    )


def test_bytes_of_an_api_request_are_limited_and_smaller_prompts_still_fit() -> None:
    limits = make_limits(files=100, rows=50)
    first, second, third, fourth = completion("x", 4)
    assert limits.refusal(first, 30) is None
    reason = limits.refusal(second, 21)
    assert reason is not None
    assert (
        f"up to {51 * ROW_BYTES} bytes, but kv_connector_extra_config.max_bytes_per_request is "
        f"{50 * ROW_BYTES}; send fewer"
    ) in reason
    assert limits.refusal(third, 20) is None
    assert limits.refusal(fourth, 1) is not None


def test_refusals_are_logged_once_in_ten_seconds_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = RefusalLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.add("cmpl-x\ny-4-0123abcd", "no room")
        now = 9.9
        log.add("a", "no room")
        assert caplog.messages == [r"request 'cmpl-x\ny-4-0123abcd' is not extracted: no room"]
        now = 10.0
        log.add("b", "no room")
        assert caplog.messages[1] == (
            "request 'b' is not extracted: no room (3 others were refused since the last log line)"
        )
        now = 20.0
        log.add("c", "no room")
        assert caplog.messages[2] == "request 'c' is not extracted: no room"
