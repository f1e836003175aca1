"""References in plain torch for the Triton kernels of GatedDeltaNet and gated attention.

See references.py. They prepare the inputs of the chunk kernels in gated_delta_rule.py. A is the
strictly lower part of beta k k^T exp(g_i - g_j). The inverse of I + A gives w and u, and these
apply a whole chunk to a state. The files are below ops/triton/ of vllm_ascend 0.23.0.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn import functional

from ascend_npu_emulator.ops.checks import check, unsupported
from ascend_npu_emulator.ops.rotary import rotate
from ascend_npu_emulator.ops.triton.kernels import Arguments
from ascend_npu_emulator.ops.triton.references import refers_to

_FLA = "vllm_ascend.ops.triton.fla"
_DIAGONAL = 16  # size of the diagonal blocks that are inverted first


def _chunks(arguments: Arguments, size: int) -> Iterator[slice]:
    """Yield the tokens of every chunk of every sequence."""
    for first, last in pairwise(arguments["cu_seqlens"].tolist()):
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))


def _one_batch(kernel: str, arguments: Arguments) -> None:
    if arguments["cu_seqlens"] is None:
        raise unsupported(kernel, "cu_seqlens", None)


@refers_to(f"{_FLA}.cumsum.chunk_local_cumsum_scalar_kernel")
def chunk_local_cumsum(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Sum s [1, tokens, heads] from the start of each chunk, in float32. (fla/cumsum.py:23)"""
    kernel = "chunk_local_cumsum_scalar_kernel"
    _one_batch(kernel, arguments)
    for option in ("REVERSE", "HEAD_FIRST", "HAS_SCALE"):
        if arguments[option]:
            raise unsupported(kernel, option, True)
    source, target = arguments["s"], arguments["o"]
    for chunk in _chunks(arguments, int(arguments["CHUNK_SIZE"])):
        target[0, chunk] = source[0, chunk].float().cumsum(0).to(source.dtype).to(target.dtype)


