"""Work on one request's rows keeps its order where it overlaps; what is written is known."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_ascend_hsx.connector.threads import EVERY_POSITION, Job, Positions, SpanSet, ThreadPool, WriteOrder

spans = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda span: (span[0], span[0] + span[1]))


def overlap(left: Positions, right: Positions) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def no_job() -> tuple[()]:
    return ()


@given(work=st.lists(st.one_of(spans, st.just(EVERY_POSITION)), max_size=12), side_by_side=st.booleans(), data=st.data())
def test_overlapping_work_runs_one_after_the_other_and_nothing_waits_without_need(
    work: list[Positions], side_by_side: bool, data: st.DataObject
) -> None:
    order = WriteOrder(side_by_side)
    jobs: list[Job] = [lambda: () for _ in work]
    running: set[int] = set()
    finished: set[int] = set()
    begun = 0

    def collide(index: int, other: int) -> bool:
        return not side_by_side or overlap(work[index], work[other])

    def check() -> None:
        for index in range(begun):
            before = [other for other in range(index) if collide(index, other) and other not in finished]
            waits = index not in running and index not in finished
            assert waits or not before, "it runs beside, or in front of, earlier work on its rows"
            # One that could run may still stand behind another that cannot: the order is kept.
            assert not waits or any(other < index and other not in finished for other in range(begun))
        waiting = [index for index in range(begun) if index not in running | finished]
        if waiting:
            assert any(collide(waiting[0], other) for other in running), "the first that waits has nothing to wait for"

    while begun < len(work) or running:
        finish = running and (begun == len(work) or data.draw(st.booleans()))
        if finish:
            index = data.draw(st.sampled_from(sorted(running)))
            running.remove(index)
            finished.add(index)
            running |= {jobs.index(job) for job in order.done(work[index])}
        else:
            begun += 1
            if order.begin(work[begun - 1], jobs[begun - 1]):
                running.add(begun - 1)
        check()
    assert finished == set(range(len(work))), "work was forgotten"


@given(work=st.lists(spans, max_size=12))
def test_work_on_rows_of_its_own_begins_at_once(work: list[Positions]) -> None:
    order = WriteOrder()
    apart: list[Positions] = []
    for span in work:
        if not any(overlap(span, other) for other in apart):
            apart.append(span)
    assert all(order.begin(span, no_job) for span in apart)


# The set of written positions, against a plain set of integers

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=25)


@given(SPANS, st.integers(0, 60))
def test_any_order_of_spans_equals_the_set_of_their_positions(added: list[tuple[int, int]], tokens: int) -> None:
    spans = SpanSet()
    positions: set[int] = set()
    for first, last in added:
        spans.add(first, last)
        positions |= set(range(first, last))
        kept = spans.spans
        assert {p for a, b in kept for p in range(a, b)} == positions
        assert all(a < b for a, b in kept)
        assert all(b < c for (_, b), (c, _) in zip(kept, kept[1:], strict=False)), "spans that touch are merged"
    missing = spans.missing(tokens)
    assert {p for a, b in missing for p in range(a, b)} == set(range(tokens)) - positions
    assert all(b < c for (_, b), (c, _) in zip(missing, missing[1:], strict=False))


def test_writing_in_order_keeps_one_span() -> None:
    spans = SpanSet()
    for position in range(1000):
        spans.add(position, position + 1)
    assert spans.spans == [(0, 1000)]


def test_a_job_that_raises_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool(1, "test-writer")
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("a bug")

    pool.submit(fail, lambda: ran.append("next"))
    assert pool.wait(10)
    assert (ran, pool.pending, pool.silent_for()) == (["next"], 0, 0.0)
    assert "a bug" in caplog.text
    assert pool.close(10)
