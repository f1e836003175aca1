"""Each row is sent once, after its prefix, and few rows are kept in memory."""

from __future__ import annotations

import random
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from generate_bench import Bench
from generate_files import in_common
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate import options, order
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.order import RowOrder, Turn
from vllm_ascend_hsx.generate.rows import Row

LETTERS = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)
KINDS = ("tokens", "text", "chat")


def row_of(index: int, kind: str, letters: Sequence[str]) -> Row:
    if kind == "tokens":
        return Row(index, array("q", map(ord, letters)))
    return Row(
        index,
        "".join(letters)
        if kind == "text"
        else [{"role": "user", "content": each} for each in letters],
    )


def shared_by(one: Row, other: Row) -> int:
    (kind, mine), (other_kind, its) = order._key(one).value, order._key(other).value
    return in_common(mine, its) if kind == other_kind else 0


def blocks_of(rows: Sequence[Row], most_rows: int, most_bytes: int) -> list[list[Row]]:
    blocks: list[list[Row]] = [[]]
    for row in rows:
        size = sum(order._key(each).num_bytes for each in blocks[-1])
        if len(blocks[-1]) == most_rows or size >= most_bytes:
            blocks.append([])
        blocks[-1].append(row)
    return blocks


@given(
    prompts=st.lists(st.tuples(st.sampled_from(KINDS), LETTERS), max_size=40),
    block_rows=st.integers(1, 12),
    block_bytes=st.integers(1, 3000),
    chance=st.randoms(use_true_random=False),
)
def test_row_is_sent_once_after_the_row_with_the_longest_common_prefix(
    prompts: list[tuple[str, list[str]]], block_rows: int, block_bytes: int, chance: random.Random
) -> None:
    rows = [row_of(index, *prompt) for index, prompt in enumerate(prompts)]
    read: list[Row] = []

    def reading() -> Iterator[Row]:
        for row in rows:
            read.append(row)
            yield row

    under_way: list[Turn] = []
    taken: list[int] = []
    ended: set[int] = set()
    block_of = {
        row.index: block for block in blocks_of(rows, block_rows, block_bytes) for row in block
    }
    largest = max((order._key(row).num_bytes for row in rows), default=0)
    with patch.multiple(order, LEAST_TOKENS=1, _CHARACTERS_PER_TOKEN=1):
        made = RowOrder(reading(), block_rows, block_bytes)
        while under_way or not made.is_over:
            if under_way and chance.random() < 0.5:
                turn = under_way.pop(chance.randrange(len(under_way)))
                made.end(turn)
                ended.add(turn.row.index)
                continue
            next_turn = made.take()
            in_memory = [
                row
                for row in read
                if row.index not in taken and (next_turn is None or row is not next_turn.row)
            ]
            assert len(in_memory) <= 3 * block_rows
            assert sum(order._key(row).num_bytes for row in in_memory) <= 3 * (
                block_bytes + largest
            )
            if next_turn is None:
                assert made.is_over or under_way, "nothing is under way, and nothing may be sent"
                if under_way:
                    made.end(turn := under_way.pop(0))
                    ended.add(turn.row.index)
                continue
            row = next_turn.row
            others = [each for each in block_of[row.index] if each.index != row.index]
            shared = {each.index: shared_by(each, row) for each in others}
            for each in others:
                is_prefix = (
                    shared[each.index]
                    == len(order._key(each).value[1])
                    < len(order._key(row).value[1])
                )
                assert not is_prefix or each.index in taken, "sent before what it begins with"
            before = [
                each
                for each in others
                if (order._key(each).value, each.index) < (order._key(row).value, row.index)
            ]
            longest = max((shared[each.index] for each in before), default=0)
            if longest:
                assert any(
                    shared[each.index] >= longest for each in others if each.index in ended
                ), "sent too early"
            taken.append(row.index)
            under_way.append(next_turn)
        assert made.take() is None
    assert sorted(taken) == list(range(len(rows)))


def conversation(
    name: int, turns: int = 4, system: Sequence[int] = range(1000, 1200)
) -> list[list[int]]:
    """Return prompts that extend each other by 128 tokens, after 200 common tokens."""
    said = [name * 7919 + at for at in range(128 * turns)]
    return [[*system, *said[: 128 * turn]] for turn in range(1, turns + 1)]


def token_rows(prompts: Sequence[Sequence[int]]) -> Iterator[Row]:
    return (Row(index, array("q", prompt)) for index, prompt in enumerate(prompts))


def test_conversations_are_completed_before_others_begin() -> None:
    """With 3 requests in flight, at most 3 of 20 conversations are unfinished."""
    prompts = [turn for name in range(20) for turn in conversation(name)]
    random.Random(1).shuffle(prompts)
    made = RowOrder(token_rows(prompts))
    first = made.take()
    assert first is not None and made.take() is None, "the others begin with 200 of its tokens"
    made.end(first)
    under_way: list[Turn] = []
    seen: Counter[int] = Counter({first.row.content[200]: 1})  # type: ignore[dict-item]
    while not made.is_over or under_way:
        while len(under_way) < 3 and (turn := made.take()) is not None:
            name = turn.row.content[200]
            assert len(turn.row.content) == 200 + 128 * (seen[name] + 1), (
                "turns come one after the other"
            )  # type: ignore[index]
            seen[name] += 1  # type: ignore[index]
            under_way.append(turn)
        assert len(under_way) == 3 or sum(seen.values()) > 70, "first turns wait for one row alone"
        assert sum(0 < count < 4 for count in seen.values()) <= 3
        made.end(under_way.pop(0))
    assert set(seen.values()) == {4} and len(seen) == 20


