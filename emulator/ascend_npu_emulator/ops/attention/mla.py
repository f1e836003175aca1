"""References for the kernels around latent attention (MLA).

They compute the rotary embedding, write and read the cache, multiply by batch, and merge partial
results.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys
from ascend_npu_emulator.ops.attention.latent import ROPE_DIM
from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.poison import POISON
from ascend_npu_emulator.ops.schemas import is_at_least

_LATENT_DIM = 512
_HALVES = (torch.float16, torch.bfloat16)
_CACHE_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
_MERGED_AT_MOST = 16


def _unwound(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of ``x`` [..., R]; return all first elements, then all second.

    The result is float32 [..., R]. The second half of ``cos`` and ``sin`` [..., R] repeats the
    angles of the first.
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    return (
        torch.cat((first, second), -1) * cos.float() + torch.cat((-second, first), -1) * sin.float()
    )


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbours of ``x`` [B, N, S, 64] by ``cos`` and ``sin`` [B, 1, 1 or S, 64].

    The result has the shape of ``x``, but the element pairs (0, 1), (2, 3), ... become (0, 32), (1,
    33), .... Query and key are reordered alike, so the products stay the same.
    """
    op = "npu_interleave_rope"
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_rank(op, name, tensor, 4)
        check_dtype(op, name, tensor, _HALVES)
        check(tensor.dtype == x.dtype, op, name, f"dtype {tensor.dtype} must equal x's {x.dtype}")
        check(
            tensor.shape[-1] == ROPE_DIM,
            op,
            name,
            f"last dimension of {tuple(tensor.shape)} must be {ROPE_DIM}",
        )
    batch, _, length, _ = x.shape
    for name, tensor in (("cos", cos), ("sin", sin)):
        fits = tensor.shape[0] == batch and tensor.shape[1] == 1 and tensor.shape[2] in (1, length)
        check(
            fits,
            op,
            name,
            f"shape {tuple(tensor.shape)} must be [{batch}, 1, 1 or {length}, {ROPE_DIM}]",
        )
    return _unwound(x, cos, sin).to(x.dtype)


