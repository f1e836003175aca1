"""References for the package fla_npu. vllm-ascend 0.30 uses its kernels for GatedDeltaNet.

`FUNCTIONS` replaces the module fla_npu.ops.ascendc. Each function validates the arguments like the
original and calls an operator. The references of these operators are here. The original sources are
at github.com/flashserve/flash-linear-attention-npu. From CANN 9.1 on, rows of states
need not be contiguous (fla/ops/ascendc/gdn/*/README.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.recurrent.causal_conv1d import convolve
from ascend_npu_emulator.ops.recurrent.gated_delta_rule import (
    CHUNK,
    chunk_fwd_o,
    chunk_gated_delta_rule_fwd_h,
    recur,
)

_MOST_TOKENS = 8  # limit of the recurrent kernel, per sequence
_PREFILL, _UPDATE = 0, 1
_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}
_NO_PAD = -(1 << 31)  # no row has this number
_NO_ROW = -1
_HALVES = (torch.float16, torch.bfloat16)


def causal_conv1d(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    activation: int,
    pad_slot_id: int,
    null_block_id: int,
    run_mode: int,
) -> None:
    """Convolve as npu_causal_conv1d_custom does; the kernels are alike (causal_conv1d.h).

    A sequence with the row `null_block_id` is skipped too.

    Args:
        conv_states: [rows, state_len, channels]; the rows may have gaps between them.
    """
    op = "causal_conv1d"
    check_dtype(op, "x", x, _HALVES)
    _check_rows(op, "conv_states", conv_states, 3)
    rows = cache_indices.masked_fill(cache_indices == null_block_id, _NO_ROW)
    rows = rows.masked_fill(cache_indices == pad_slot_id, _NO_ROW)
    convolve(
        op, output, x, weight, conv_states, bias, query_start_loc, rows, has_initial_state, num_accepted_tokens, activation,
        _NO_ROW, run_mode,
    )  # fmt: skip


def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor,
    scale: float,
    actual_seq_lengths: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the rule as npu_recurrent_gated_delta_rule does; rows of `state` may have gaps."""
    op = "recurrent_gated_delta_rule"
    _check_rows(op, "state", state, 4)
    return recur(
        op, _MOST_TOKENS, query, key, value, state, beta=beta, scale=scale, actual_seq_lengths=actual_seq_lengths,
        ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens, g=g, gk=gk,
    )  # fmt: skip


