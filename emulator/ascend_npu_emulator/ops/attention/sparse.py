"""References for sparse attention (DSA): the selection of tokens, and latent attention to them.

The definitions are the sources of CANN's kernels in vllm-ascend 0.23.0,
csrc/attention/lightning_indexer and csrc/attention/sparse_flash_attention; 0.30.0rc2 also has the
second. The READMEs of the kernels give the formulas and op_host/*_tiling.cpp the checks. Supported:
queries in TND and keys in PA_BSND, the layouts of vllm-ascend.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys
from ascend_npu_emulator.ops.attention.latent import ROPE_DIM
from ascend_npu_emulator.ops.checks import (
    check,
    check_blocks,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.poison import poisoned

ALL_TOKENS = 9223372036854775807  # the only value of pre_tokens and next_tokens
_HALVES = (torch.float16, torch.bfloat16)
_LATENT_DIM = 512
_INDEX_DIM = 128
_INDEX_HEADS_AT_MOST = 64
_COUNT_AT_MOST, _COUNT_STEP = (
    2048,
    1024,
)  # a larger sparse_count must be a multiple of the step (tiling.cpp:183)
_LARGEST_COUNT = 8192


class SparseSequence(NamedTuple):
    """One sequence of a batch.

    Attributes:
        number: number of the sequence.
        first, end: rows in the query.
        keys: number of keys in the cache.
        visible: int64 [rows], number of leading keys that each query sees, 0 or more.
    """

    number: int
    first: int
    end: int
    keys: int
    visible: torch.Tensor


class SparseBatch(NamedTuple):
    """The arguments that describe the sequences of both operators."""

    op: str
    q_lengths: torch.Tensor | None
    k_lengths: torch.Tensor | None
    k_lengths_name: str
    block_table: torch.Tensor | None
    sparse_mode: int

    def check_options(
        self, query_layout: str, key_layout: str, pre_tokens: int, next_tokens: int
    ) -> None:
        """Check the arguments that both operators share."""
        op = self.op
        key_option = self.k_lengths_name.replace("actual_seq_lengths", "layout")
        check(
            query_layout in ("BSND", "TND"),
            op,
            "layout_query",
            f"{query_layout!r} is not one of BSND, TND",
        )
        check(
            key_layout in ("PA_BSND", query_layout),
            op,
            key_option,
            f"{key_layout!r} is neither PA_BSND nor layout_query",
        )
        if query_layout != "TND":
            raise unsupported(op, "layout_query", query_layout)
        if key_layout != "PA_BSND":
            raise unsupported(op, key_option, key_layout)
        check(
            self.sparse_mode in (0, 3), op, "sparse_mode", f"{self.sparse_mode} is not one of 0, 3"
        )
        for name, tokens in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
            check(tokens == ALL_TOKENS, op, name, f"{tokens} must be {ALL_TOKENS}")
        for name, lengths in (
            ("actual_seq_lengths_query", self.q_lengths),
            (self.k_lengths_name, self.k_lengths),
        ):
            check(lengths is not None, op, name, "must be given")
            assert lengths is not None
            check_dtype(op, name, lengths, (torch.int32,))
            check(lengths.numel() > 0, op, name, "must not be empty")
        check(self.block_table is not None, op, "block_table", "must be given")
        assert (
            self.block_table is not None
            and self.q_lengths is not None
            and self.k_lengths is not None
        )
        check_dtype(op, "block_table", self.block_table, (torch.int32,))
        check_rank(op, "block_table", self.block_table, 2)
        check(
            self.block_table.shape[1] > 0,
            op,
            "block_table",
            f"shape {tuple(self.block_table.shape)} must not be empty",
        )
        count = self.q_lengths.numel()
        for name, actual in (
            (self.k_lengths_name, self.k_lengths.numel()),
            ("block_table", self.block_table.shape[0]),
        ):
            check(
                actual == count,
                op,
                name,
                f"{actual} sequences must be {count}, as in actual_seq_lengths_query",
            )

    def sequences(self, rows: int) -> Iterator[SparseSequence]:
        """Yield the sequences. The queries may end before the last of ``rows``."""
        assert self.q_lengths is not None and self.k_lengths is not None
        ends, counts, first = self.q_lengths.tolist(), self.k_lengths.tolist(), 0
        check(
            ends[-1] <= rows,
            self.op,
            "actual_seq_lengths_query",
            f"the last running total {ends[-1]} exceeds the {rows} rows of query",
        )
        for index, (end, keys) in enumerate(zip(ends, counts, strict=True)):
            check(
                end >= first,
                self.op,
                "actual_seq_lengths_query",
                f"running totals {ends} decrease at index {index}",
            )
            check(
                keys >= 0,
                self.op,
                self.k_lengths_name,
                f"{keys} of sequence {index} must not be negative",
            )
            visible = torch.full((end - first,), keys)
            if self.sparse_mode == 3:  # the last query sees the last key
                visible = torch.arange(keys - (end - first) + 1, keys + 1)
            yield SparseSequence(
                index, first, end, keys, visible.clamp(min=0).to(self.q_lengths.device)
            )
            first = end


def check_block_size(op: str, cache: torch.Tensor) -> None:
    size = cache.shape[1]
    check(
        0 < size <= 1024 and size % 16 == 0,
        op,
        "key",
        f"block size {size} must be a multiple of 16 up to 1024",
    )


def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``sparse_count`` keys with the highest scores for each query.

    The score is the sum over heads of weight * relu(q k), in float32. Keys are in descending order
    of scores, equal scores in order of keys, and then -1 up to ``sparse_count``. CANN does not
    document the order of equal scores.

    Args:
        query: [T, heads, 128], with at most 64 heads.
        key: [blocks, block_size, 1, 128].
        weights: [T, heads], float32 or query's dtype.
        actual_seq_lengths_query: int32 [sequences], running totals.
        actual_seq_lengths_key: int32 [sequences].
        block_table: int32 [sequences, n].
        sparse_count: 1 to 2048, or a multiple of 1024 up to 8192.
        sparse_mode: 0 for all keys, 3 for a causal mask where the last query sees the last key.

    Returns:
        int32 [T, 1, sparse_count], and an empty tensor. Rows after the last sequence are undefined.
    """
    op = "npu_lightning_indexer"
    batch = SparseBatch(
        op,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        "actual_seq_lengths_key",
        block_table,
        sparse_mode,
    )
    batch.check_options(layout_query, layout_key, pre_tokens, next_tokens)
    refuse_options(op, return_value=return_value)
    beyond = sparse_count % _COUNT_STEP == 0 and sparse_count <= _LARGEST_COUNT
    check(
        sparse_count > 0 and (sparse_count <= _COUNT_AT_MOST or beyond),
        op,
        "sparse_count",
        (
            f"{sparse_count} must be 1 to {_COUNT_AT_MOST}, or a multiple of {_COUNT_STEP} up to "
            f"{_LARGEST_COUNT}"
        ),
    )
    _check_indexer(op, query, key, weights)
    assert block_table is not None
    pages = PagedKeys(op, key, block_table, 1)
    chosen = torch.full(
        (query.shape[0], 1, sparse_count),
        torch.iinfo(torch.int32).max,
        dtype=torch.int32,
        device=query.device,
    )
    for sequence in batch.sequences(query.shape[0]):
        rows, keys = (
            slice(sequence.first, sequence.end),
            pages.of(sequence.number, sequence.keys)[:, 0].float(),
        )
        scores = (
            torch.relu(query[rows].float() @ keys.t()) * weights[rows].float().unsqueeze(-1)
        ).sum(1)
        chosen[rows, 0] = best_keys(scores, sequence, sparse_count)
    return chosen, query.new_empty(0)