def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm the latent and rotate the rest of each row of ``kv``, and write both into the caches.

    The norm rounds once, at the end (CANN ops-transformer, kv_rms_norm_rope_cache_b16_pa.h).
    Supported: the equal cache modes PA and PA_BNSD, without quantisation.

    Args:
        kv: [B, 1, S, 512 + 64].
        gamma: [512].
        cos, sin: [B, 1, S, 64].
        index: int64 [B * S], slot of each row in the caches. -1 is skipped. A slot past the end
            raises; hardware would write out of bounds. A slot that occurs twice receives POISON,
            because the content is undefined.
        k_cache: [blocks, block_size, 1, 64], for rotated rows (see ``npu_interleave_rope``).
        ckv_cache: [blocks, block_size, 1, 512], for normed rows.

    Returns:
        k_cache, ckv_cache, rotated [B, 1, S, 64] and normed [B, 1, S, 512]; the last two are empty
            unless ``is_output_kv``.
    """
    op = "npu_kv_rmsnorm_rope_cache"
    refuse_options(
        op,
        k_rope_scale=k_rope_scale,
        c_kv_scale=c_kv_scale,
        k_rope_offset=k_rope_offset,
        c_kv_offset=c_kv_offset,
        v=v,
    )
    check(
        cache_mode in _CACHE_MODES, op, "cache_mode", f"{cache_mode!r} is not one of {_CACHE_MODES}"
    )
    if cache_mode not in ("PA", "PA_BNSD"):
        raise unsupported(op, "cache_mode", cache_mode)
    check_rank(op, "kv", kv, 4)
    batch, _, length, _ = kv.shape
    shapes = {
        "kv": (kv, (batch, 1, length, _LATENT_DIM + ROPE_DIM)),
        "gamma": (gamma, (_LATENT_DIM,)),
        "cos": (cos, (batch, 1, length, ROPE_DIM)),
        "sin": (sin, (batch, 1, length, ROPE_DIM)),
        "k_cache": (k_cache, (*k_cache.shape[:2], 1, ROPE_DIM)),
        "ckv_cache": (ckv_cache, (*k_cache.shape[:2], 1, _LATENT_DIM)),
    }
    for name, (tensor, wanted) in shapes.items():
        check_dtype(op, name, tensor, _HALVES)
        check(
            tensor.dtype == kv.dtype, op, name, f"dtype {tensor.dtype} must equal kv's {kv.dtype}"
        )
        check(
            tuple(tensor.shape) == wanted, op, name, f"shape {tuple(tensor.shape)} must be {wanted}"
        )
    check_dtype(op, "index", index, (torch.int64,))
    check(
        tuple(index.shape) == (batch * length,),
        op,
        "index",
        f"shape {tuple(index.shape)} must be ({batch * length},)",
    )
    capacity = k_cache.shape[0] * k_cache.shape[1]
    outside = index[(index < -1) | (index >= capacity)]
    check(
        outside.numel() == 0,
        op,
        "index",
        f"{outside.tolist()[:8]} lie outside the cache's {capacity} slots",
    )
    latent = kv[..., :_LATENT_DIM].float()
    normed = (
        latent / torch.sqrt(latent.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    ).to(kv.dtype)
    rotated = _unwound(kv[..., _LATENT_DIM:], cos, sin).to(kv.dtype)
    kept = index >= 0
    slots, written = index[kept].unique(return_counts=True)
    for name, cache, rows in (("k_cache", k_cache, rotated), ("ckv_cache", ckv_cache, normed)):
        check(cache.is_contiguous(), op, name, f"strides {cache.stride()} must be contiguous")
        flat = cache.view(capacity, -1)
        flat.index_copy_(0, index[kept], rows.reshape(batch * length, -1)[kept])
        flat.index_fill_(0, slots[written > 1], POISON)
    if not is_output_kv:
        return k_cache, ckv_cache, kv.new_empty(0), kv.new_empty(0)
    return k_cache, ckv_cache, rotated, normed


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Return [M, B, N], one product per batch, from ``input`` [B, M, K] and ``weight`` [B, K, N].

    With ``perm_x1`` (1, 0, 2) the input is [M, B, K]. ``perm_y`` must be (1, 0, 2); K and N must be
    multiples of 128, with vllm-ascend 0.30 (CANN 9.1) of 16. (op-plugin,
    torch_npu-npu_transpose_batchmatmul.md at 517f2e7d.)
    """
    op = "npu_transpose_batchmatmul"
    refuse_options(op, bias=bias, scale=scale)
    if batch_split_factor not in (None, 1):
        raise unsupported(op, "batch_split_factor", batch_split_factor)
    straight, swapped = (0, 1, 2), (1, 0, 2)
    first, second, last = (
        tuple(perm) if perm is not None else straight for perm in (perm_x1, perm_x2, perm_y)
    )
    check(
        first in (straight, swapped), op, "perm_x1", f"{first} is not one of {straight}, {swapped}"
    )
    check(second == straight, op, "perm_x2", f"{second} must be {straight}")
    check(last == swapped, op, "perm_y", f"{last} must be {swapped}")
    for name, tensor in (("input", input), ("weight", weight)):
        check_rank(op, name, tensor, 3)
        check_dtype(op, name, tensor, FLOATS)
        check(
            tensor.dtype == input.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal input's {input.dtype}",
        )
    whole = input.permute(first)
    check(
        weight.shape[:2] == (whole.shape[0], whole.shape[2]),
        op,
        "weight",
        f"shape {tuple(weight.shape)} does not fit input {tuple(input.shape)} with perm_x1 {first}",
    )
    part = 16 if is_at_least("0.30") else 128
    check(
        weight.shape[1] % part == 0 and weight.shape[2] % part == 0,
        op,
        "weight",
        f"shape {tuple(weight.shape)} must have multiples of {part} in its last two dimensions",
    )
    return torch.bmm(whole.float(), weight.float()).transpose(0, 1).to(input.dtype).contiguous()


