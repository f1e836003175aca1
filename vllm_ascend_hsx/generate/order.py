"""The order in which rows are sent: each after the row that has most of its prefix.

A server copies the rows of a prefix that it has published, and computes the rest. So a turn of a
conversation is worth sending when the turn before it has its file, and not before. Rows are sorted
in blocks, which puts a prefix before its extensions and rows with a common prefix side by side. A
row is held until the first row with the longest prefix in common has ended; rows of other prefixes
are sent meanwhile. Of all rows that may be sent the first one is, which completes conversations
before it begins others: with `concurrency` C at most C of them are unfinished, and their prefixes
are what the server's KV cache must keep. 32 conversations of 4,000 tokens are 128,000 tokens.

A held row costs no time where computing is the limit: a server that computes one prompt of 2,000
tokens is busy, and 31 others with the same beginning would have it compute 62,000 more. At the end
of a dataset, and in few long conversations, less than C is under way.
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
# A shorter prefix is not worth waiting for: vllm-ascend's blocks of the KV cache have 128 tokens.
LEAST_TOKENS = 128
_CHARACTERS_PER_TOKEN = 4

_Prompt = TypeVar("_Prompt", str, "array[int]")


@dataclass(eq=False)
class Turn:
    """A row with its place in the order.

    Attributes:
        row: to be sent.
        number: rows are sent by ascending number, apart from those that are held.
        parent: the first row with the longest prefix in common, if it is long enough.
        endpoint: where the row was answered; None until it has ended.
    """

    row: Row
    number: int
    parent: Turn | None = None
    endpoint: Any = None
    children: list[Turn] = field(default_factory=list, repr=False)


class RowOrder:
    """Rows in the order in which they are to be sent. Not thread-safe.

    Holds at most three blocks, two that are being sent and one that is being read, and the rows
    under way. One row is read for each that is taken, so that no request waits for a whole block
    but the first.

    Args:
        rows: of the dataset.
        block_rows, block_bytes: rows that are sorted together: until there are as many, or as many
            bytes. With one row the order is that of the dataset.
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
        """Return the next row; None if there is none, or not before a row under way has ended."""
        self._gather(1)
        if not self._ready and self._may_add_block():
            self._gather(self._block_rows)
            self._add_block()
        return heapq.heappop(self._ready)[1] if self._ready else None

    def end(self, turn: Turn, endpoint: Any = None) -> None:
        """Record that a row has its file, or has failed: rows that wait for it may be sent.

        Args:
            turn: as taken. Once is enough.
            endpoint: where it was answered.
        """
        turn.endpoint = endpoint
        for each in turn.children:
            del self._held[each.number]
            heapq.heappush(self._ready, (each.number, each))
        turn.children.clear()

    def _may_add_block(self) -> bool:
        """Return whether at most one block has rows that are held."""
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
    """What rows are sorted by.

    Attributes:
        value: the kind of the row, and its prompt. A prompt comes before its extensions.
        num_bytes: of the prompt, in memory.
        least: elements in common that are worth waiting for.
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
        # The first message in which two chats differ may have a long beginning in common.
        # Tools and other fields come first in most templates.
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

    Of the rows before a row, the one just before it has the longest prefix in common with it, and
    perhaps not alone. The first that has this prefix is the parent.
    """
    turns: list[Turn] = []
    prefixes: list[tuple[int, Turn]] = []  # of the row before: length, ascending, and first row
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
    """Return the number of elements that two prompts have in common at their beginning."""
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
