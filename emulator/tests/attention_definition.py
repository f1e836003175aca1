"""Define attention in float64 and build paged caches for the operators under test."""

from __future__ import annotations

import math

import torch

CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
BLOCK = 16
Lengths = list[tuple[int, int]]


def running_totals(lengths: Lengths, index: int) -> list[int]:
    """Return the running totals of the queries (index 0) or keys (index 1)."""
    return torch.tensor([pair[index] for pair in lengths]).cumsum(0).tolist()


def sees(mode: int, query: int, key: int, queries: int, keys: int, window: tuple[int, int]) -> bool:
    """Return True if the query sees the key in sparse mode `mode`; `window` is (before, after)."""
    if mode == 0:
        return True
    if mode == 2:
        return key <= query
    distance = key - (query + keys - queries)  # 0 for the last query and the last key
    return distance <= 0 if mode == 3 else -window[0] <= distance <= window[1]


def seen_by(lengths: Lengths, mode: int) -> list[tuple[int, list[int]]]:
    """Return the sequence and the visible keys of each query."""
    return [
        (sequence, [key for key in range(keys) if sees(mode, query, key, queries, keys, (0, 0))])
        for sequence, (queries, keys) in enumerate(lengths)
        for query in range(queries)
    ]


def attention(
    lengths: Lengths,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
    mode: int = 0,
    window: tuple[int, int] = (0, 0),
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k) v [T, heads, D] and log(sum(exp(scores))) [T, heads].

    The loops handle one query and one head at a time. `lengths` are (queries, keys) per sequence,
    `query` is [T, heads, K]. Each sequence has keys [n, kv_heads, K] and values [n, kv_heads, D].
    A query that sees no key gets zeros and +inf. A sink adds one key per head: `sink` holds the
    scores, and the values are zero.
    """
    heads, kv_heads = query.shape[1], values[0].shape[1]
    out = torch.zeros(len(query), heads, values[0].shape[2], dtype=torch.float64)
    sums = torch.full(out.shape[:2], math.inf, dtype=torch.float64)
    row = 0
    for (queries, count), key, value in zip(lengths, keys, values, strict=True):
        for i in range(queries):
            seen = [j for j in range(count) if sees(mode, i, j, queries, count, window)]
            for head in range(heads if seen else 0):
                source = head // (heads // kv_heads)
                scores = scale * (key[seen, source].double() @ query[row, head].double())
                own = scores if sink is None else torch.cat((scores, sink[head].double().view(1)))
                sums[row, head] = own.exp().sum().log()
                out[row, head] = (scores - sums[row, head]).exp() @ value[seen, source].double()
            row += 1
    return out, sums


def page(*parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copy the rows of each sequence into shuffled blocks.

    Return a cache [blocks, 16, ...] per part and the block table [sequences, n]. Unused rows are
    NaN, so a reference that reads them returns NaN, even with weight 0. Table entries past the
    blocks of a sequence are invalid block numbers.
    """
    lengths = [len(rows) for rows in parts[0]]
    widest = max(-(-n // BLOCK) for n in lengths) or 1
    free = torch.randperm(
        len(lengths) * widest + 3, generator=torch.Generator().manual_seed(3)
    ).tolist()
    caches = [
        torch.full((len(free), BLOCK, *rows[0].shape[1:]), math.nan, dtype=rows[0].dtype)
        for rows in parts
    ]
    table = torch.full((len(lengths), widest), 10_000, dtype=torch.int32)
    for i, n in enumerate(lengths):
        for j, start in enumerate(range(0, n, BLOCK)):
            table[i, j] = block = free.pop()
            for cache, rows in zip(caches, parts, strict=True):
                cache[block, : min(BLOCK, n - start)] = rows[i][start : start + BLOCK]
    return caches, table
