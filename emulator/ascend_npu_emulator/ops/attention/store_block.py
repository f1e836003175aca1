"""References for the kernels that write rows into a paged cache by runs of slots.

The definitions are vllm-ascend 0.30.0rc2's sources, csrc/attention/store_kv_block and
store_kv_block_metadata. The sources in 0.23.0.post1 are the same.
"""

import torch

from ascend_npu_emulator.ops.checks import check, check_dtype, check_rank

_STORED = (torch.int8, torch.float16, torch.bfloat16)
_ELEMENTS_AT_MOST = 180 * 1024  # of a block (store_kv_block_tiling.cpp:98)
_RANKS = range(2, 8)


def store_kv_block_metadata(
    slot_mapping_npu: torch.Tensor,
    group_len: torch.Tensor,
    group_key_idx: torch.Tensor,
    group_key_cache_idx: torch.Tensor,
    block_size: int = 0,
) -> None:
    """Write the runs of consecutive slots in a block: lengths, first rows, first slots.

    Negative slots belong to no run. Entries after the last run become 0
    (op_kernel_aicpu/store_kv_block_metadata_aicpu.cpp:78 to 119).

    Args:
        slot_mapping_npu: int32 [T], not empty.
        group_len, group_key_idx, group_key_cache_idx: int32 [n], written. More than n runs raise;
            hardware would write out of bounds.
        block_size: rows per block of the cache.
    """
    op = "store_kv_block_metadata"
    check(block_size > 0, op, "block_size", f"{block_size} must be positive")
    for name, tensor in (
        ("slot_mapping_npu", slot_mapping_npu),
        ("group_len", group_len),
        ("group_key_idx", group_key_idx),
        ("group_key_cache_idx", group_key_cache_idx),
    ):
        check_dtype(op, name, tensor, (torch.int32,))
        check_rank(op, name, tensor, 1)
        check(tensor.numel() > 0, op, name, "must not be empty")
        check(
            tensor.shape == group_len.shape or tensor is slot_mapping_npu,
            op,
            name,
            f"shape {tuple(tensor.shape)} must be group_len's",
        )
    runs: list[list[int]] = []
    before = None
    for row, slot in enumerate(slot_mapping_npu.tolist()):
        if slot >= 0 and before is not None and slot == before + 1 and slot % block_size:
            runs[-1][0] += 1
        elif slot >= 0:
            runs.append([1, row, slot])
        before = slot if slot >= 0 else None
    check(
        len(runs) <= group_len.shape[0],
        op,
        "group_len",
        f"{group_len.shape[0]} entries are fewer than the {len(runs)} runs",
    )
    filled = torch.tensor(runs + [[0, 0, 0]] * (group_len.shape[0] - len(runs)), dtype=torch.int32)
    for column, tensor in enumerate((group_len, group_key_idx, group_key_cache_idx)):
        tensor.copy_(filled[:, column])


def store_kv_block(
    key_in: torch.Tensor,
    key_cache_in: torch.Tensor,
    group_len: torch.Tensor,
    group_key_idx: torch.Tensor,
    group_key_cache_idx: torch.Tensor,
    block_size: int = 0,
) -> None:
    """Copy runs of rows of ``key_in`` [T, ...] into the cache [blocks, block_size, ...].

    Empty runs and runs with a negative first row or slot are skipped
    (op_kernel/store_kv_block.h:115).

    Args:
        key_in, key_cache_in: int8, float16 or bfloat16. The cache must be contiguous, because the
            operator would write to a contiguous copy (store_kv_block_def.cpp:31).
        group_len, group_key_idx, group_key_cache_idx: as ``store_kv_block_metadata`` writes them. A
            run is at most as long as a block, the size of the kernel's buffer.
    """
    op = "store_kv_block"
    for name, tensor in (("key_in", key_in), ("key_cache_in", key_cache_in)):
        check_dtype(op, name, tensor, _STORED)
        check_rank(op, name, tensor, *_RANKS)
    check(
        key_in.dtype == key_cache_in.dtype,
        op,
        "key_in",
        f"dtype {key_in.dtype} must equal the cache's {key_cache_in.dtype}",
    )
    check(
        key_cache_in.is_contiguous(),
        op,
        "key_cache_in",
        f"strides {key_cache_in.stride()} must be contiguous",
    )
    size = key_in[0].numel()
    check(
        key_cache_in[0, 0].numel() == size,
        op,
        "key_cache_in",
        f"shape {tuple(key_cache_in.shape)} must have rows of {size} elements",
    )
    check(
        block_size * size <= _ELEMENTS_AT_MOST,
        op,
        "block_size",
        f"{block_size} rows of {size} elements exceed {_ELEMENTS_AT_MOST}",
    )
    for name, group in (
        ("group_len", group_len),
        ("group_key_idx", group_key_idx),
        ("group_key_cache_idx", group_key_cache_idx),
    ):
        check_dtype(op, name, group, (torch.int32,))
        check(
            group.shape == group_len.shape,
            op,
            name,
            f"shape {tuple(group.shape)} must be group_len's",
        )
    rows, cache = key_in.reshape(-1, size), key_cache_in.view(-1, size)
    for length, first, slot in zip(
        group_len.tolist(), group_key_idx.tolist(), group_key_cache_idx.tolist(), strict=True
    ):
        if length <= 0 or first < 0 or slot < 0:
            continue
        check(
            length <= block_size,
            op,
            "group_len",
            f"a run of {length} rows is longer than a block of {block_size}",
        )
        check(
            first + length <= len(rows),
            op,
            "group_key_idx",
            f"a run of {length} rows from {first} exceeds the {len(rows)} rows",
        )
        check(
            slot + length <= len(cache),
            op,
            "group_key_cache_idx",
            f"a run of {length} rows to {slot} exceeds the {len(cache)} slots",
        )
        cache[slot : slot + length] = rows[first : first + length]
