"""References for sparse attention (DSA) over int8 caches: of the indexer's keys, and of latents.

The definitions are the sources of CANN's kernels in vllm-ascend 0.23.0.post1,
csrc/attention/lightning_indexer_quant and csrc/attention/kv_quant_sparse_flash_attention. 0.30.0rc2
has the same sources and names the second operator npu_kv_quant_sparse_flash_attention_vllm.
Supported: queries in TND and keys in PA_BSND, the layouts of vllm-ascend.
"""

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys
from ascend_npu_emulator.ops.attention.sparse import (
    ALL_TOKENS,
    SparseBatch,
    attend_chosen,
    best_keys,
    check_block_size,
    times_chosen,
)
from ascend_npu_emulator.ops.checks import (
    check,
    check_blocks,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.poison import poisoned

_HALVES = (torch.float16, torch.bfloat16)
_INDEX_DIM, _INDEX_HEADS_AT_MOST, _COUNT_AT_MOST = 128, 64, 2048
_LATENT, _ROPE, _TILE = 512, 64, 128
_SCALES = _LATENT // _TILE
_QUERY_DIM = _LATENT + _ROPE
# Bytes of a key: int8 latent, rope in two bytes per element, and a float32 scale for each tile.
_ROPE_BYTES, _SCALE_BYTES = 2 * _ROPE, 4 * _SCALES
_KEY_BYTES = _LATENT + _ROPE_BYTES + _SCALE_BYTES
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_SPARSE_BLOCKS = (1, 2, 4, 8, 16)
_PRODUCT_SCALE = (
    2.0**-10
)  # divisor of the products, which the kernel then rounds to float16 (service_cube.h:546)


def npu_lightning_indexer_quant(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> torch.Tensor:
    """Return the ``sparse_count`` keys with the highest scores for each query.

    The score is the sum over heads of weight * relu(q k), times the key's scale. Each product is
    exact, then divided by 1024 and rounded to float16. Each weight is multiplied by the query's
    scale in float16. All else is float32 (op_kernel/lightning_indexer_quant_service_cube.h:542 and
    546, lightning_indexer_quant_service_vector.h:306 and 383). Keys are ordered as in
    ``npu_lightning_indexer``.

    Args:
        query: int8 [T, heads, 128], with at most 64 heads (op-plugin of 21 Aug 2026,
            torch_npu-npu_quant_lightning_indexer.md).
        key: int8 [blocks, block_size, 1, 128].
        weights, query_dequant_scale: float16 [T, heads]. The products must be finite.
        key_dequant_scale: float16 [blocks, block_size, 1].
        sparse_count: 1 to 2048.

    Returns:
        int32 [T, 1, sparse_count]. Rows after the last sequence are undefined.
    """
    op = "npu_lightning_indexer_quant"
    batch = SparseBatch(
        op,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        "actual_seq_lengths_key",
        block_table,
        sparse_mode,
    )
    batch.check_options(layout_query, layout_key, ALL_TOKENS, ALL_TOKENS)
    check(
        0 < sparse_count <= _COUNT_AT_MOST,
        op,
        "sparse_count",
        f"{sparse_count} must be 1 to {_COUNT_AT_MOST}",
    )
    for name, mode in (("query_quant_mode", query_quant_mode), ("key_quant_mode", key_quant_mode)):
        check(mode == 0, op, name, f"{mode} must be 0")
    _check_indexer(op, query, key, weights, query_dequant_scale, key_dequant_scale)
    assert block_table is not None
    keys, scales = (
        PagedKeys(op, key, block_table, 1),
        PagedKeys(op, key_dequant_scale, block_table, 1),
    )
    chosen = torch.full(
        (query.shape[0], 1, sparse_count),
        torch.iinfo(torch.int32).max,
        dtype=torch.int32,
        device=query.device,
    )
    for sequence in batch.sequences(query.shape[0]):
        rows, number, count = slice(sequence.first, sequence.end), sequence.number, sequence.keys
        shares = (weights[rows].float() * query_dequant_scale[rows].float()).half()
        check(
            bool(shares.isfinite().all()),
            op,
            "weights",
            "products with query_dequant_scale must be finite in float16",
        )
        products = (
            query[rows].float() @ keys.of(number, count)[:, 0].float().t()
        )  # exact in float32: no sum exceeds 2^21
        rounded = (products.relu() * _PRODUCT_SCALE).half().float()
        scores = (rounded * shares.float().unsqueeze(-1)).sum(1) * scales.of(number, count)[
            :, 0, 0
        ].float()
        chosen[rows, 0] = best_keys(scores, sequence, sparse_count)
    return chosen


def _check_indexer(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
) -> None:
    check_rank(op, "query", query, 3)
    check_rank(op, "key", key, 4)
    for name, tensor in (("query", query), ("key", key)):
        check(tensor.numel() > 0, op, name, f"shape {tuple(tensor.shape)} must not be empty")
        check_dtype(op, name, tensor, (torch.int8,))
    rows, heads, width = query.shape
    check(width == _INDEX_DIM, op, "query", f"head size {width} must be {_INDEX_DIM}")
    check(
        heads <= _INDEX_HEADS_AT_MOST,
        op,
        "query",
        f"{heads} heads exceed {_INDEX_HEADS_AT_MOST}",
    )
    check(
        tuple(key.shape[2:]) == (1, width),
        op,
        "key",
        f"shape {tuple(key.shape)} must end in (1, {width})",
    )
    shapes = {
        "weights": (weights, (rows, heads)),
        "query_dequant_scale": (query_scale, (rows, heads)),
        "key_dequant_scale": (key_scale, tuple(key.shape[:3])),
    }
    for name, (tensor, wanted) in shapes.items():
        check_dtype(op, name, tensor, (torch.float16,))
        check(
            tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}"
        )
    check_block_size(op, key)
    check_blocks(op, "key", key)
    check_blocks(op, "key_dequant_scale", key_scale)


def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    key_quant_mode: int = 1,
    value_quant_mode: int = 1,
    key_dequant_scale: torch.Tensor | None = None,
    value_dequant_scale: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    attention_mode: int = 2,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``npu_sparse_flash_attention`` over int8 latents.

    Each element of a latent is multiplied by the tile's scale and rounded once to the query's dtype
    (op_kernel/kv_quant_sparse_flash_attention_service_vector_mla.h:798 to 814). The key is this
    latent and the rope; the value is the latent alone. Entries of ``sparse_indices`` are read as in
    ``npu_sparse_flash_attention`` (lines 626, 638 and 890).

    Args:
        query: float16 or bfloat16 [T, heads, 576], 512 elements for the latent and 64 for the rope.
            The number of heads is a power of 2 up to 128.
        key, value: int8 [blocks, block_size, 1, 656], the same bytes: 512 for the latent, 64 rope
            elements in the query's dtype, and 4 float32 scales.
        sparse_indices: int32 [T, 1, n].

    Returns:
        [T, heads, 512], and two empty tensors. Rows after the last sequence are undefined.
    """
    op = "npu_kv_quant_sparse_flash_attention"
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
    for name, scale in (
        ("key_dequant_scale", key_dequant_scale),
        ("value_dequant_scale", value_dequant_scale),
    ):
        check(scale is None, op, name, "must not be given: the cache holds the scales of each key")
    for name, given, wanted in (
        ("attention_mode", attention_mode, 2),
        ("key_quant_mode", key_quant_mode, 2),
        ("value_quant_mode", value_quant_mode, 2),
        ("quant_scale_repo_mode", quant_scale_repo_mode, 1),
        ("tile_size", tile_size, _TILE),
        ("rope_head_dim", rope_head_dim, _ROPE),
    ):
        check(given == wanted, op, name, f"{given} must be {wanted}")
    check(
        sparse_block_size in _SPARSE_BLOCKS,
        op,
        "sparse_block_size",
        f"{sparse_block_size} is not one of {_SPARSE_BLOCKS}",
    )
    if sparse_block_size != 1:
        raise unsupported(op, "sparse_block_size", sparse_block_size)
    _check_attention(op, query, key, value, sparse_indices)
    assert block_table is not None
    pages = PagedKeys(op, key, block_table, 1)
    out = poisoned((*query.shape[:2], _LATENT), query)
    for sequence in batch.sequences(query.shape[0]):
        rows = slice(sequence.first, sequence.end)
        latents, ropes = _dequantised(pages.of(sequence.number, sequence.keys)[:, 0], query.dtype)
        times = times_chosen(sparse_indices[rows, 0], sequence)
        out[rows] = attend_chosen(
            query[rows], torch.cat((latents, ropes), -1), latents, scale_value, times
        ).to(out.dtype)
    return out, query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.float32)


def _check_attention(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
) -> None:
    check_rank(op, "query", query, 3)
    check_rank(op, "key", key, 4)
    check_dtype(op, "query", query, _HALVES)
    rows, heads, width = query.shape
    check(rows > 0, op, "query", f"shape {tuple(query.shape)} must not be empty")
    check(heads in _HEADS, op, "query", f"{heads} heads are not one of {_HEADS}")
    check(width == _QUERY_DIM, op, "query", f"head size {width} must be {_QUERY_DIM}")
    check(key.shape[0] > 0, op, "key", "must have blocks")
    wanted = (*key.shape[:2], 1, _KEY_BYTES)
    for name, cache in (("key", key), ("value", value)):
        check_dtype(op, name, cache, (torch.int8,))
        check(
            tuple(cache.shape) == wanted, op, name, f"shape {tuple(cache.shape)} must be {wanted}"
        )
        check_blocks(op, name, cache)
    check_block_size(op, key)
    check_dtype(op, "sparse_indices", sparse_indices, (torch.int32,))
    check_rank(op, "sparse_indices", sparse_indices, 3)
    check(
        tuple(sparse_indices.shape[:2]) == (rows, 1) and sparse_indices.shape[2] > 0,
        op,
        "sparse_indices",
        f"shape {tuple(sparse_indices.shape)} must be [{rows}, 1, n]",
    )


def _dequantised(keys: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents [keys, 512] and ropes [keys, 64] from int8 [keys, 656], in float32."""
    latents, ropes, scales = keys.contiguous().split([_LATENT, _ROPE_BYTES, _SCALE_BYTES], -1)
    factors = scales.contiguous().view(torch.float32).repeat_interleave(_TILE, -1)
    return (latents.float() * factors).to(dtype).float(), ropes.contiguous().view(dtype).float()