@refers_to(f"{_FLA}.chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd_kernel")
def chunk_scaled_dot_kkt(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write A [1, tokens, heads, 64]: beta_i (k_i . k_j) exp(g_i - g_j) for j < i in a chunk.

    The rest is 0. k is [1, tokens, key heads, K]; beta and g_cumsum are [heads, 1, tokens].
    (fla/chunk_scaled_dot_kkt.py:29)
    """
    _one_batch("chunk_scaled_dot_kkt_fwd_kernel", arguments)
    heads, width, target = int(arguments["H"]), int(arguments["BT"]), arguments["A"]
    for chunk in _chunks(arguments, width):
        keys = (
            arguments["k"][0, chunk]
            .float()
            .transpose(0, 1)
            .repeat_interleave(heads // int(arguments["Hg"]), 0)
        )
        product = keys @ keys.transpose(1, 2)
        if arguments["USE_G"]:
            g = arguments["g_cumsum"][:, 0, chunk].float()
            difference = g.unsqueeze(-1) - g.unsqueeze(-2)
            product = product * torch.where(difference <= 0, difference, -torch.inf).exp()
        product = (product * arguments["beta"][:, 0, chunk].float().unsqueeze(-1)).tril(-1)
        target[0, chunk] = (
            functional.pad(product, (0, width - product.shape[-1])).transpose(0, 1).to(target.dtype)
        )


@refers_to(f"{_FLA}.solve_tril.solve_tril_16x16_kernel")
def invert_diagonal(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write Ad [1, tokens, heads, 16]: the inverse of each 16 x 16 block on the diagonal of I + A.

    (fla/solve_tril.py:20)
    """
    _one_batch("solve_tril_16x16_kernel", arguments)
    source, target = arguments["A"], arguments["Ad"]
    for chunk in _chunks(arguments, int(arguments["BT"])):
        for column, start in enumerate(range(chunk.start, chunk.stop, _DIAGONAL)):
            rows = slice(start, min(start + _DIAGONAL, chunk.stop))
            size = rows.stop - rows.start
            block = (
                source[0, rows, :, column * _DIAGONAL : column * _DIAGONAL + size]
                .float()
                .transpose(0, 1)
                .tril(-1)
            )
            inverse = torch.eye(size, device=block.device).repeat(block.shape[0], 1, 1)
            for row in range(1, size):
                inverse[:, row] -= (block[:, row, :row].unsqueeze(-1) * inverse[:, :row]).sum(1)
            target[0, rows] = (
                functional.pad(inverse, (0, _DIAGONAL - size)).transpose(0, 1).to(target.dtype)
            )


@refers_to(f"{_FLA}.solve_tril.merge_16x16_to_64x64_inverse_kernel")
def merge_inverse(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write Ai [1, tokens, heads, 64]: the inverse of I + A from the inverted diagonal blocks.

    Computed in float32. (fla/solve_tril.py:192)
    """
    _one_batch("merge_16x16_to_64x64_inverse_kernel", arguments)
    width, target = int(arguments["BT"]), arguments["Ai"]
    for chunk in _chunks(arguments, width):
        lower, diagonal = (
            arguments[name][0, chunk].float().transpose(0, 1) for name in ("A", "Ad")
        )
        length = chunk.stop - chunk.start
        inverse = lower.new_zeros(lower.shape[0], length, length)
        for start in range(0, length, _DIAGONAL):
            rows = slice(start, min(start + _DIAGONAL, length))
            own = diagonal[:, rows, : rows.stop - start]
            inverse[:, rows, :start] = -own @ (lower[:, rows, :start] @ inverse[:, :start, :start])
            inverse[:, rows, rows] = own
        target[0, chunk] = (
            functional.pad(inverse, (0, width - length)).transpose(0, 1).to(target.dtype)
        )


@refers_to(f"{_FLA}.wy_fast.recompute_w_u_fwd_kernel")
def recompute_w_u(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write u = A (beta v) and w = A (beta exp(g) k), [1, tokens, heads, V or K].

    Computed in float32. A is Ai of merge_inverse; beta and g are [1, heads, tokens].
    (fla/wy_fast.py:24)
    """
    _one_batch("recompute_w_u_fwd_kernel", arguments)
    heads = int(arguments["H"])
    for chunk in _chunks(arguments, int(arguments["BT"])):
        inverse = arguments["A"][0, chunk].float().transpose(0, 1)[..., : chunk.stop - chunk.start]
        beta, decay = (arguments[name][0, :, chunk].float().unsqueeze(-1) for name in ("beta", "g"))
        keys = (
            arguments["k"][0, chunk]
            .float()
            .transpose(0, 1)
            .repeat_interleave(heads // int(arguments["Hg"]), 0)
        )
        values = arguments["v"][0, chunk].float().transpose(0, 1)
        for name, factor in (("u", values * beta), ("w", keys * beta * decay.exp())):
            target = arguments[name]
            target[0, chunk] = (inverse @ factor).transpose(0, 1).to(target.dtype)


@refers_to(f"{_FLA}.l2norm.l2norm_fwd_kernel2_loop")
def l2norm(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write Y = X / sqrt(sum(X^2) + eps) for each row, computed in float32. (fla/l2norm.py:19)"""
    rows, target = arguments["X"].float(), arguments["Y"]
    target.copy_(
        (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + arguments["eps"])).to(
            target.dtype
        )
    )


@refers_to(f"{_FLA}.utils._clear_ssm_states_kernel")
def clear_ssm_states(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Write zeros to the state of every new sequence. (fla/utils.py:78)"""
    states = arguments["states_ptr"]
    has_state = arguments["has_initial_state_ptr"].bool().view(-1, *[1] * (states.dim() - 1))
    states.copy_(torch.where(has_state, states, 0.0))


@refers_to(f"{_FLA}.fused_qkvzba_split_reshape.fused_qkvzba_split_reshape_cat_kernel")
def split_qkvzba(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Split Qwen3-Next's projections into q, k, v and z, and b and a.

    The projections are grouped by key head: mixed_qkvz is [tokens, key heads * (2 K + 2 V r)] with
    r value heads per key head; mixed_qkv receives all q, then all k, then all v.
    (fla/fused_qkvzba_split_reshape.py:17)
    """
    mixed, gates = arguments["mixed_qkvz"], arguments["mixed_ba"]
    key_heads, heads = int(arguments["NUM_HEADS_QK"]), int(arguments["NUM_HEADS_V"])
    key_size, value_size = int(arguments["HEAD_QK"]), int(arguments["HEAD_V"])
    ratio, tokens = heads // key_heads, mixed.shape[0]
    parts = mixed.view(tokens, key_heads, -1).split(
        [key_size, key_size, ratio * value_size, ratio * value_size], -1
    )
    q, k, v, z = (part.reshape(tokens, -1) for part in parts)
    arguments["mixed_qkv"].copy_(torch.cat((q, k, v), -1))
    arguments["z"].copy_(z.view_as(arguments["z"]))
    for name, part in zip("ba", gates.view(tokens, key_heads, -1).split(ratio, -1), strict=True):
        arguments[name].copy_(part.reshape(tokens, heads))


@refers_to(
    "vllm_ascend.ops.triton.linearnorm.split_qkv_rmsnorm_mrope.split_qkv_rmsnorm_mrope_kernel"
)
def split_qkv_rmsnorm_mrope(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Split rows into q with its gates, k and v; normalise and rotate q and k.

    The first ``rope_dim`` elements are rotated. cos_sin is [3, tokens, rope_dim]: cosines, then
    sines, by the position in time, height and width. The index of a frequency selects one of the
    three positions. Computed in float32. (linearnorm/split_qkv_rmsnorm_mrope.py:29)
    """
    if arguments["has_bias"]:
        raise unsupported("split_qkv_rmsnorm_mrope_kernel", "has_bias", True)
    size, half = int(arguments["head_size"]), int(arguments["half_rope_dim"])
    q_size, kv_size, gate_size = (
        int(arguments[name]) for name in ("q_size", "kv_size", "gate_size")
    )
    rows = arguments["in_qkv_ptr"]
    tokens = rows.shape[0]
    check(
        rows.shape[1] == q_size + gate_size + 2 * kv_size,
        "split_qkv_rmsnorm_mrope_kernel",
        "in_qkv",
        f"{rows.shape[1]} columns",
    )
    q, k, v = rows.split([q_size + gate_size, kv_size, kv_size], -1)
    q = q.reshape(tokens, int(arguments["num_q_heads"]), -1)
    arguments["out_v_ptr"].copy_(v)
    if gate_size:
        arguments["out_gate_ptr"].copy_(q[..., size:].reshape(tokens, gate_size))
    number = torch.arange(half, device=rows.device)
    time, height, width = (int(arguments[f"mrope_section_{axis}"]) for axis in "thw")
    if arguments["is_interleaved"]:
        is_height, is_width = (
            (number % 3 == 1) & (number <= 3 * height),
            (number % 3 == 2) & (number <= 3 * width),
        )
    else:
        is_height = (number >= time) & (number < time + height)
        is_width = (number >= time + height) & (number < time + height + width)
    angles = arguments["cos_sin_ptr"].float()
    cos, sin = (
        torch.where(is_height, part[1], torch.where(is_width, part[2], part[0])).unsqueeze(1)
        for part in angles.split(half, -1)
    )
    for name, part in (("q", q[..., :size]), ("k", k.reshape(tokens, -1, size))):
        exact = part.float()
        scale = 1.0 / torch.sqrt(exact.square().mean(-1, keepdim=True) + arguments["eps"])
        exact = exact * scale * arguments[f"{name}_weight_ptr"].float()
        exact[..., : 2 * half] = rotate(exact[..., : 2 * half], cos, sin, neox=True)
        target = arguments[f"out_{name}_ptr"]
        target.copy_(exact.reshape(tokens, -1).to(target.dtype))