def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [T, N, Dk] and values [T, N, Dv] of many sequences, end to end.

    Args:
        key_cache, value_cache: [blocks, block_size, N, Dk and Dv].
        block_table: int32 [sequences, n].
        context_lens: int32 [sequences], number of rows of each; the sum is T.
        seq_starts: int32 [sequences], first row of each; a multiple of the block size, because the
            kernel starts at a block.
    """
    op = "npu_paged_cache_load"
    if cumsum:
        raise unsupported(op, "cumsum", cumsum)
    check_rank(op, "key_cache", key_cache, 4)
    check(
        value_cache.shape[:3] == key_cache.shape[:3],
        op,
        "value_cache",
        f"shape {tuple(value_cache.shape)} must begin like key_cache's {tuple(key_cache.shape)}",
    )
    check(
        value_cache.dtype == key_cache.dtype,
        op,
        "value_cache",
        f"dtype {value_cache.dtype} must equal key_cache's {key_cache.dtype}",
    )
    for name, numbers in (("context_lens", context_lens), ("seq_starts", seq_starts)):
        if numbers is not None:
            check_dtype(op, name, numbers, (torch.int32,))
            check(
                numbers.numel() == block_table.shape[0],
                op,
                name,
                f"{numbers.numel()} numbers for {block_table.shape[0]} sequences",
            )
    size = key_cache.shape[1]
    lengths = context_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    check(
        all(length >= 0 for length in lengths),
        op,
        "context_lens",
        f"{lengths} must not be negative",
    )
    check(
        all(start >= 0 and start % size == 0 for start in starts),
        op,
        "seq_starts",
        f"{starts} must be multiples of {size}",
    )
    spans = [
        (start, start + length if length else start)
        for start, length in zip(starts, lengths, strict=True)
    ]
    loaded = []
    for cache in (key_cache, value_cache):
        check_dtype(op, "key_cache", cache, _HALVES)
        loaded.append(_loaded(op, cache, block_table, spans))
    return loaded[0], loaded[1]


def npu_paged_cache_load_out(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``npu_paged_cache_load`` into ``key`` [T, N, Dk] and ``value`` [T, N, Dv]."""
    loaded = npu_paged_cache_load(
        key_cache, value_cache, block_table, context_lens, seq_starts=seq_starts, cumsum=cumsum
    )
    for name, target, rows in (("key", key, loaded[0]), ("value", value, loaded[1])):
        check(
            target.dtype == rows.dtype and target.shape == rows.shape,
            "npu_paged_cache_load",
            name,
            f"{target.dtype} {tuple(target.shape)} must be {rows.dtype} {tuple(rows.shape)}",
        )
        target.copy_(rows)
    return key, value


