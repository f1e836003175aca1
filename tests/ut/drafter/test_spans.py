"""Spans assign each row of a batch to a request. Splitting and merging lose and swap no rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.compat.runner import BatchRow
from vllm_ascend_hsx.drafter.spans import (
    Span,
    cut_spans,
    merge_rows,
    rows_in_chunk,
    select_spans,
    split_spans,
)


@pytest.mark.parametrize(
    ("layout", "wanted", "expected"),
    [
        pytest.param([("a", 0, 5, 0)], {"a": 5}, [("a", 0, 5, 0)], id="whole prompt"),
        pytest.param([("a", 0, 4, 0)], {"a": 9}, [("a", 0, 4, 0)], id="first chunk"),
        pytest.param([("a", 4, 5, 0)], {"a": 9}, [("a", 4, 5, 0)], id="last chunk"),
        pytest.param([("a", 5, 1, 0)], {"a": 5}, [], id="decode of a prompt-only request"),
        pytest.param(
            [("a", 3, 4, 0)],
            {"a": 5},
            [("a", 3, 2, 0)],
            id="resumed: prompt and output in one chunk",
        ),
        pytest.param(
            [("d", 9, 2, 0), ("a", 0, 3, 2)],
            {"a": 3},
            [("a", 0, 3, 2)],
            id="behind somebody's decode",
        ),
        pytest.param(
            [("a", 0, 3, 0), ("b", 0, 2, 3)],
            {"b": 2},
            [("b", 0, 2, 3)],
            id="another rank's prompt before ours",
        ),
        pytest.param([], {"a": 5}, [], id="not scheduled"),
    ],
)
def test_spans_are_the_wanted_rows_of_the_batch(
    layout: list[tuple], wanted: dict[str, int], expected: list[tuple]
) -> None:
    assert select_spans([BatchRow(*row) for row in layout], wanted) == [
        Span(*span) for span in expected
    ]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[BatchRow], dict[str, int]]:
    layout, wanted, row = [], {}, 0
    for index in range(draw(st.integers(0, 8))):
        request_id = f"r{index}"
        first, num_rows = draw(st.integers(0, 20)), draw(st.integers(1, 12))
        layout.append(BatchRow(request_id, first, num_rows, row))
        row += num_rows
        if draw(st.booleans()):
            wanted[request_id] = draw(st.integers(1, 40))
    return layout, wanted


@given(batches())
def test_every_wanted_row_of_the_batch_is_in_exactly_one_span(
    batch: tuple[list[BatchRow], dict[str, int]],
) -> None:
    layout, wanted = batch
    expected = {
        (row.request_id, row.first + offset): row.row + offset
        for row in layout
        for offset in range(row.num_rows)
        if row.first + offset < wanted.get(row.request_id, 0)
    }
    found = [
        (s.request_id, s.first + k, s.row + k)
        for s in select_spans(layout, wanted)
        for k in range(s.num_rows)
    ]
    assert len(found) == len(expected)
    assert {(request_id, position): row for request_id, position, row in found} == expected


@given(batches())
def test_merged_ranges_visit_the_rows_of_the_spans_in_order(
    batch: tuple[list[BatchRow], dict[str, int]],
) -> None:
    spans = select_spans(*batch)
    visited = [
        row for first, num_rows in merge_rows(spans) for row in range(first, first + num_rows)
    ]
    assert visited == [span.row + k for span in spans for k in range(span.num_rows)]
    assert all(
        sum(a) < b[0] for a, b in zip(merge_rows(spans), merge_rows(spans)[1:], strict=False)
    )


@given(batches(), st.lists(st.integers(1, 15), min_size=1))
def test_split_spans_cover_every_staged_row_once(
    batch: tuple[list[BatchRow], dict[str, int]], sizes: list[int]
) -> None:
    at, staged = 0, []
    for span in select_spans(*batch):
        staged.append(span._replace(row=at))
        at += span.num_rows
    expected = [(s.request_id, s.first + k, s.row + k) for s in staged for k in range(s.num_rows)]
    found, start = [], 0
    for size in itertools.cycle(sizes):
        if start >= at:
            break
        spans = split_spans(staged, start, min(start + size, at))
        assert sum(span.num_rows for span in spans) == min(size, at - start)
        found += [
            (s.request_id, s.first + k, start + s.row + k) for s in spans for k in range(s.num_rows)
        ]
        start += size
    assert found == expected


@given(batches(), st.integers(1, 30))
def test_cut_spans_keep_order_and_fill_all_groups_but_the_last(
    batch: tuple[list[BatchRow], dict[str, int]], most_rows: int
) -> None:
    spans = select_spans(*batch)
    groups = list(cut_spans(spans, most_rows))
    rows = [(s.request_id, s.first + k, s.row + k) for s in spans for k in range(s.num_rows)]
    assert [
        (s.request_id, s.first + k, s.row + k)
        for group in groups
        for s in group
        for k in range(s.num_rows)
    ] == rows
    sizes = [sum(span.num_rows for span in group) for group in groups]
    assert sizes == [most_rows] * (len(rows) // most_rows) + [len(rows) % most_rows] * (
        len(rows) % most_rows > 0
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([128, 128, 128], [128, 128, 128], id="each of these is written in one piece"),
        pytest.param([64, 64, 64], [128, 64], id="two of these"),
        pytest.param([200, 200], [170, 170, 60], id="no chunk is shorter than half for it"),
        pytest.param([2048], [170] * 12 + [8], id="a long one"),
        pytest.param([3], [3], id="a step of few rows"),
    ],
)
def test_chunk_ends_with_a_request_unless_it_would_be_too_short(
    lengths: list[int], expected: list[int]
) -> None:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    spans = [Span(f"r{row}", 0, length, row) for length, row in zip(lengths, starts, strict=True)]
    chunks: list[int] = []
    while sum(chunks) < sum(lengths):
        chunks.append(rows_in_chunk(spans, sum(chunks), 170))
    assert chunks == expected
