"""Spans: map rows of a batch, slot or chunk to token positions of requests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_ascend_hsx.compat.runner import BatchRow

# Number of wanted rows for a prompt and all generated tokens.
ALL_ROWS = sys.maxsize


class Span(NamedTuple):
    """Consecutive token positions of one request, and the rows that hold them.

    Attributes:
        request_id: vLLM's internal request id.
        first: token position of the first row.
        num_rows: number of rows.
        row: index of the first row, in the batch, slot or chunk.
    """

    request_id: str
    first: int
    num_rows: int
    row: int

    @property
    def positions(self) -> tuple[int, int]:
        """Token positions, as [first, end)."""
        return self.first, self.first + self.num_rows


def select_spans(layout: Iterable[BatchRow], wanted: dict[str, int]) -> list[Span]:
    """Return the spans of a batch that this rank extracts.

    Args:
        layout: the requests of the batch and their rows.
        wanted: number of rows to extract for each request that this rank owns, counted from
            position 0. Later rows (a decode of a prompt-only request) are left out.
    """
    spans = []
    for request_id, first, count, row in layout:
        count = min(count, wanted.get(request_id, 0) - first)
        if count > 0:
            spans.append(Span(request_id, first, count, row))
    return spans


def merge_rows(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return ranges (first row, rows) that cover `spans` in order.

    Adjacent spans are joined, because they need only one copy.
    """
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and sum(ranges[-1]) == span.row:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + span.num_rows)
        else:
            ranges.append((span.row, span.num_rows))
    return ranges


def cut_spans(spans: Sequence[Span], most_rows: int) -> Iterator[Sequence[Span]]:
    """Cut spans into groups of `most_rows` rows. The last group has the remaining rows.

    `Span.row` keeps the same origin.
    """
    if 0 < sum(span.num_rows for span in spans) <= most_rows:  # as in most steps
        yield spans
        return
    group: list[Span] = []
    room = most_rows
    for request_id, first, num_rows, row in spans:
        end = row + num_rows
        while row < end:
            count = min(room, end - row)
            group.append(Span(request_id, first, count, row))
            first, row, room = first + count, row + count, room - count
            if not room:
                yield group
                group, room = [], most_rows
    if group:
        yield group


def rows_in_chunk(spans: Sequence[Span], begin: int, most: int) -> int:
    """Return the number of rows for a chunk that begins at row `begin`, at most `most`.

    Short requests should be written in one piece. So a chunk ends at the end of a span, unless it
    would be less than half full.
    """
    ends = [span.row + span.num_rows for span in spans]
    whole = max((end - begin for end in ends if end <= begin + most), default=0)
    return whole if 2 * whole >= most else min(most, ends[-1] - begin)


def split_spans(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Split spans at rows `start` and `end`, and return the spans in between.

    `Span.row` is counted from `start`.
    """
    if start == 0 and spans and spans[-1].row + spans[-1].num_rows <= end:  # as in most steps
        return list(spans)
    inside = []
    for span in spans:
        low, high = max(span.row, start), min(span.row + span.num_rows, end)
        if low < high:
            inside.append(
                Span(span.request_id, span.first + low - span.row, high - low, low - start)
            )
    return inside
