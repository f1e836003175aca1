"""The order in which rows are sent: each row after the row with the longest common prefix.

A server copies the rows of a prefix that it has published and computes the rest. A turn of a
conversation is therefore sent once the turn before it has a file. Rows are sorted in blocks: a
prefix comes before its extensions, and rows with a common prefix are neighbours. A row is held
until the first row with the longest common prefix has ended. Rows with other prefixes are sent
meanwhile. Of all rows that may be sent, the first is sent, so conversations are completed before
others begin. With `concurrency` C at most C conversations are unfinished, and the server's KV cache
must keep only their prefixes: 32 conversations of 4,000 tokens are 128,000 tokens.

Holding a row costs no time where computing is the limit: a server that computes one prompt of 2,000
tokens is busy, and 31 other rows with the same beginning would add 62,000 tokens. At the end of a
dataset, and with few long conversations, fewer than C requests are in flight.
"""

from __future__ import annotations

import heapq
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_ascend_hsx.generate.rows import Row

BLOCK_ROWS = 4096
BLOCK_BYTES = 32 << 20  # of token ids (8 bytes each) and texts; 4,096 rows of 1,024 tokens
# Do not wait for a shorter prefix: a block of vllm-ascend's KV cache has 128 tokens.
LEAST_TOKENS = 128
_CHARACTERS_PER_TOKEN = 4

_Prompt = TypeVar("_Prompt", str, "array[int]")


@dataclass(eq=False)
class Turn:
    """A row and the place in the order.

    Attributes:
        row: the row to send.
        number: rows that are not held are sent by ascending number.
        parent: the first row with the longest common prefix, if the prefix is long enough.
        endpoint: endpoint that answered the row; None until the row has ended.
    """

    row: Row
    number: int
    parent: Turn | None = None
    endpoint: Any = None
    children: list[Turn] = field(default_factory=list, repr=False)


class RowOrder:
    """Rows in the order of sending. Not thread-safe.

    Keeps at most three blocks, two that are being sent and one that is being read, and the rows in
    progress. One row is read for each row taken, so only the first request waits for a whole block.

    Args:
        rows: rows of the dataset.
        block_rows, block_bytes: maximum size of a block, in rows and bytes. With blocks of one row
            the order is that of the dataset.
    """

    def __init__(
        self, rows: Iterator[Row], block_rows: int = BLOCK_ROWS, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._rows = rows
        self._block_rows = block_rows
        self._block_bytes = block_bytes
        self._gathered: list[tuple[_Key, Row]] = []
        self._gathered_bytes = 0
        self._has_more = True
        self._ready: list[tuple[int, Turn]] = []  # a heap
        self._held: dict[int, Turn] = {}  # by number, ascending
        self._block_begins = 0  # number of the first row of the last block
        self._end = 0  # number of the next row

    @property
    def is_over(self) -> bool:
        """True if all rows have been taken."""
        return not (self._has_more or self._gathered or self._ready or self._held)

    def take(self) -> Turn | None:
        """Return the next row; None if there is none, or if all are held until another row ends."""
        self._gather(1)
        if not self._ready and self._may_add_block():
            self._gather(self._block_rows)
            self._add_block()
        return heapq.heappop(self._ready)[1] if self._ready else None

    def end(self, turn: Turn, endpoint: Any = None) -> None:
        """Release the rows that wait for a row that has a file or has failed.

        Args:
            turn: the row that has ended. Further calls for the same row have no effect.
            endpoint: endpoint that answered the row.
        """
        turn.endpoint = endpoint
        for each in turn.children:
            del self._held[each.number]
            heapq.heappush(self._ready, (each.number, each))
        turn.children.clear()

    def _may_add_block(self) -> bool:
        """Return True if at most one block has held rows."""
        return not self._held or next(iter(self._held)) >= self._block_begins

    def _gather(self, count: int) -> None:
        """Read up to `count` rows of the next block."""
        while (
            self._has_more
            and count
            and len(self._gathered) < self._block_rows
            and self._gathered_bytes < self._block_bytes
        ):
            row = next(self._rows, None)
            if row is None:
                self._has_more = False
                return
            key = _key(row)
            self._gathered.append((key, row))
            self._gathered_bytes += key.num_bytes
            count -= 1

    def _add_block(self) -> None:
        block = sorted(self._gathered, key=lambda each: each[0].value)
        self._gathered, self._gathered_bytes = [], 0
        self._block_begins = self._end
        for turn in _chain(block, self._end):
            if turn.parent is None:
                heapq.heappush(self._ready, (turn.number, turn))
            else:
                turn.parent.children.append(turn)
                self._held[turn.number] = turn
        self._end += len(block)


@dataclass(frozen=True)
class _Key:
    """Sort key of a row.

    Attributes:
        value: kind of the row, and prompt. A prompt comes before its extensions.
        num_bytes: size of the prompt in memory.
        least: shortest common prefix to wait for, in elements.
    """

    value: tuple[int, Any]
    num_bytes: int
    least: int


def _key(row: Row) -> _Key:
    content = row.content
    if isinstance(content, array):
        return _Key((0, content), sys.getsizeof(content), LEAST_TOKENS)
    kind, text = 1, content
    if isinstance(content, list):
        # Joined, because even the first message that differs may have a long common beginning.
        # Most templates render tools and other fields first.
        kind, text = (
            2,
            "".join(
                json.dumps(each, ensure_ascii=False, sort_keys=True)
                for each in (row.fields, *content)
            ),
        )
    return _Key((kind, text), sys.getsizeof(text), LEAST_TOKENS * _CHARACTERS_PER_TOKEN)


def _chain(block: Sequence[tuple[_Key, Row]], first_number: int) -> Iterator[Turn]:
    """Yield the rows of a sorted block with their parents.

    The previous row has the longest common prefix with a row, possibly together with earlier rows.
    The parent is the first row with this prefix.
    """
    turns: list[Turn] = []
    # Prefixes of the previous row: ascending length, and the first row with the prefix.
    prefixes: list[tuple[int, Turn]] = []
    for number, (key, row) in enumerate(block):
        turn = Turn(row, first_number + number)
        common = _common(block[number - 1][0], key) if number else 0
        first = turns[-1] if turns else turn
        while prefixes and prefixes[-1][0] > common:
            first = prefixes.pop()[1]
        if common >= key.least:
            if not prefixes or prefixes[-1][0] < common:
                prefixes.append((common, first))
            turn.parent = prefixes[-1][1]
        turns.append(turn)
        yield turn


def _common(before: _Key, key: _Key) -> int:
    """Return the length of the common prefix of two prompts."""
    return _common_prefix(before.value[1], key.value[1]) if before.value[0] == key.value[0] else 0


def _common_prefix(one: _Prompt, other: _Prompt) -> int:
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
