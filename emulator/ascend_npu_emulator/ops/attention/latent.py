"""The fused attention kernel for latent keys (MLA).

Query and key have two parts: with and without a rotary embedding.
"""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys
from ascend_npu_emulator.ops.attention.fused_call import FusedCall
from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)

ROPE_DIM = 64
_ABSORBED, _EXPANDED = (
    512,
    128,
)  # head size against the latent, or against keys made from the latent
_HALVES = (torch.float16, torch.bfloat16)
_HEADS = tuple(2**i for i in range(8))
_LAYOUTS = {_ABSORBED: ("TND", "TND_NTD", "BNSD_NBSD"), _EXPANDED: ("TND",)}

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def latent_attention(call: FusedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * (q k^T + q_rope k_rope^T)) v. The caller checks the mask.

    The head size of ``query`` selects one of two forms.

    128: the layout is TND, with separate keys and values for each head. query and ``query_rope``
    are [T, heads, 128 and 64]; key, ``key_rope`` and value are [S, kv_heads, 128, 64 and 128]; both
    lengths are running totals.

    512: all heads share the cached latent. ``block_table`` is int32 [sequences, n]; key and value
    are [blocks, 1, block_size, 512], ``key_rope`` [blocks, 1, block_size, 64] (or [blocks,
    block_size, ...]), with one length of keys per sequence. In the layouts TND and TND_NTD
    ``q_lengths`` are running totals, and the output is [T, heads, 512] or [heads, T, 512]. In
    BNSD_NBSD the query is [B, heads, Q, 512] and the output [heads, B, Q, 512].

    float16 and bfloat16 are accepted, as on hardware, and computed in float32. (CANN's
    documentation of aclnnFusedInferAttentionScoreV4, section "MLA".)

    Returns:
        The output and the log-sum-exp [T, heads, 1] float32.
    """
    op, layout, query, key, value = call.op, call.layout, call.query, call.key, call.value
    query_rope, key_rope = call.query_rope, call.key_rope
    refuse_options(op, learnable_sink=call.sink)
    check(
        query_rope is not None and key_rope is not None,
        op,
        "query_rope, key_rope",
        "must be given together",
    )
    assert query_rope is not None and key_rope is not None
    width = query.shape[-1]
    check(
        width in _LAYOUTS,
        op,
        "query",
        f"head size {width} must be 128 or 512 with query_rope",
    )
    if layout not in _LAYOUTS[width]:
        raise unsupported(op, f"input_layout (with query_rope and heads of {width})", layout)
    for name, tensor in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("query_rope", query_rope),
        ("key_rope", key_rope),
    ):
        check_dtype(op, name, tensor, _HALVES)
        check(
            tensor.dtype == query.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal query's {query.dtype}",
        )
    for name, rope, whole in (("query_rope", query_rope, query), ("key_rope", key_rope, key)):
        wanted = (*whole.shape[:-1], ROPE_DIM)
        check(tuple(rope.shape) == wanted, op, name, f"shape {tuple(rope.shape)} must be {wanted}")
    check(
        not call.with_lse or "_" not in layout,
        op,
        "softmax_lse_flag",
        f"cannot be set with input_layout {layout}",
    )
    rows = torch.cat((query, query_rope), -1)
    if layout == "BNSD_NBSD":
        check_rank(op, "query", query, 4)
        check(
            call.q_lengths is None,
            op,
            "actual_seq_lengths",
            f"must not be given with input_layout {layout}",
        )
        batch, _, each = query.shape[:3]
        rows = rows.transpose(1, 2).flatten(0, 1)  # [T, heads, D]
        spans = [(i * each, (i + 1) * each) for i in range(batch)]
    else:
        check_rank(op, "query", query, 3)
        spans = call.query_spans(rows.shape[0])
    check(
        rows.shape[1] == call.heads,
        op,
        "num_heads",
        f"{call.heads} does not match query {tuple(query.shape)}",
    )
    pairs = (
        _cached(call, key_rope, spans)
        if width == _ABSORBED
        else _end_to_end(call, key_rope, len(spans))
    )
    out, lse = call.attend(rows, spans, pairs, value.shape[-1])
    if layout == "TND_NTD":
        out = out.transpose(0, 1).contiguous()
    elif layout == "BNSD_NBSD":
        out = out.view(len(spans), -1, *out.shape[1:]).permute(2, 0, 1, 3).contiguous()
    return out, lse


def _cached(call: FusedCall, key_rope: torch.Tensor, spans: Sequence[tuple[int, int]]) -> Pairs:
    """Return ([keys, 1, 576], [keys, 1, 512]) of each sequence from the paged cache of latents."""
    op, key, value, table, size = call.op, call.key, call.value, call.block_table, call.block_size
    check(call.heads in _HEADS, op, "num_heads", f"{call.heads} is not one of {_HEADS}")
    check(
        call.kv_heads == 1,
        op,
        "num_key_value_heads",
        f"{call.kv_heads} must be 1 for heads of {_ABSORBED}",
    )
    check(table is not None, op, "block_table", f"must be given for heads of {_ABSORBED}")
    assert table is not None
    if key.dim() == 5:
        raise unsupported(op, "key (in the layout NZ)", key)
    check_rank(op, "key", key, 3, 4)
    check(
        key.shape == value.shape,
        op,
        "value",
        f"shape {tuple(value.shape)} must equal key's {tuple(key.shape)}",
    )
    check(
        0 < size <= 1024 and size % 16 == 0,
        op,
        "block_size",
        f"{size} must be a multiple of 16 up to 1024",
    )
    head_major = key.dim() == 4
    check(
        key.shape[-2] == size
        and key.shape[-1] == _ABSORBED
        and (not head_major or key.shape[1] == 1),
        op,
        "key",
        (
            f"shape {tuple(key.shape)} must be [blocks, 1, {size}, {_ABSORBED}] or "
            f"[blocks, {size}, {_ABSORBED}]"
        ),
    )
    lengths = call.cached_lengths(table, spans)
    latents, ropes, values = (
        PagedKeys(op, cache, table, 1, head_major) for cache in (key, key_rope, value)
    )
    return [
        (torch.cat((latents.of(i, length), ropes.of(i, length)), -1), values.of(i, length))
        for i, length in enumerate(lengths)
    ]


def _end_to_end(call: FusedCall, key_rope: torch.Tensor, sequences: int) -> Pairs:
    """Return ([keys, kv_heads, 192], [keys, kv_heads, 128]) of each sequence, laid end to end."""
    op, key, heads = call.op, call.key, call.heads
    if call.block_table is not None:
        raise unsupported(
            op, f"block_table (with query_rope and heads of {_EXPANDED})", call.block_table
        )
    kv_heads = call.kv_heads or heads
    check(
        kv_heads > 0 and heads % kv_heads == 0,
        op,
        "num_key_value_heads",
        f"{kv_heads} must divide num_heads={heads}",
    )
    for name, tensor in (("key", key), ("value", call.value)):
        wanted = (key.shape[0], kv_heads, _EXPANDED)
        check(
            tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}"
        )
    keys = torch.cat((key, key_rope), -1)
    return [(keys[first:last], call.value[first:last]) for first, last in call.key_spans(sequences)]