def best_keys(scores: torch.Tensor, sequence: SparseSequence, count: int) -> torch.Tensor:
    """Return int32 [queries, count]: keys with the highest ``scores`` [queries, keys], then -1."""
    place = torch.arange(sequence.keys, device=scores.device)
    visible = sequence.visible.unsqueeze(-1)
    order = (
        scores.masked_fill(place >= visible, float("-inf"))
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, :count]
    )
    best = torch.full((scores.shape[0], count), -1, dtype=torch.int32, device=scores.device)
    best[:, : order.shape[1]] = order.masked_fill(place[: order.shape[1]] >= visible, -1).int()
    return best


def _check_indexer(op: str, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> None:
    check_rank(op, "query", query, 3)
    check_rank(op, "key", key, 4)
    for name, tensor in (("query", query), ("key", key), ("weights", weights)):
        check(tensor.numel() > 0, op, name, f"shape {tuple(tensor.shape)} must not be empty")
    check_dtype(op, "query", query, _HALVES)
    check(
        key.dtype == query.dtype, op, "key", f"dtype {key.dtype} must equal query's {query.dtype}"
    )
    check_dtype(op, "weights", weights, (query.dtype, torch.float32))
    rows, heads, width = query.shape
    check(width == _INDEX_DIM, op, "query", f"head size {width} must be {_INDEX_DIM}")
    check(
        heads <= _INDEX_HEADS_AT_MOST,
        op,
        "query",
        f"{heads} heads exceed {_INDEX_HEADS_AT_MOST}",
    )
    check(
        tuple(weights.shape) == (rows, heads),
        op,
        "weights",
        f"shape {tuple(weights.shape)} must be ({rows}, {heads})",
    )
    check(
        tuple(key.shape[2:]) == (1, width),
        op,
        "key",
        f"shape {tuple(key.shape)} must end in (1, {width})",
    )
    check_block_size(op, key)
    check_blocks(op, "key", key)


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * (q k^T + q_rope k_rope^T)) v over the selected keys of each query.

    A query that sees n keys reads the first n entries of the query's row in ``sparse_indices``, up
    to the first negative entry. An entry of n or more is ignored, and an entry that occurs twice
    counts twice. A query without keys gives zeros. (arch22/sparse_flash_attention_kernel_mla.h:337
    and 684, arch22/sparse_flash_attention_service_vector_mla.h:822 and 834.)

    Args:
        query, query_rope: [T, heads, 512 and 64], with 1 to 64 or 128 heads.
        key, value: [blocks, block_size, 1, 512], the same latents.
        key_rope: [blocks, block_size, 1, 64].
        sparse_indices: int32 [T, 1, n].
        block_table: int32 [sequences, n].
        actual_seq_lengths_query: int32 [sequences], running totals.
        actual_seq_lengths_kv: int32 [sequences].
        sparse_mode: as in ``npu_lightning_indexer``.

    Returns:
        [T, heads, 512], and two empty tensors. Rows after the last sequence are undefined.
    """
    op = "npu_sparse_flash_attention"
    batch = SparseBatch(
        op,
        actual_seq_lengths_query,
        actual_seq_lengths_kv,
        "actual_seq_lengths_kv",
        block_table,
        sparse_mode,
    )
    batch.check_options(layout_query, layout_kv, pre_tokens, next_tokens)
    refuse_options(op, return_softmax_lse=return_softmax_lse)
    check(attention_mode == 2, op, "attention_mode", f"{attention_mode} must be 2")
    power = sparse_block_size > 0 and sparse_block_size & (sparse_block_size - 1) == 0
    check(
        power and sparse_block_size <= 128,
        op,
        "sparse_block_size",
        f"{sparse_block_size} must be a power of 2 up to 128",
    )
    if sparse_block_size != 1:
        raise unsupported(op, "sparse_block_size", sparse_block_size)
    check(
        (query_rope is None) == (key_rope is None),
        op,
        "query_rope, key_rope",
        "must be given together",
    )
    if query_rope is None or key_rope is None:
        raise unsupported(op, "query_rope", query_rope)
    _check_attention(op, query, key, value, query_rope, key_rope)
    check_dtype(op, "sparse_indices", sparse_indices, (torch.int32,))
    check_rank(op, "sparse_indices", sparse_indices, 3)
    check(
        tuple(sparse_indices.shape[:2]) == (query.shape[0], 1) and sparse_indices.shape[2] > 0,
        op,
        "sparse_indices",
        f"shape {tuple(sparse_indices.shape)} must be [{query.shape[0]}, 1, n]",
    )
    assert block_table is not None
    latents, ropes, values = (
        PagedKeys(op, cache, block_table, 1) for cache in (key, key_rope, value)
    )
    out = poisoned(tuple(query.shape), query)
    whole = torch.cat((query, query_rope), -1)
    for sequence in batch.sequences(query.shape[0]):
        rows, number, count = slice(sequence.first, sequence.end), sequence.number, sequence.keys
        keys = torch.cat((latents.of(number, count), ropes.of(number, count)), -1)[:, 0].float()
        times = times_chosen(sparse_indices[rows, 0], sequence)
        out[rows] = attend_chosen(
            whole[rows], keys, values.of(number, count)[:, 0].float(), scale_value, times
        ).to(out.dtype)
    return out, query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.float32)


def _check_attention(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
) -> None:
    check_rank(op, "query", query, 3)
    check_rank(op, "key", key, 4)
    check_dtype(op, "query", query, _HALVES)
    rows, heads = query.shape[:2]
    check(rows > 0, op, "query", f"shape {tuple(query.shape)} must not be empty")
    check(1 <= heads <= 64 or heads == 128, op, "query", f"{heads} heads must be 1 to 64, or 128")
    blocks = tuple(key.shape[:2])
    shapes = {
        "query": (query, (rows, heads, _LATENT_DIM)),
        "query_rope": (query_rope, (rows, heads, ROPE_DIM)),
        "key": (key, (*blocks, 1, _LATENT_DIM)),
        "value": (value, (*blocks, 1, _LATENT_DIM)),
        "key_rope": (key_rope, (*blocks, 1, ROPE_DIM)),
    }
    for name, (tensor, wanted) in shapes.items():
        check(
            tensor.dtype == query.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal query's {query.dtype}",
        )
        check(
            tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}"
        )
    check(blocks[0] > 0, op, "key", "must have blocks")
    check_block_size(op, key)
    for name, cache in (("key", key), ("value", value), ("key_rope", key_rope)):
        check_blocks(op, name, cache)


def times_chosen(indices: torch.Tensor, sequence: SparseSequence) -> torch.Tensor:
    """Return how often each row of ``indices`` [queries, n] has each key: [queries, keys]."""
    visible = sequence.visible.unsqueeze(-1)
    place = torch.arange(indices.shape[1], device=indices.device)
    read = (indices >= 0).cumprod(-1).bool() & (place < visible) & (indices < visible)
    times = torch.zeros(indices.shape[0], sequence.keys, device=indices.device)
    return (
        times.scatter_add_(1, indices.long().where(read, 0), read.float())
        if sequence.keys
        else times
    )


def attend_chosen(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, times: torch.Tensor
) -> torch.Tensor:
    """Return the output [queries, heads, V].

    Args:
        query: [queries, heads, D].
        keys, values: [keys, D and V].
        scale: factor of the scores.
        times: [queries, keys], multiplicity of each key.
    """
    if not keys.shape[0]:
        return query.new_zeros(*query.shape[:2], values.shape[1], dtype=torch.float32)
    scores = query.float() @ keys.t() * scale + times.log().unsqueeze(1)
    weights = torch.softmax(scores, -1)
    return weights.masked_fill((times.sum(-1) == 0)[:, None, None], 0.0) @ values
