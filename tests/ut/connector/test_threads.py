"""SpanSet and ThreadPool: sets of positions, and jobs that raise."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_ascend_hsx.connector.threads import SpanSet, ThreadPool

# The set of written positions, against a plain set of integers

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=25,
)


@given(SPANS, st.integers(0, 60))
def test_any_order_of_spans_equals_the_set_of_their_positions(
    added: list[tuple[int, int]], tokens: int
) -> None:
    spans = SpanSet()
    positions: set[int] = set()
    for first, last in added:
        spans.add(first, last)
        positions |= set(range(first, last))
        kept = spans.spans
        assert {p for a, b in kept for p in range(a, b)} == positions
        assert all(a < b for a, b in kept)
        assert all(b < c for (_, b), (c, _) in zip(kept, kept[1:], strict=False)), (
            "spans that touch are merged"
        )
    missing = spans.missing(tokens)
    assert {p for a, b in missing for p in range(a, b)} == set(range(tokens)) - positions
    assert all(b < c for (_, b), (c, _) in zip(missing, missing[1:], strict=False))


def test_writing_in_order_keeps_one_span() -> None:
    spans = SpanSet()
    for position in range(1000):
        spans.add(position, position + 1)
    assert spans.spans == [(0, 1000)]


def test_exception_of_a_job_is_logged_and_other_jobs_run(caplog: pytest.LogCaptureFixture) -> None:
    pool = ThreadPool(1, "test-writer")
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("a bug")

    pool.submit(fail, lambda: ran.append("next"))
    assert pool.wait(10)
    assert (ran, pool.pending, pool.stalled_for()) == (["next"], 0, 0.0)
    assert "a bug" in caplog.text
    assert pool.close(10)