def test_rows_do_not_wait_for_a_prefix_shorter_than_a_cache_block() -> None:
    for shared, waits in ((order.LEAST_TOKENS - 1, False), (order.LEAST_TOKENS, True)):
        made = RowOrder(token_rows([[*range(shared), 7000], [*range(shared), 8000]]))
        made.take()
        assert (made.take() is None) == waits


def test_third_block_waits_while_two_blocks_have_held_rows() -> None:
    read: list[int] = []

    def rows() -> Iterator[Row]:
        for row in token_rows([conversation(name, turns=1)[0] for name in range(60)]):
            read.append(row.index)
            yield row

    made = RowOrder(rows(), block_rows=5)
    assert [made.take() is not None for _ in range(8)] == [True, True, *[False] * 6], (
        "each the first of its block"
    )
    assert len(read) <= 15


def test_given_order_does_not_read_ahead() -> None:
    read: list[int] = []

    def rows() -> Iterator[Row]:
        for row in token_rows(conversation(1)[::-1]):
            read.append(row.index)
            yield row

    made = RowOrder(rows(), block_rows=1)
    for index in range(4):
        turn = made.take()
        assert turn is not None and turn.row.index == index and read == list(range(index + 1))


@given(st.integers(0, 200), st.integers(1, 9))
def test_each_row_belongs_to_one_rank_and_neighbours_mostly_to_the_same(
    rows: int, world_size: int
) -> None:
    ranks = [Options(*PATHS, world_size=world_size, rank=rank) for rank in range(world_size)]
    owners = [[rank for rank, each in enumerate(ranks) if each.is_ours(row)] for row in range(rows)]
    assert all(len(each) == 1 for each in owners)
    assert [each.count_ours(rows) for each in ranks] == [
        owners.count([rank]) for rank in range(world_size)
    ]
    assert (
        sum(a != b for a, b in zip(owners, owners[1:], strict=False)) <= rows // options.RANK_ROWS
    )


PATHS: Any = ("", "")


# As a command


def records() -> list[dict[str, Any]]:
    prompts = [turn for name in range(12) for turn in conversation(name)]
    random.Random(2).shuffle(prompts)
    return [{"token_ids": prompt} for prompt in prompts]


@pytest.mark.parametrize("concurrency", [1, 4, 7])
def test_common_tokens_are_computed_once_and_the_summary_counts_reuse(
    bench: Bench, concurrency: int
) -> None:
    bench.server.reuses = True
    code, printed = bench.run("--concurrency", concurrency, records=records())
    assert code == 0, printed
    tokens = sum(len(each["token_ids"]) for each in records())
    computed = 200 + 12 * 4 * 128
    assert re.search(
        rf"reused │ {tokens - computed:,} of {tokens:,} prompt tokens \({1 - computed / tokens:.0%}\) │",
        printed,
    ), printed
    assert sum(line.get("reused", 0) for line in bench.lines().values()) == tokens - computed
    assert bench.server.asked == Counter(range(48)) and bench.rows == list(range(48))


def test_given_order_reuses_fewer_tokens(bench: Bench) -> None:
    bench.server.reuses = True
    code, printed = bench.run("--order", "given", "--concurrency", 1, records=records())
    assert code == 0 and [seen.row for seen in bench.server.seen] == list(range(48))
    tokens, computed = (sum(len(each["token_ids"]) for each in records()), 200 + 12 * 4 * 128)
    reused = sum(line.get("reused", 0) for line in bench.lines().values())
    assert 0 < reused < tokens - computed and f"{reused:,} of {tokens:,} prompt tokens" in printed


def test_rows_do_not_wait_for_retries_of_their_prefix(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: 1.0)
    bench.server.behave = lambda seen: 502 if (seen.row, seen.time) == (1, 1) else "ok"
    turns = conversation(1, turns=3)
    prompts = [
        turns[0][:200],
        *turns,
    ]  # all extend the first row, which proves the server, so it does not pause
    code, printed = bench.run(
        "--retry-delay", 3, records=[{"token_ids": prompt} for prompt in prompts]
    )
    assert code == 0, printed
    assert [seen.row for seen in bench.server.seen] == [0, 1, 2, 3, 1], (
        "the rows that begin with row 1 come before its retry"
    )


def test_chats_are_sent_turn_by_turn(bench: Bench) -> None:
    system = {"role": "system", "content": "Be brief. " * 60}
    chats = [
        [system, *({"role": "user", "content": f"{name}{at}" * 300} for at in range(turns))]
        for name in "ab"
        for turns in (1, 2, 3)
    ]
    code, printed = bench.run(
        "--concurrency", 1, records=[{"messages": chat} for chat in chats[::-1]]
    )
    assert code == 0, printed
    assert [seen.row for seen in bench.server.seen] == [5, 4, 3, 2, 1, 0]


def test_resumed_run_sends_missing_rows_in_order(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row % 3 == 0 else "ok"
    assert bench.run("--concurrency", 4, records=records())[0] == 1
    bench.server.behave = lambda seen: "ok"
    code, printed = bench.run("--concurrency", 4, records=records())
    assert code == 0, printed
    assert bench.server.asked == Counter({row: 1 + (row % 3 == 0) for row in range(48)})
    assert "finished before │ 32 │" in printed and "generated │ 16 │" in printed


@pytest.mark.parametrize("odd", ["many", -1, 10**9, 1.5, None, [3]])
def test_invalid_number_of_reused_tokens_is_ignored(bench: Bench, odd: Any) -> None:
    bench.server.reuses = odd
    code, printed = bench.run()
    assert code == 0 and "reused │ 0 of 27 prompt tokens (0%) │" in printed, printed
