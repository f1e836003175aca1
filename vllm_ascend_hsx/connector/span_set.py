"""Which token positions have been written: a set of integers kept as merged, half-open spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

Interval = tuple[int, int]

_NAMED = 8  # of the missing spans; the rest is counted


class SpanSet:
    """Positions as sorted, disjoint spans [first, last) that do not touch; in-order writing keeps it at one span."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add positions [first, last); an empty span adds nothing."""
        if first >= last:
            return
        # The spans that overlap or touch the new one: those that end at `first` or later and begin at `last` or earlier.
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        if low < high:
            first = min(first, self._firsts[low])
            last = max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def missing(self, last: int) -> list[Interval]:
        """The spans of [0, last) that are not in the set, in order."""
        gaps: list[Interval] = []
        position = 0
        for begin, end in zip(self._firsts, self._lasts, strict=True):
            if begin >= last:
                break
            if position < begin:
                gaps.append((position, begin))
            position = end
        if position < last:
            gaps.append((position, last))
        return gaps

    def spans(self) -> list[Interval]:
        """The spans, in order."""
        return list(zip(self._firsts, self._lasts, strict=True))


def describe_missing(missing: list[Interval], tokens: int) -> str:
    """The missing spans of a number of tokens, in words."""
    named = ", ".join(f"[{first}, {last})" for first, last in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more spans" if len(missing) > _NAMED else ""
    return f"{named}{more} of {tokens}"