def _loaded(
    op: str, cache: torch.Tensor, table: torch.Tensor, spans: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return rows [first, end) of each sequence, end to end; cache [blocks, block_size, N, D]."""
    heads = cache.shape[2]
    pages = PagedKeys(op, cache, table, heads)
    parts = [pages.of(i, end)[first:] for i, (first, end) in enumerate(spans) if end > first]
    return torch.cat(parts) if parts else cache.new_empty(0, heads, cache.shape[3])


def npu_gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Load the rows of many sequences, end to end, into ``key`` and ``value``.

    Rows begin at block ``seq_offset[i] // block_size`` of a sequence's blocks. Every tensor must be
    contiguous and not empty. A block that does not exist raises, where hardware would read
    arbitrary memory. Supported: caches in the format ND, in float16 and bfloat16. (CANN
    ops-transformer, aclnnGatherPaKvCache; torch_npu 2.10.0.post4 chooses its cache mode by the
    cache's format.)

    Args:
        key_cache, value_cache: [blocks, block_size, N, Dk and Dv].
        block_tables: int32 [sequences, n].
        seq_lens: int32 [sequences], number of rows of each; the sum is T. With
            ``is_seq_lens_cumsum`` [sequences + 1], running totals that start at 0.
        key, value: [T, N, Dk and Dv], written.
        seq_offset: int32 [sequences].
    """
    op = "npu_gather_pa_kv_cache"
    given = {"block_tables": block_tables, "seq_lens": seq_lens} | (
        {} if seq_offset is None else {"seq_offset": seq_offset}
    )
    rows = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
    for name, tensor in {**rows, **given}.items():
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
        check(tensor.numel() > 0, op, name, f"shape {tuple(tensor.shape)} must not be empty")
        check_dtype(op, name, tensor, (torch.int32,) if name in given else _HALVES)
        check(
            name in given or tensor.dtype == key_cache.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal key_cache's {key_cache.dtype}",
        )
    check_rank(op, "block_tables", block_tables, 2)
    sequences = block_tables.shape[0]
    for name, numbers, count in (
        ("seq_lens", seq_lens, sequences + is_seq_lens_cumsum),
        ("seq_offset", seq_offset, sequences),
    ):
        fits = numbers is None or tuple(numbers.shape) == (count,)
        check(
            fits,
            op,
            name,
            f"shape {'' if numbers is None else tuple(numbers.shape)} must be ({count},)",
        )
    lengths = seq_lens.tolist()
    if is_seq_lens_cumsum:
        check(lengths[0] == 0, op, "seq_lens", f"the running totals {lengths} must begin with 0")
        lengths = [end - first for first, end in pairwise(lengths)]
    check(
        all(length >= 0 for length in lengths),
        op,
        "seq_lens",
        f"the lengths {lengths} must not be negative",
    )
    offsets = [0] * sequences if seq_offset is None else seq_offset.tolist()
    check(
        all(offset >= 0 for offset in offsets), op, "seq_offset", f"{offsets} must not be negative"
    )
    for name, cache, target in (("key", key_cache, key), ("value", value_cache, value)):
        check_rank(op, f"{name}_cache", cache, 4)
        check(
            cache.shape[:3] == key_cache.shape[:3],
            op,
            f"{name}_cache",
            f"shape {tuple(cache.shape)} must begin like key_cache's {tuple(key_cache.shape)}",
        )
        wanted = (sum(lengths), *cache.shape[2:])
        check(
            tuple(target.shape) == wanted, op, name, f"shape {tuple(target.shape)} must be {wanted}"
        )
        starts = [offset // cache.shape[1] * cache.shape[1] for offset in offsets]
        spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        target.copy_(_loaded(op, cache, block_tables, spans))


def npu_attention_update(
    lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attentions over parts of the keys.

    The result is the sum of ``local_out[i]`` * exp(``lse[i]`` - logsumexp(``lse``)). The attention
    kernel marks a row that saw no key in a part with an lse of +inf. Such a row does not count
    (CANN ops-transformer, attention_update_without_lse_regbase.h). Supported: ``update_type`` 0,
    without the merged lse.

    Args:
        lse: float32 [R] of each part.
        local_out: [R, D] of each part.

    Returns:
        The output [R, D] like ``local_out``, and an empty tensor.
    """
    op = "npu_attention_update"
    if update_type != 0:
        raise unsupported(op, "update_type", update_type)
    check(
        1 <= len(lse) <= _MERGED_AT_MOST,
        op,
        "lse",
        f"{len(lse)} parts must be 1 to {_MERGED_AT_MOST}",
    )
    check(
        len(local_out) == len(lse), op, "local_out", f"{len(local_out)} outputs for {len(lse)} lse"
    )
    rows, width = local_out[0].shape
    check(
        8 <= width <= 512 and width % 8 == 0,
        op,
        "local_out",
        f"{width} columns must be a multiple of 8 from 8 to 512",
    )
    for sums, part in zip(lse, local_out, strict=True):
        check_dtype(op, "lse", sums, (torch.float32,))
        check_dtype(op, "local_out", part, FLOATS)
        check(
            part.dtype == local_out[0].dtype,
            op,
            "local_out",
            f"dtypes {part.dtype} and {local_out[0].dtype} must be equal",
        )
        check(
            tuple(sums.shape) == (rows,), op, "lse", f"shape {tuple(sums.shape)} must be ({rows},)"
        )
        check(
            tuple(part.shape) == (rows, width),
            op,
            "local_out",
            f"shape {tuple(part.shape)} must be ({rows}, {width})",
        )
        check(
            sums.is_contiguous() and part.is_contiguous(),
            op,
            "lse, local_out",
            "must be contiguous",
        )
    stacked = torch.stack(list(lse))
    stacked = stacked.masked_fill(stacked == float("inf"), float("-inf"))
    weights = torch.exp(stacked - torch.logsumexp(stacked, 0)).unsqueeze(-1)
    merged = (weights * torch.stack(list(local_out)).float()).sum(0)
    return merged.to(local_out[0].dtype), merged.new_empty(0)