def chunk_gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: Sequence[int],
    chunk_indices: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule chunk by chunk; return o [1, tokens, value heads, V] and the last states.

    With the matrix A of a chunk, strictly lower, beta_i (k_i . k_j) exp(g_i - g_j), where g is
    summed from the chunk's start: w = (I + A)^-1 (beta exp(g) k), u = (I + A)^-1 (beta v).
    chunk_gated_delta_rule_fwd_h and chunk_fwd_o follow. The inverse, w and u are rounded to
    bfloat16.

    Args:
        q, k: [1, key heads, tokens, 128], bfloat16.
        v: [1, value heads, tokens, 128], bfloat16.
        g, beta: [1, tokens, value heads]; g is float32.
        initial_state: [sequences, value heads, K, V], float32 or bfloat16. The last states have
            this shape and dtype.
        cu_seqlens: bounds of the sequences.
        chunk_indices: see chunk_fwd_o.
    """
    op = "chunk_gated_delta_rule_fwd"
    check_dtype(op, "g", g, (torch.float32,))
    heads = v.shape[1]
    keys, values = k[0].float().repeat_interleave(heads // k.shape[1], 0), v[0].float()
    summed, w, u = (
        torch.empty_like(g[0].t()),
        *(torch.empty_like(v, dtype=torch.bfloat16) for _ in "wu"),
    )
    for sequence, number in zip(chunk_indices[::2], chunk_indices[1::2], strict=True):
        start = cu_seqlens[sequence] + number * CHUNK
        chunk = slice(start, min(start + CHUNK, cu_seqlens[sequence + 1]))
        decay, rate = g[0, chunk].t().cumsum(-1), beta[0, chunk].t().float().unsqueeze(-1)
        between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp(max=0.0).exp()
        lower = (rate * (keys[:, chunk] @ keys[:, chunk].transpose(1, 2)) * between).tril(-1)
        identity = torch.eye(lower.shape[-1], device=lower.device).expand_as(lower)
        inverse = (
            torch.linalg.solve_triangular(
                identity + lower, identity, upper=False, unitriangular=True
            )
            .bfloat16()
            .float()
        )
        summed[:, chunk] = decay
        w[0, :, chunk] = (inverse @ (rate * decay.exp().unsqueeze(-1) * keys[:, chunk])).bfloat16()
        u[0, :, chunk] = (inverse @ (rate * values[:, chunk])).bfloat16()
    gates = summed.unsqueeze(0)
    h, v_new, last = chunk_gated_delta_rule_fwd_h(
        k,
        w,
        u,
        gates,
        initial_state=initial_state,
        output_final_state=True,
        chunk_size=CHUNK,
        cu_seqlens=cu_seqlens,
    )
    out = chunk_fwd_o(
        q,
        k,
        v_new,
        h,
        scale,
        g=gates,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        chunk_size=CHUNK,
    )
    return out.transpose(1, 2).contiguous(), last


def _check_rows(op: str, name: str, states: torch.Tensor, rank: int) -> None:
    check_rank(op, name, states, rank)
    check(
        states[:1].is_contiguous(),
        op,
        name,
        f"strides {states.stride()} must have gaps between rows only",
    )


# ---- functions that vllm-ascend calls ----


def _conv1d(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    rows: torch.Tensor | None,
    activation: str | None,
    **metadata: torch.Tensor | None,
) -> None:
    """Check the arguments that both functions check, and options without a reference."""
    check(
        activation in _ACTIVATIONS,
        op,
        "activation",
        f"{activation!r} must be None, 'silu' or 'swish'",
    )
    if x.dim() != 2:
        raise unsupported(op, "x", x)
    for name, given in (
        ("conv_states", states),
        ("query_start_loc", query_start_loc),
        ("cache_indices", rows),
    ):
        if given is None:
            raise unsupported(op, name, None)
    assert query_start_loc is not None and rows is not None
    for name, tensor in {
        "query_start_loc": query_start_loc,
        "cache_indices": rows,
        **metadata,
    }.items():
        if tensor is not None:
            check_rank(op, name, tensor, 1)
            check_dtype(
                op,
                name,
                tensor,
                (torch.int32, torch.bool) if name == "has_initial_state" else (torch.int32,),
            )
            count = query_start_loc.shape[0] - (name != "query_start_loc")
            check(
                tensor.shape[0] == count,
                op,
                name,
                f"{tensor.shape[0]} entries must be {count}, as the sequences",
            )


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = 0,
    **others: Any,
) -> torch.Tensor:
    """Convolve prompts, and write the last inputs of each to `conv_states`."""
    op = "causal_conv1d_fn"
    refuse_options(op, **others)
    _conv1d(
        op,
        x,
        weight,
        conv_states,
        query_start_loc,
        cache_indices,
        activation,
        has_initial_state=has_initial_state,
    )
    null = _NO_PAD if null_block_id is None else null_block_id
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops.fla_npu.causal_conv1d(
        output, x, weight, conv_states, bias, query_start_loc, cache_indices, has_initial_state, None, _ACTIVATIONS[activation],
        pad_slot_id, null, _PREFILL,
    )  # fmt: skip
    return output


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    *,
    out: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Convolve decodes and advance `conv_state`. Write and return `out`, by default `x`."""
    op = "causal_conv1d_update"
    refuse_options(op, **others)
    _conv1d(
        op,
        x,
        weight,
        conv_state,
        query_start_loc,
        conv_state_indices,
        activation,
        num_accepted_tokens=num_accepted_tokens,
    )
    check(
        max_query_len >= 0,
        op,
        "max_query_len",
        f"{max_query_len} must not be negative with query_start_loc",
    )
    null = _NO_PAD if null_block_id is None else null_block_id
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops.fla_npu.causal_conv1d(
        made, x, weight, conv_state, bias, query_start_loc, conv_state_indices, None, num_accepted_tokens, _ACTIVATIONS[activation],
        _NO_PAD, null, _UPDATE,
    )  # fmt: skip
    target = x if out is None else out
    check(
        target.shape == x.shape and target.dtype == x.dtype,
        op,
        "out",
        f"must have x's shape {tuple(x.shape)} and dtype {x.dtype}",
    )
    return target.copy_(made)


