"""The set of written positions, against a plain set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.connector.write_order import SpanSet

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
