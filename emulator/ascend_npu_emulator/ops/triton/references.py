"""References in plain torch for the Triton kernels that run for every layer or every step.

They compute the same as the kernels' sources (vllm 0.23.0 and vllm_ascend 0.23.0; each reference
names the file), for all programs of the grid at once. Running the sources, program by program,
would take most of the time of a forward pass.
"""

from collections.abc import Callable
from itertools import pairwise

import torch

from ascend_npu_emulator.ops.checks import check
from ascend_npu_emulator.ops.rotary import rotate
from ascend_npu_emulator.ops.triton.kernels import REFERENCES, Arguments


def refers_to(kernel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the reference of ``kernel`` (module and name)."""

    def put(reference: Callable[..., None]) -> Callable[..., None]:
        REFERENCES[kernel] = reference
        return reference

    return put


@refers_to("vllm_ascend.ops.triton.compute_slot_mapping._compute_slot_mapping_kernel")
@refers_to("vllm.v1.worker.block_table._compute_slot_mapping_kernel")
def slot_mapping(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write the slot of each token, and PAD_ID to the rest of the buffer.

    A slot is the block number times the block size, plus the position in the block. The grid has
    one program per request and one for the padding. With context parallelism a token whose block is
    on another rank gets PAD_ID. (vllm/v1/worker/block_table.py:326; vllm_ascend 0.26,
    ops/triton/compute_slot_mapping.py, where a block of the KV cache may be several blocks of
    `block_size` in the block table)
    """
    op = "_compute_slot_mapping_kernel"
    requests = grid[0] - 1
    slots, table, stride = (
        arguments["slot_mapping_ptr"],
        arguments["block_table_ptr"],
        int(arguments["block_table_stride"]),
    )
    ranks, turn = (
        int(arguments["TOTAL_CP_WORLD_SIZE"]),
        int(arguments["CP_KV_CACHE_INTERLEAVE_SIZE"]),
    )
    size = int(arguments["block_size"])
    whole = int(arguments.get("KV_CACHE_BLOCK_SIZE", size)) if ranks > 1 else size
    starts = arguments["query_start_loc_ptr"][: requests + 1].tolist()
    numbers = table.as_strided(
        (table.untyped_storage().nbytes() // table.element_size() - table.storage_offset(),), (1,)
    )
    for request, (first, last) in enumerate(pairwise(starts)):
        if first >= last:
            continue
        positions = arguments["positions_ptr"][first:last].long()
        block = positions // (whole * ranks)
        place = positions - block * (whole * ranks)
        local = place // (ranks * turn) * turn + place % turn
        where = request * stride + block * (whole // size) + local // size
        check(
            int(where.max()) < numbers.numel(),
            op,
            "positions",
            f"request {request} needs blocks past the end of block_table",
        )
        mine = (place // turn) % ranks == int(arguments["TOTAL_CP_RANK"])
        found = numbers.index_select(0, where).long() * size + local % size
        slots[first:last] = torch.where(mine, found, int(arguments["PAD_ID"])).to(slots.dtype)
    slots[int(arguments["num_tokens"]) : int(arguments["max_num_tokens"])] = int(
        arguments["PAD_ID"]
    )


@refers_to("vllm_ascend.ops.triton.rope._triton_rope")
def rope(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Rotate the first ``rope_dim`` elements of every head of q and k in place.

    (vllm_ascend/ops/triton/rope.py:24)
    """
    tokens, width = int(arguments["num_tokens"]), int(arguments["rope_dim"])
    if arguments["USE_COS_SIN"]:
        chosen = arguments["cos_sin_ptr"].index_select(0, arguments["pos_ptr"][:tokens])
        # The kernel reads sin at the padded half. This is the real half only if rope_dim is a power
        # of two.
        pad = int(arguments["pad_rope_dim"]) // 2
        check(
            pad + width // 2 <= chosen.shape[1],
            "_triton_rope",
            "rope_dim",
            f"{width} must be a power of two: the kernel would misread sin",
        )
        cos, sin = chosen[:, : width // 2], chosen[:, pad : pad + width // 2]
    else:
        cos, sin = (
            arguments["cos_ptr"][:tokens, : width // 2],
            arguments["sin_ptr"][:tokens, : width // 2],
        )
    for name, heads in (("q_ptr", "n_qh"), ("k_ptr", "n_kh")):
        part = arguments[name].view(tokens, int(arguments[heads]), int(arguments["hd"]))[
            ..., :width
        ]
        turned = rotate(
            part,
            cos.float().unsqueeze(1),
            sin.float().unsqueeze(1),
            bool(arguments["IS_NEOX_STYLE"]),
        )
        part.copy_(turned.to(part.dtype))


_SPLIT = "vllm_ascend.ops.triton.linearnorm.split_qkv_tp_rmsnorm_rope"


@refers_to(f"{_SPLIT}._split_qkv_and_compute_local_qk_var_kernel")
def split_qkv(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Copy q, k and v from the rows of ``input``; write the mean squares of q and k.

    (split_qkv_tp_rmsnorm_rope.py:38)
    """
    tokens, q_cols, k_cols = (int(arguments[name]) for name in ("num_tokens", "q_cols", "k_cols"))
    rows = arguments["input_ptr"][:tokens]
    q, k, v = rows.split([q_cols, k_cols, k_cols], dim=-1)
    for name, part in (("q_out_ptr", q), ("k_out_ptr", k), ("v_out_ptr", v)):
        arguments[name][:tokens] = part
    variances = arguments["qk_var_ptr"]
    variances[:tokens, 0] = q.float().square().sum(-1) * arguments["q_inv_size"]
    variances[:tokens, 1] = k.float().square().sum(-1) * arguments["k_inv_size"]


@refers_to(f"{_SPLIT}._apply_global_rmsnorm_kernel")
def normalise_and_rotate(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Apply RMSNorm to q and k over all ranks' columns, then rotate them.

    The first ``rotary_dim`` elements of each head are rotated. Computed in float32 and rounded once
    at the end. (split_qkv_tp_rmsnorm_rope.py:113)
    """
    tokens, half = int(arguments["num_tokens"]), int(arguments["HALF"])
    cos, sin = (
        arguments[name][:tokens, :half].float().unsqueeze(1) for name in ("cos_ptr", "sin_ptr")
    )
    for column, side in enumerate("qk"):
        target = arguments[f"{side}_ptr"]
        heads, width = int(arguments[f"{side}_num_heads"]), int(arguments["head_dim"])
        mean_square = (
            arguments["qk_global_var_ptr"][:tokens, column].float() * arguments["inv_tp_world"]
        )
        scale = 1.0 / torch.sqrt(mean_square + arguments["eps"])
        values = (
            target[:tokens].float() * scale.unsqueeze(1) * arguments[f"{side}_weight_ptr"].float()
        )
        values = values.view(tokens, heads, width)
        values[..., : 2 * half] = rotate(values[..., : 2 * half], cos, sin, neox=True)
        target[:tokens] = values.view(tokens, -1).to(target.dtype)