def _recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor,
    scale: float = 1.0,
    actual_seq_lengths: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply the rule to decodes, and advance `state`."""
    out: torch.Tensor = torch.ops.fla_npu.recurrent_gated_delta_rule(
        query, key, value, state, beta=beta, scale=scale, actual_seq_lengths=actual_seq_lengths,
        ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens, g=g, gk=gk,
    )  # fmt: skip
    return out


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
    cu_seqlens: Sequence[int] | None = None,
    chunk_indices: Sequence[int] | None = None,
    scale: float | None = None,
    layout: str = "BNSD",
    disable_recompute: bool = True,
    **others: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Apply the rule to prompts. Return ten results: o, the states, and None otherwise.

    The real function also returns tensors for a backward pass.
    """
    op = "chunk_gated_delta_rule_fwd"
    refuse_options(op, **others)
    wanted = (
        ("layout", layout, "BNSD"),
        ("chunk_size", chunk_size, CHUNK),
        ("output_final_state", output_final_state, True),
    )
    for name, value, taken in wanted:
        if value != taken:
            raise unsupported(op, name, value)
    if initial_state is None or cu_seqlens is None or chunk_indices is None:
        raise unsupported(op, "initial_state, cu_seqlens or chunk_indices", None)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(op, name, tensor, 4)
    batch, tokens, heads = v.shape[0], v.shape[2], v.shape[1]
    check(q.shape == k.shape, op, "k", f"shape {tuple(k.shape)} must equal q's {tuple(q.shape)}")
    check(
        batch == 1 and q.shape[0] == 1 and q.shape[2] == tokens,
        op,
        "v",
        f"shape {tuple(v.shape)} does not fit q's {tuple(q.shape)}",
    )
    check(
        heads % q.shape[1] == 0,
        op,
        "v",
        f"{heads} heads must be a multiple of the {q.shape[1]} key heads",
    )
    for name, tensor in (("g", g), ("beta", beta)):
        check(
            tensor.shape == (1, tokens, heads),
            op,
            name,
            f"shape {tuple(tensor.shape)} must be [1, {tokens}, {heads}]",
        )
    bounds = [int(bound) for bound in cu_seqlens]
    fits = len(bounds) > 1 and bounds == sorted(bounds) and (bounds[0], bounds[-1]) == (0, tokens)
    check(fits, op, "cu_seqlens", f"{bounds} must rise from 0 to {tokens}")
    lengths = [last - first for first, last in zip(bounds, bounds[1:], strict=False)]
    expected = [
        part
        for at, length in enumerate(lengths)
        for number in range(-(-length // CHUNK))
        for part in (at, number)
    ]
    check(
        list(chunk_indices) == expected,
        op,
        "chunk_indices",
        f"{list(chunk_indices)} must be {expected}",
    )
    if min(lengths) == 0:
        raise unsupported(op, "cu_seqlens", bounds)
    out, last = torch.ops.fla_npu.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        bounds,
        expected,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return out, last, *[None] * 8


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "recurrent_gated_delta_rule": _recurrent,
    "chunk_gated_delta_rule_fwd": _chunked,
}
