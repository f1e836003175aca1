"""The fused attention kernel for latent keys (MLA): query and key come in two parts, one with and one without a rotary embedding."""

from collections.abc import Sequence

import torch

from .attention import PagedKeys, attend, band_of, check_cumulative
from .checks import check, check_dtype, check_rank, unsupported

ROPE_DIM = 64
_ABSORBED, _EXPANDED = 512, 128  # a head of query against the latent itself, or against keys made from it
_HALVES = (torch.float16, torch.bfloat16)
_HEADS = tuple(2**i for i in range(8))
_LAYOUTS = {_ABSORBED: ("TND", "TND_NTD", "BNSD_NBSD"), _EXPANDED: ("TND",)}


def latent_attention(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    q_lengths: Sequence[int] | None,
    kv_lengths: Sequence[int] | None,
    block_table: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    layout: str,
    sparse_mode: int,
    block_size: int,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * (q k^T + q_rope k_rope^T)) v: (output, log-sum-exp [T, heads, 1] float32).

    Two forms, told apart by the size of a head of ``query``. Its mask must have been checked.

    128: keys and values of each head's own, layout TND: query, ``query_rope`` [T, heads, 128 and 64]; key, ``key_rope``, value
    [S, kv_heads, 128, 64 and 128]; both lengths are running totals.

    512: all heads share the cached latent; ``block_table`` int32 [sequences, n]; key and value [blocks, 1, block_size, 512],
    ``key_rope`` [blocks, 1, block_size, 64] (or [blocks, block_size, ...]), one length of keys per sequence. Layouts: TND and
    TND_NTD, whose ``q_lengths`` are running totals and whose output is [T, heads, 512] or [heads, T, 512]; BNSD_NBSD with query
    [B, heads, Q, 512] and output [heads, B, Q, 512].

    float16 and bfloat16, as on hardware; inside it is float32. (CANN's documentation of aclnnFusedInferAttentionScoreV4, section
    "MLA".)
    """
    check(query_rope is not None and key_rope is not None, op, "query_rope, key_rope", "must be given together")
    assert query_rope is not None and key_rope is not None
    width = query.shape[-1]
    check(width in _LAYOUTS, op, "query", f"a head has {width} elements; with query_rope it must have 128 or 512")
    if layout not in _LAYOUTS[width]:
        raise unsupported(op, f"input_layout (with query_rope and heads of {width})", layout)
    for name, tensor in (("query", query), ("key", key), ("value", value), ("query_rope", query_rope), ("key_rope", key_rope)):
        check_dtype(op, name, tensor, _HALVES)
        check(tensor.dtype == query.dtype, op, name, f"dtype {tensor.dtype} must equal query's {query.dtype}")
    for name, rope, whole in (("query_rope", query_rope, query), ("key_rope", key_rope, key)):
        wanted = (*whole.shape[:-1], ROPE_DIM)
        check(tuple(rope.shape) == wanted, op, name, f"shape {tuple(rope.shape)} must be {wanted}")
    check(not with_lse or "_" not in layout, op, "softmax_lse_flag", f"cannot be set with input_layout {layout}")
    whole = torch.cat((query, query_rope), -1)
    if layout == "BNSD_NBSD":
        check_rank(op, "query", query, 4)
        check(q_lengths is None, op, "actual_seq_lengths", f"has no meaning with input_layout {layout}")
        batch, heads_given, each = query.shape[:3]
        rows = whole.transpose(1, 2).flatten(0, 1)  # [T, heads, D]
        spans = [(i * each, (i + 1) * each) for i in range(batch)]
    else:
        check_rank(op, "query", query, 3)
        rows, heads_given = whole, query.shape[1]
        spans = check_cumulative(op, "actual_seq_lengths", q_lengths or (), rows.shape[0])
    check(heads_given == heads, op, "num_heads", f"{heads} does not match query {tuple(query.shape)}")
    lengths = [int(length) for length in kv_lengths or ()]
    check(len(lengths) >= len(spans), op, "actual_seq_lengths_kv", f"{len(lengths)} lengths for {len(spans)} sequences")
    if width == _ABSORBED:
        pairs = _cached(op, key, value, key_rope, block_table, block_size, heads, kv_heads, lengths, spans)
    else:
        pairs = _end_to_end(op, key, value, key_rope, block_table, heads, kv_heads, lengths)
    out = torch.empty(rows.shape[0], heads, value.shape[-1], dtype=query.dtype, device=query.device)
    lse = torch.empty(rows.shape[0], heads, 1, dtype=torch.float32, device=query.device)
    for (first, last), (k, v) in zip(spans, pairs, strict=False):
        if first == last:
            continue
        band = band_of(op, sparse_mode, pre_tokens, next_tokens, last - first, k.shape[0])
        seen, sums = attend(rows[first:last], k, v, scale, band.hidden(last - first, k.shape[0], query.device))
        out[first:last] = seen.to(out.dtype)
        lse[first:last, :, 0] = sums
    if layout == "TND_NTD":
        out = out.transpose(0, 1).contiguous()
    elif layout == "BNSD_NBSD":
        out = out.view(len(spans), -1, heads, out.shape[-1]).permute(2, 0, 1, 3).contiguous()
    return out, lse


def _cached(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_rope: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    heads: int,
    kv_heads: int,
    lengths: Sequence[int],
    spans: Sequence[tuple[int, int]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sequence ([keys, 1, 576], [keys, 1, 512]) from the paged cache of latents."""
    check(heads in _HEADS, op, "num_heads", f"{heads} is not one of {_HEADS}")
    check(kv_heads == 1, op, "num_key_value_heads", f"{kv_heads} must be 1 for heads of {_ABSORBED}")
    check(block_table is not None, op, "block_table", f"must be given for heads of {_ABSORBED}")
    assert block_table is not None
    if key.dim() == 5:
        raise unsupported(op, "key (in the layout NZ)", key)
    check_rank(op, "key", key, 3, 4)
    check(key.shape == value.shape, op, "value", f"shape {tuple(value.shape)} must equal key's {tuple(key.shape)}")
    check(0 < block_size <= 1024 and block_size % 16 == 0, op, "block_size", f"{block_size} must be a multiple of 16 up to 1024")
    head_major = key.dim() == 4
    check(key.shape[-2] == block_size and key.shape[-1] == _ABSORBED and (not head_major or key.shape[1] == 1), op, "key",
          f"shape {tuple(key.shape)} must be [blocks, 1, {block_size}, {_ABSORBED}] or [blocks, {block_size}, {_ABSORBED}]")
    check(block_table.shape[0] >= len(spans), op, "block_table", f"{block_table.shape[0]} rows for {len(spans)} sequences")
    negative = [length for length in lengths if length < 0]
    check(not negative, op, "actual_seq_lengths_kv", f"{negative[:8]} must not be negative")
    latents, ropes, values = (PagedKeys(op, cache, block_table, 1, head_major) for cache in (key, key_rope, value))
    # The table row of a sequence without queries is never read: it may be anything.
    wanted = [length if first < last else 0 for length, (first, last) in zip(lengths, spans, strict=False)]
    return [
        (torch.cat((latents.of(i, length), ropes.of(i, length)), -1), values.of(i, length)) for i, length in enumerate(wanted)
    ]


def _end_to_end(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_rope: torch.Tensor,
    block_table: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    lengths: Sequence[int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sequence ([keys, kv_heads, 192], [keys, kv_heads, 128]) from keys and values laid end to end."""
    if block_table is not None:
        raise unsupported(op, f"block_table (with query_rope and heads of {_EXPANDED})", block_table)
    kv_heads = kv_heads or heads
    check(kv_heads > 0 and heads % kv_heads == 0, op, "num_key_value_heads", f"{kv_heads} must divide num_heads={heads}")
    for name, tensor in (("key", key), ("value", value)):
        wanted = (key.shape[0], kv_heads, _EXPANDED)
        check(tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}")
    keys = torch.cat((key, key_rope), -1)
    spans = check_cumulative(op, "actual_seq_lengths_kv", lengths, keys.shape[0])
    return [(keys[first:last], value[first:last]) for first, last in spans]
