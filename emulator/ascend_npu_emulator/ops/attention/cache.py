"""References for kernels that write and read the paged KV cache, memory formats and prefetching."""

import torch

from ascend_npu_emulator.ops.checks import (
    check,
    check_blocks,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.poison import poisoned

FRACTAL_BYTES = 32  # bytes of each part of a row in the format FRACTAL_NZ
ACL_FORMATS = {
    2: "ND",
    29: "FRACTAL_NZ",
}  # the formats that vllm-ascend 0.23.0 uses (utils.py, ACL_FORMAT_*)
# The dtypes of npu_scatter_nd_update_ on A2 and A3 (op-plugin,
# torch_npu-npu_scatter_nd_update_.md).
_SCATTERED = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)


def _store(
    op: str, name: str, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``rows`` [T, N, D] to the ``slots`` [T] of ``cache`` [blocks, block_size, N, D].

    Slot i is row i % block_size of block i // block_size.
    """
    check_rank(op, name, rows, 3)
    check_rank(op, f"{name}_cache", cache, 4)
    check_blocks(op, f"{name}_cache", cache)
    check(
        rows.dtype == cache.dtype,
        op,
        name,
        f"dtype {rows.dtype} must equal the cache's {cache.dtype}",
    )
    check(
        rows.shape[1:] == cache.shape[2:],
        op,
        name,
        f"shape {tuple(rows.shape)} must end like the cache's {tuple(cache.shape)}",
    )
    check(
        rows.shape[0] == slots.shape[0],
        op,
        name,
        f"{rows.shape[0]} rows for {slots.shape[0]} slots",
    )
    if cache.is_contiguous():
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write ``key`` and ``value`` [T, kv_heads, D] into their caches.

    Rows with a negative slot are skipped. A slot past the end raises an error, where hardware would
    silently write out of bounds.

    Args:
        key_cache, value_cache: [blocks, block_size, kv_heads, D].
        slot_indices: int32 [T].
    """
    op = "_npu_reshape_and_cache"
    check_dtype(op, "slot_indices", slot_indices, (torch.int32,))
    check_rank(op, "slot_indices", slot_indices, 1)
    _store_all(op, key, value, key_cache, value_cache, slot_indices, "slot_indices")


def _store_all(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    argument: str,
) -> None:
    """Write the rows whose slot is not negative; ``argument`` is the name of ``slots``."""
    capacity = key_cache.shape[0] * key_cache.shape[1]
    beyond = slots[slots >= capacity]
    check(
        beyond.numel() == 0,
        op,
        argument,
        f"{beyond.tolist()[:8]} lie past the cache's {capacity} slots",
    )
    kept = slots >= 0
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        check(
            rows.shape[0] == slots.shape[0],
            op,
            name,
            f"{rows.shape[0]} rows for {slots.shape[0]} slots",
        )
        _store(op, name, rows[kept], cache, slots[kept].long())


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Do the same as ``_npu_reshape_and_cache``, for ``cache_mode`` "Norm" and "PA_NZ".

    A cache in "PA_NZ" is [blocks, kv_heads, D / n, block_size, n], where n elements have 32 bytes.
    Element d of a head is element d % n of part d // n.

    ``slot_mapping`` is int32 or int64. A negative slot is skipped, as by CANN's published kernels;
    model runner V2 gives -1 for the tokens of dummy batches.
    """
    op = "npu_scatter_pa_kv_cache"
    refuse_options(
        op,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
    )
    check(
        cache_mode in (None, "Norm", "PA_NZ"),
        op,
        "cache_mode",
        f"{cache_mode!r} is not one of Norm, PA_NZ",
    )
    check_dtype(op, "slot_mapping", slot_mapping, (torch.int32, torch.int64))
    check_rank(op, "slot_mapping", slot_mapping, 1)
    for name, tensor in (("key", key), ("value", value), ("slot_mapping", slot_mapping)):
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
    if cache_mode == "PA_NZ":
        for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
            _store_fractal(op, name, rows, cache, slot_mapping)
    else:
        _store_all(op, key, value, key_cache, value_cache, slot_mapping, "slot_mapping")


def _store_fractal(
    op: str, name: str, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``rows`` [T, N, D] to the ``slots`` [T] of a cache in "PA_NZ"."""
    check_rank(op, name, rows, 3)
    check_dtype(op, name, rows, (torch.int8, torch.float16, torch.bfloat16))
    check(
        rows.dtype == cache.dtype,
        op,
        name,
        f"dtype {rows.dtype} must equal the cache's {cache.dtype}",
    )
    check(
        rows.shape[0] == slots.shape[0],
        op,
        name,
        f"{rows.shape[0]} rows for {slots.shape[0]} slots",
    )
    (heads, width), part = rows.shape[1:], FRACTAL_BYTES // rows.element_size()
    check(width % part == 0, op, name, f"head size {width} must be a multiple of {part}")
    check_rank(op, f"{name}_cache", cache, 5)
    check(
        cache.is_contiguous(), op, f"{name}_cache", f"strides {cache.stride()} must be contiguous"
    )
    blocks, size = cache.shape[0], cache.shape[3]
    wanted = (blocks, heads, width // part, size, part)
    check(
        tuple(cache.shape) == wanted,
        op,
        f"{name}_cache",
        f"shape {tuple(cache.shape)} must be {wanted}",
    )
    beyond = slots[slots >= blocks * size]
    check(
        beyond.numel() == 0,
        op,
        "slot_mapping",
        f"{beyond.tolist()[:8]} lie past the cache's {blocks * size} slots",
    )
    kept = slots >= 0
    at = slots[kept].long()
    cache.permute(0, 3, 1, 2, 4)[at // size, at % size] = rows[kept].view(
        -1, heads, width // part, part
    )


def npu_scatter_nd_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Write the rows ``updates`` [T, D] to rows ``indices`` [T, 1] of ``input`` [R, D]; return it.

    A row with a negative index is skipped, as by the kernels that vllm-ascend publishes
    (csrc/moe/scatter_nd_update_v2/op_kernel/scatter_nd_update_no_sort.h:95 in 0.23.0,
    csrc/moe/scatter_nd_update_sk/op_kernel/arch22/scatter_nd_update_hp.h:211 in 0.30.0rc2). An
    index past the end raises; hardware would write out of bounds. A row that two updates write
    holds neither, because the kernels write in parallel. (op-plugin,
    torch_npu-npu_scatter_nd_update_.md.) Indices into more than one dimension have no reference.
    """
    return _scatter("npu_scatter_nd_update_", "input", input, indices, updates)


def npu_scatter_nd_update_sk(
    var: torch.Tensor, indices: torch.Tensor, update: torch.Tensor
) -> None:
    """Do the same as ``npu_scatter_nd_update_``, with gaps allowed between the rows of ``var``.

    Each row must be contiguous. (csrc/moe/scatter_nd_update_sk/op_host in 0.30.0rc2:
    op_api/aclnn_scatter_nd_update_sk.cpp:50 and scatter_nd_update_sk_tiling.cpp, HandleViewStride.)
    """
    op = "npu_scatter_nd_update_sk"
    check_rank(op, "var", var, 2)
    check(
        var.stride(1) == 1 or var.shape[1] == 1,
        op,
        "var",
        f"rows with stride {var.stride(1)} must be contiguous",
    )
    _scatter(op, "var", var, indices, update)


def _scatter(
    op: str, name: str, var: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    check_dtype(op, "indices", indices, (torch.int32, torch.int64))
    check_dtype(op, name, var, _SCATTERED)
    check(
        updates.dtype == var.dtype,
        op,
        "updates",
        f"dtype {updates.dtype} must equal the {var.dtype} of {name}",
    )
    if var.dim() != 2 or indices.dim() != 2 or indices.shape[1] != 1:
        raise unsupported(op, "indices", indices)
    wanted = (indices.shape[0], var.shape[1])
    check(
        tuple(updates.shape) == wanted,
        op,
        "updates",
        f"shape {tuple(updates.shape)} must be {wanted}",
    )
    rows = indices[:, 0].long()
    beyond = rows[rows >= var.shape[0]]
    check(
        beyond.numel() == 0,
        op,
        "indices",
        f"{beyond.tolist()[:8]} lie past the {var.shape[0]} rows of {name}",
    )
    kept = rows >= 0
    var.index_copy_(0, rows[kept], updates[kept])
    places, written = rows[kept].unique(return_counts=True)
    twice = places[written > 1]
    var.index_copy_(0, twice, poisoned((twice.shape[0], var.shape[1]), var))
    return var


def npu_format_cast(
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """Return a copy of ``input`` in another memory format.

    A format determines the position of elements in device memory, not the meaning of an index, so
    the emulator keeps the layout. Only the copy is visible: views of ``input`` do not share memory
    with the result.
    """
    op = "npu_format_cast"
    refuse_options(op, customize_dtype=customize_dtype, input_dtype=input_dtype)
    if acl_format not in ACL_FORMATS:
        raise unsupported(op, "acl_format", acl_format)
    return input.clone(memory_format=torch.preserve_format)


def npu_prefetch(
    input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0
) -> None:
    """Check the arguments and do nothing: a prefetch into the cache has no visible effect."""
    op = "npu_prefetch"
    check(max_size > 0, op, "max_size", f"{max_size} must be positive")
    size = input.numel() * input.element_size()
    check(0 <= offset <= size, op, "offset", f"{offset} lies outside the {size} bytes of input")
