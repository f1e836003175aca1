"""The fused attention kernel for decodes against an int8 KV cache with a scale per channel."""

import torch

from ascend_npu_emulator.ops.attention.cache import FRACTAL_BYTES
from ascend_npu_emulator.ops.attention.definition import PagedKeys, check_heads
from ascend_npu_emulator.ops.attention.fused_call import FusedCall
from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)


def int8_attention(call: FusedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * q (k * key_scale)^T) (v * value_scale). The caller checks the mask.

    Supported: one query per sequence in layout BNSD, a query [B, heads, 1, D] of float16 or
    bfloat16; key and value int8 [blocks, kv_heads, D / 32, block_size, 32] as
    npu_scatter_pa_kv_cache writes them; scales [kv_heads, 1, D] of the query's dtype
    (``antiquant_mode`` 0); ``block_table`` int32 [B, n], with one length of keys per sequence;
    sparse mode 0. Computed in float32 and rounded once. (CANN's documentation of
    aclnnFusedInferAttentionScoreV4, per-channel quantisation of key and value.)

    Returns:
        The output [B, heads, 1, D] and the log-sum-exp [B, heads, 1, 1] float32.
    """
    op, query, key, value, table = call.op, call.query, call.key, call.value, call.block_table
    refuse_options(
        op, query_rope=call.query_rope, key_rope=call.key_rope, softmax_lse_flag=call.with_lse
    )
    if call.layout != "BNSD":
        raise unsupported(op, "input_layout (with antiquant scales)", call.layout)
    if call.sparse_mode != 0:
        raise unsupported(op, "sparse_mode (with antiquant scales)", call.sparse_mode)
    if table is None:
        raise unsupported(op, "block_table (with antiquant scales)", table)
    check_rank(op, "query", query, 4)
    check_dtype(op, "query", query, (torch.float16, torch.bfloat16))
    batch, heads, queries, width = query.shape
    if queries != 1:
        raise unsupported(op, "query (with antiquant scales)", query)
    kv_heads = check_heads(op, call.heads, call.kv_heads)
    check(
        heads == call.heads,
        op,
        "num_heads",
        f"{call.heads} does not match query {tuple(query.shape)}",
    )
    size = call.block_size
    check(
        0 < size <= 512 and size % FRACTAL_BYTES == 0,
        op,
        "block_size",
        f"{size} must be a multiple of {FRACTAL_BYTES} up to 512",
    )
    wanted = (key.shape[0], kv_heads, width // FRACTAL_BYTES, size, FRACTAL_BYTES)
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(op, name, tensor, (torch.int8,))
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
        check(
            tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}"
        )
    scales = []
    for name, given in (
        ("key_antiquant_scale", call.key_scale),
        ("value_antiquant_scale", call.value_scale),
    ):
        check(given is not None, op, name, "must be given with the other scale")
        assert given is not None
        check(
            given.dtype == query.dtype,
            op,
            name,
            f"dtype {given.dtype} must equal query's {query.dtype}",
        )
        check(
            tuple(given.shape) == (kv_heads, 1, width),
            op,
            name,
            f"shape {tuple(given.shape)} must be ({kv_heads}, 1, {width})",
        )
        scales.append(given[:, 0].float())
    spans = [(row, row + 1) for row in range(batch)]
    caches = [PagedKeys(op, cache, table, kv_heads) for cache in (key, value)]
    lengths = call.cached_lengths(table, spans)
    pairs = [
        (
            caches[0].of(row, length).float() * scales[0],
            caches[1].of(row, length).float() * scales[1],
        )
        for row, length in enumerate(lengths)
    ]
    out, lse = call.attend(query.squeeze(2), spans, pairs, width)
    return out.unsqueeze(2), lse.unsqueeze(2)
