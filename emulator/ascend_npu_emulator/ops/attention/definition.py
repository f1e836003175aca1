"""The definition of attention that all references of attention kernels share.

It covers one sequence, with exact masks and paged keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ascend_npu_emulator.ops.checks import check, check_dtype, check_rank

UNBOUNDED = 2147483647  # the value of pre_tokens and next_tokens without a window


class Band(NamedTuple):
    """The keys that query i may see: ``i + origin - before`` to ``i + origin + after``.

    Attributes:
        origin: the key that aligns with query 0.
        before, after: number of keys on either side; None for no limit.
    """

    origin: int
    before: int | None
    after: int | None

    def hidden(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """Return a bool mask [queries, keys], True for hidden keys; None if no key is hidden."""
        if self.before is None and self.after is None:
            return None
        place = torch.arange(queries, device=device)[:, None] + self.origin
        key = torch.arange(keys, device=device)[None, :]
        mask = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        if self.after is not None:
            mask |= key > place + self.after
        if self.before is not None:
            mask |= key < place - self.before
        return mask


def band_of(
    op: str, sparse_mode: int, pre_tokens: int, next_tokens: int, queries: int, keys: int
) -> Band:
    """Return the band that ``sparse_mode`` selects for one sequence.

    0: all keys. 2: causal, query 0 aligned with key 0. 3: causal, the last query aligned with the
    last key. 4: a window of ``pre_tokens`` before and ``next_tokens`` after, aligned as in 3.
    (torch_npu 2.10.0.post4, npu_fused_infer_attention_score.)
    """
    ends = keys - queries
    if sparse_mode == 0:
        return Band(0, None, None)
    if sparse_mode == 2:
        return Band(0, None, 0)
    if sparse_mode == 3:
        return Band(ends, None, 0)
    if sparse_mode == 4:
        return Band(
            ends,
            None if pre_tokens >= UNBOUNDED else pre_tokens,
            None if next_tokens >= UNBOUNDED else next_tokens,
        )
    raise NotImplementedError(
        f"{op}: sparse_mode={sparse_mode} has no reference in the emulated NPU"
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * q k^T) v for one sequence, in float32.

    Args:
        query: [queries, heads, D].
        key, value: [keys, kv_heads, D] and [keys, kv_heads, V].
        scale: factor of the scores.
        hidden: bool [queries, keys], True for scores to exclude; None to exclude none.
        sink: [heads], an additional score per head that is neither scaled nor hidden and
            contributes a zero value; None for no sink.

    Returns:
        The output [queries, heads, V] and the log-sum-exp of the keys' scores [queries, heads],
            both float32. A query that sees no key gets zeros and +inf, as with the kernel's
            row-invalid correction.
    """
    queries, heads = query.shape[:2]
    keys, kv_heads = key.shape[:2]
    if keys == 0:
        nothing = torch.zeros(
            queries, heads, value.shape[-1], dtype=torch.float32, device=query.device
        )
        return nothing, torch.full((queries, heads), float("inf"), device=query.device)
    group = heads // kv_heads
    grouped = (
        query.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    )  # [kv_heads, group, queries, D]
    scores = grouped @ key.float().permute(1, 2, 0).unsqueeze(1) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    blind = lse == float("-inf")
    # [kv_heads, group, queries], like the scores.
    total = lse if sink is None else torch.logaddexp(lse, sink.float().view(kv_heads, group, 1))
    weights = torch.exp(scores - total.masked_fill(blind, 0.0).unsqueeze(-1))
    out = weights @ value.float().permute(1, 0, 2).unsqueeze(1)
    lse = lse.masked_fill(blind, float("inf"))
    return out.permute(2, 0, 1, 3).reshape(queries, heads, -1), lse.permute(2, 0, 1).reshape(
        queries, heads
    )


class PagedKeys:
    """Keys or values of many sequences in the blocks of one cache, found by a block table.

    Args:
        op: the operator's name, for errors.
        cache: [blocks, block_size, kv_heads * D] or [blocks, block_size, kv_heads, D]; [blocks,
            kv_heads, block_size, D] with ``head_major``; [blocks, kv_heads, D / n, block_size, n]
            in the format of npu_scatter_pa_kv_cache.
        table: int32 [sequences, blocks per sequence].
        kv_heads, head_major: number of heads and layout of the cache.
    """

    def __init__(
        self,
        op: str,
        cache: torch.Tensor,
        table: torch.Tensor,
        kv_heads: int,
        head_major: bool = False,
    ) -> None:
        check_dtype(op, "block_table", table, (torch.int32,))
        check_rank(op, "block_table", table, 2)
        self._op = op
        self._table = table
        self._host_table = table.cpu()
        if cache.dim() == 5:
            self._blocks = cache.permute(0, 3, 1, 2, 4)
        else:
            self._blocks = (
                cache.transpose(1, 2) if head_major else cache.view(*cache.shape[:2], kv_heads, -1)
            )
        self.block_size = self._blocks.shape[1]

    def of(self, sequence: int, length: int) -> torch.Tensor:
        """Return the first ``length`` rows of a sequence, [length, kv_heads, D].

        Blocks past ``length`` are not read.
        """
        count = -(-length // self.block_size)
        check(
            count <= self._table.shape[1],
            self._op,
            "block_table",
            (
                f"sequence {sequence} has {length} keys, more than "
                f"{self._table.shape[1]} blocks of {self.block_size} hold"
            ),
        )
        ids = self._host_table[sequence, :count]
        outside = ids[(ids < 0) | (ids >= self._blocks.shape[0])]
        check(
            outside.numel() == 0,
            self._op,
            "block_table",
            (
                f"sequence {sequence} uses blocks {outside.tolist()[:8]}; the cache has "
                f"{self._blocks.shape[0]}"
            ),
        )
        return (
            self._blocks.index_select(0, self._table[sequence, :count])
            .flatten(0, 1)[:length]
            .flatten(2)
        )


def check_heads(op: str, heads: int, kv_heads: int) -> int:
    """Check that ``kv_heads`` divides ``heads``, and return it; 0 means ``heads``."""
    check(heads > 0, op, "num_heads", f"{heads} must be positive")
    actual = kv_heads or heads
    check(
        actual > 0 and heads % actual == 0,
        op,
        "num_key_value_heads",
        f"{kv_heads} must divide num_heads={heads}",
    )
    check(
        heads // actual <= 64,
        op,
        "num_key_value_heads",
        f"{heads} query heads for {actual} key heads exceed 64 per key head",
    )
    return actual


def check_cumulative(
    op: str, argument: str, lengths: Sequence[int], rows: int
) -> list[tuple[int, int]]:
    """Return the rows [first, end) of each sequence from running totals.

    The totals must not decrease and must end at ``rows``.
    """
    ends = [int(end) for end in lengths]
    check(bool(ends), op, argument, "must be given with input_layout TND")
    starts = [0, *ends[:-1]]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        check(start <= end, op, argument, f"running totals {ends} decrease at index {index}")
    check(
        ends[-1] == rows,
        op,
        argument,
        f"the last running total {ends[-1]} must equal the {rows} rows of the TND tensor",
    )
    return list(zip(starts, ends, strict=True))
