"""References for the ATB library's decode attention over the paged cache."""

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys, attend, check_heads
from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype, check_rank


def _npu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attend one query per sequence to its paged keys, into ``out``.

    Args:
        query, out: [sequences, num_heads, D].
        key_cache, value_cache: [blocks, block_size, num_kv_heads, D].
        block_table: int32 [>= sequences, n].
        context_lens: int32 [>= sequences], on the host, as the library requires.
        workspace: scratch memory, not needed here.
    """
    op = "_npu_paged_attention"
    check_rank(op, "query", query, 3)
    check_dtype(op, "query", query, FLOATS)
    check_dtype(op, "context_lens", context_lens, (torch.int32,))
    check(
        context_lens.device.type == "cpu",
        op,
        "context_lens",
        f"must be on the host, not on {context_lens.device}",
    )
    kv_heads = check_heads(op, num_heads, num_kv_heads)
    check(
        query.shape[1] == num_heads,
        op,
        "num_heads",
        f"{num_heads} does not match query {tuple(query.shape)}",
    )
    check(
        out.shape == query.shape and out.dtype == query.dtype,
        op,
        "out",
        f"must have query's shape {tuple(query.shape)} and dtype {query.dtype}",
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_rank(op, name, cache, 4)
        check(
            cache.dtype == query.dtype,
            op,
            name,
            f"dtype {cache.dtype} must equal query's {query.dtype}",
        )
        check(
            cache.shape[2] == kv_heads,
            op,
            name,
            f"shape {tuple(cache.shape)} must hold {kv_heads} heads",
        )
    for name, count in (
        ("block_table", block_table.shape[0]),
        ("context_lens", context_lens.shape[0]),
    ):
        check(count >= query.shape[0], op, name, f"{count} rows for {query.shape[0]} sequences")
    keys, values = (
        PagedKeys(op, cache, block_table, kv_heads) for cache in (key_cache, value_cache)
    )
    for sequence, length in enumerate(context_lens[: query.shape[0]].tolist()):
        check(
            length >= 0, op, "context_lens", f"{length} of sequence {sequence} must not be negative"
        )
        rows, _ = attend(
            query[sequence : sequence + 1],
            keys.of(sequence, length),
            values.of(sequence, length),
            scale_value,
            None,
        )
        out[sequence] = rows[0].to(out.dtype)


def _npu_paged_attention_get_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return the scratch memory for ``_npu_paged_attention``: here an empty uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=query.device)
