"""Spans: which rows belong to which token positions of which request, in a batch, in a slot, in a chunk of one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_ascend_hsx.compat.runner import BatchRow

# As the number of wanted rows of a request: its prompt's and those of all tokens that it generates.
ALL_ROWS = sys.maxsize


class Span(NamedTuple):
    """Consecutive token positions of one request, and where their rows stand.

    Attributes:
        request_id: vLLM's internal request id.
        first: token position of the first row.
        num_rows: number of rows.
        row: index of the first row, in the batch or in the slot.
    """

    request_id: str
    first: int
    num_rows: int
    row: int

    @property
    def positions(self) -> tuple[int, int]:
        """[first, end) of its token positions."""
        return self.first, self.first + self.num_rows


def select_spans(layout: Iterable[BatchRow], wanted: dict[str, int]) -> list[Span]:
    """The spans of a batch that this rank extracts.

    Args:
        layout: who is in the batch.
        wanted: for each request that this rank owns the number of its rows to extract, counted from position 0. Rows from there on
            (a decode of a prompt-only request) are left out.
    """
    spans = []
    for request_id, first, count, row in layout:
        count = min(count, wanted.get(request_id, 0) - first)
        if count > 0:
            spans.append(Span(request_id, first, count, row))
    return spans


def merge_rows(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Ranges (first row, rows) that cover `spans` in their order, neighbours joined: one copy serves them."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and sum(ranges[-1]) == span.row:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + span.num_rows)
        else:
            ranges.append((span.row, span.num_rows))
    return ranges


def split_spans(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What staged rows [start, end) hold; `row` of the spans is counted from `start`."""
    inside = []
    for span in spans:
        low, high = max(span.row, start), min(span.row + span.num_rows, end)
        if low < high:
            inside.append(Span(span.request_id, span.first + low - span.row, high - low, low - start))
    return inside
