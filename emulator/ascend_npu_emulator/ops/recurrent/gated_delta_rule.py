"""References for vllm-ascend's GatedDeltaNet kernels: gates, rule by token, rule by chunk.

The rule, for one value head with state S [K, V], decay exp(g), learning rate beta:
    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = scale * q^T S
The sources of the kernels are in vllm-ascend 0.23.0's wheel, _cann_ops_custom/.../ascendc/.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)

CHUNK = 64
_HEAD_SIZE = 128  # tile size of the chunk kernels; they skip smaller tiles
_MOST_TOKENS = 16  # limit of the recurrent kernel, per sequence


def npu_fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g = -exp(A_log) softplus(a + dt_bias), float32, and sigmoid(b) in b's dtype.

    Both are [1, tokens, heads]. softplus(x) is log(1 + exp(beta x)) / beta, or x where beta x
    exceeds ``threshold``. (fused_gdn_gating.h)
    """
    op = "npu_fused_gdn_gating"
    check_rank(op, "a", a, 2)
    check_dtype(op, "a", a, FLOATS)
    check(
        b.shape == a.shape and b.dtype == a.dtype,
        op,
        "b",
        f"must have a's shape {tuple(a.shape)} and dtype {a.dtype}",
    )
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check(
            tensor.shape == a.shape[1:],
            op,
            name,
            f"shape {tuple(tensor.shape)} must be one number for each of {a.shape[1]} heads",
        )
    check(
        A_log.dtype == dt_bias.dtype,
        op,
        "dt_bias",
        f"dtype {dt_bias.dtype} must equal A_log's {A_log.dtype}",
    )
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return g.unsqueeze(0), torch.sigmoid(b.float()).to(b.dtype).unsqueeze(0)


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply the rule token by token; return [tokens, value heads, V], bfloat16.

    The state after each token is written to ``state``. All is computed in float32; only the stored
    state has the dtype of ``state``. (recurrent_gated_delta_rule.h)

    Args:
        query, key: [tokens, key heads, K], bfloat16; value head h uses key head h // (value heads /
            key heads).
        value: [tokens, value heads, V], bfloat16.
        state: [rows, value heads, V, K], float32 or bfloat16, written in place.
        beta: [tokens, value heads], bfloat16.
        g: the same in float32, the decay in log space.
        actual_seq_lengths: int32: the first token of the first sequence, then the number of tokens
            of each sequence, at most 16.
        ssm_state_indices: int32 [tokens], the row of each token. A sequence begins with the state
            in the first token's row. Each token writes the state to the token's row.
        num_accepted_tokens: int32 [sequences]: a sequence begins with the row of this token
            instead, counted from 1.
    """
    op = "npu_recurrent_gated_delta_rule"
    check_rank(op, "state", state, 4)
    check(
        state.is_contiguous(),
        op,
        "state",
        f"strides {state.stride()} must be contiguous: it is written in place",
    )
    return recur(
        op, _MOST_TOKENS, query, key, value, state, beta=beta, scale=scale, actual_seq_lengths=actual_seq_lengths,
        ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens, g=g, gk=gk,
    )  # fmt: skip


def recur(
    op: str,
    most_tokens: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None,
    scale: float | None,
    actual_seq_lengths: torch.Tensor | None,
    ssm_state_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
) -> torch.Tensor:
    """Compute npu_recurrent_gated_delta_rule for the operator `op`.

    A sequence has at most `most_tokens`, and the state may have any strides.
    """
    refuse_options(op, gk=gk)
    for name, tensor, dtypes in (
        ("query", query, (torch.bfloat16,)),
        ("key", key, (torch.bfloat16,)),
        ("value", value, (torch.bfloat16,)),
        ("state", state, (torch.float32, torch.bfloat16)),
        ("beta", beta, (torch.bfloat16,)),
        ("g", g, (torch.float32,)),
        ("actual_seq_lengths", actual_seq_lengths, (torch.int32,)),
        ("ssm_state_indices", ssm_state_indices, (torch.int32,)),
    ):
        check(tensor is not None, op, name, "must be given")
        assert tensor is not None
        check_dtype(op, name, tensor, dtypes)
    assert (
        beta is not None
        and g is not None
        and actual_seq_lengths is not None
        and ssm_state_indices is not None
    )
    check(scale is not None, op, "scale", "must be given")
    assert scale is not None
    check_rank(op, "state", state, 4)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_rank(op, name, tensor, 3)
    (tokens, key_heads, key_size), (_, heads, value_size) = query.shape, value.shape
    check(
        key.shape == query.shape,
        op,
        "key",
        f"shape {tuple(key.shape)} must equal query's {tuple(query.shape)}",
    )
    check(
        value.shape[0] == tokens, op, "value", f"{value.shape[0]} tokens must be query's {tokens}"
    )
    check(
        heads % key_heads == 0,
        op,
        "value",
        f"{heads} heads must be a multiple of the {key_heads} key heads",
    )
    check(
        state.shape[1:] == (heads, value_size, key_size),
        op,
        "state",
        f"shape {tuple(state.shape)} must be [rows, {heads}, {value_size}, {key_size}]",
    )
    for name, tensor in (("beta", beta), ("g", g)):
        check(
            tensor.shape == (tokens, heads),
            op,
            name,
            f"shape {tuple(tensor.shape)} must be [{tokens}, {heads}]",
        )
    check(
        ssm_state_indices.dim() == 1,
        op,
        "ssm_state_indices",
        f"shape {tuple(ssm_state_indices.shape)} must have one dimension",
    )
    out = torch.empty_like(value)
    sequences = actual_seq_lengths.shape[0] - 1
    if sequences == 0 or tokens == 0:
        return out

    def advance(before: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and state after one token of each sequence.

        ``before`` is the state of the sequences, float32 [sequences, heads, V, K].
        """
        k, q = (
            part[token].float().repeat_interleave(heads // key_heads, 1).unsqueeze(2)
            for part in (key, query)
        )
        forgotten = before * g[token].exp()[..., None, None]
        delta = (value[token].float() - (forgotten * k).sum(-1)) * beta[token].float().unsqueeze(-1)
        after = forgotten + delta.unsqueeze(-1) * k
        return (after * (q * scale)).sum(-1).to(out.dtype), after

    if sequences == tokens and num_accepted_tokens is None:
        # Decodes, then padding, without reads on the host, so that a graph can capture them.
        token = torch.arange(tokens, device=query.device)
        active = token < actual_seq_lengths.sum()
        stored = state[ssm_state_indices.long()]
        attended, after = advance(stored.float(), token)
        out.copy_(torch.where(active.view(-1, 1, 1), attended, out))
        source = torch.where(
            active, token, active.int().argmax()
        )  # padding repeats the first token's write
        state[ssm_state_indices[source].long()] = torch.where(
            active.view(-1, 1, 1, 1), after.to(state.dtype), stored
        )[source]
        return out
    first, *lengths = actual_seq_lengths.tolist()
    firsts = [first + sum(lengths[:index]) for index in range(sequences)]
    check(
        max(lengths) <= most_tokens,
        op,
        "actual_seq_lengths",
        f"{max(lengths)} tokens of one sequence exceed {most_tokens}",
    )
    rows, accepted = ssm_state_indices.tolist(), [1] * sequences
    if num_accepted_tokens is not None:
        check_dtype(op, "num_accepted_tokens", num_accepted_tokens, (torch.int32,))
        accepted = num_accepted_tokens.tolist()
        # The kernel stops here without an error.
        fits = all(
            1 <= count <= length for count, length in zip(accepted, lengths, strict=False) if length
        )
        check(fits, op, "num_accepted_tokens", f"{accepted} must be from 1 to {lengths}")
    begins = [
        rows[min(firsts[index] + accepted[index] - 1, tokens - 1)] for index in range(sequences)
    ]
    running = state[torch.tensor(begins, device=state.device)].float()
    for step in range(max(lengths)):
        chosen = [index for index in range(sequences) if lengths[index] > step]
        places = [firsts[index] + step for index in chosen]
        token, which = (torch.tensor(each, device=state.device) for each in (places, chosen))
        out[token], running[which] = advance(running[which], token)
        state[torch.tensor([rows[place] for place in places], device=state.device)] = running[
            which
        ].to(state.dtype)
    return out


def _sequences(op: str, cu_seqlens: Sequence[int] | None, tokens: int) -> list[tuple[int, int]]:
    """Return the tokens [first, end) of every sequence that has tokens."""
    bounds = [0, tokens] if cu_seqlens is None else list(cu_seqlens)
    fits = bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] <= tokens
    check(fits, op, "cu_seqlens", f"{bounds} must rise from 0 to at most {tokens}")
    return [(first, last) for first, last in pairwise(bounds) if last > first]


def _check_chunk_inputs(
    op: str, chunk_size: int | None, g: torch.Tensor | None, **heads_first: torch.Tensor
) -> None:
    check(chunk_size == CHUNK, op, "chunk_size", f"{chunk_size} must be {CHUNK}")
    if g is None:
        raise unsupported(op, "g", g)
    check_dtype(op, "g", g, (torch.float32,))
    for name, tensor in heads_first.items():
        check_rank(op, name, tensor, 4)
        check_dtype(op, name, tensor, (torch.bfloat16,))
        check(
            tensor.shape[0] == 1,
            op,
            name,
            "the first dimension must be 1: cu_seqlens divides sequences",
        )
        check(
            tensor.shape[-1] == _HEAD_SIZE,
            op,
            name,
            f"head size {tensor.shape[-1]} must be {_HEAD_SIZE}",
        )


def chunk_gated_delta_rule_fwd_h(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    gk: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    chunk_size: int | None = None,
    save_new_value: bool | None = True,
    cu_seqlens: Sequence[int] | None = None,
    chunk_indices: Sequence[int] | None = None,
    use_exp2: bool | None = False,
    transpose_state_layout: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the state before each chunk of 64 tokens, each token's v_new, and the last state.

    For a chunk with state S: v_new = u - w S, and then S <- exp(g_last) S + k^T (exp(g_last - g)
    v_new). States between chunks, v_new and decayed v_new are bfloat16; sums are float32.
    (gdn_fwd_h_kernel.hpp, block_epilogue_gdn_fwdh_*.hpp)

    Args:
        k: [1, key heads, tokens, 128]; w and u: [1, value heads, tokens, 128], all bfloat16.
        g: [1, value heads, tokens], float32, summed from the start of each chunk.
        initial_state: [sequences with tokens, value heads, 128, 128], float32 or bfloat16.
        cu_seqlens: bounds of the sequences.

    Returns:
        h [1, value heads, chunks of all sequences, 128, 128], bfloat16, v_new like u, and
            final_state like initial_state.
    """
    op = "chunk_gated_delta_rule_fwd_h"
    refuse_options(op, gk=gk, use_exp2=use_exp2, transpose_state_layout=transpose_state_layout)
    _check_chunk_inputs(op, chunk_size, g, k=k, w=w, u=u)
    assert g is not None
    if initial_state is None:
        raise unsupported(op, "initial_state", None)
    for option, value in (
        ("output_final_state", output_final_state),
        ("save_new_value", save_new_value),
    ):
        if not value:
            raise unsupported(op, option, value)
    check_dtype(op, "initial_state", initial_state, (torch.float32, torch.bfloat16))
    sequences = _sequences(op, cu_seqlens, k.shape[2])
    heads = u.shape[1]
    check(
        initial_state.shape == (len(sequences), heads, _HEAD_SIZE, _HEAD_SIZE),
        op,
        "initial_state",
        (
            f"shape {tuple(initial_state.shape)} must be [{len(sequences)}, {heads}, {_HEAD_SIZE}, "
            f"{_HEAD_SIZE}]"
        ),
    )
    keys = k[0].repeat_interleave(heads // k.shape[1], 0)
    states, new_values, final_state = [], torch.empty_like(u), torch.empty_like(initial_state)
    for sequence, (first, last) in enumerate(sequences):
        state = initial_state[sequence].bfloat16()
        for start in range(first, last, CHUNK):
            chunk = slice(start, min(start + CHUNK, last))
            states.append(state)
            fresh = u[0, :, chunk].float() - w[0, :, chunk].float() @ state.float()
            new_values[0, :, chunk] = fresh.bfloat16()
            decay = g[0, :, chunk]
            left = (fresh * (decay[:, -1:] - decay).exp().unsqueeze(-1)).bfloat16()
            after = (
                state.float() * decay[:, -1].exp()[:, None, None]
                + keys[:, chunk].float().transpose(1, 2) @ left.float()
            )
            state = after.bfloat16()
        final_state[sequence] = after.to(final_state.dtype)
    h = torch.stack(states, 1) if states else k.new_empty(heads, 0, _HEAD_SIZE, _HEAD_SIZE)
    return h.unsqueeze(0), new_values, final_state


def chunk_fwd_o(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    scale: float,
    *,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    chunk_indices: Sequence[int] | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = False,
) -> torch.Tensor:
    """Return o [1, value heads, tokens, 128], bfloat16, computed in chunks of 64 tokens.

    o = scale (exp(g) q h + (q k^T exp(g_i - g_j), j <= i) v). The masked product of q and k is
    rounded to bfloat16; everything else is float32 until the end. (gdn_fwd_o_kernel.hpp and
    block_epilogue_gdn_fwdo_*.hpp)

    Args:
        q, k, h, g, cu_seqlens: as in chunk_gated_delta_rule_fwd_h.
        v: the v_new that it returns.
        chunk_indices: for every chunk of h the number of the sequence, and the number of the chunk
            in that sequence.
    """
    op = "chunk_fwd_o"
    refuse_options(op, g_gamma=g_gamma, transpose_state_layout=transpose_state_layout)
    _check_chunk_inputs(op, chunk_size, g, q=q, k=k, v=v)
    assert g is not None
    if cu_seqlens is None or chunk_indices is None:
        raise unsupported(op, "cu_seqlens", cu_seqlens)
    heads, out = v.shape[1], torch.empty_like(v)
    fitting = (1, heads, len(chunk_indices) // 2, _HEAD_SIZE, _HEAD_SIZE)
    check(h.shape == fitting, op, "h", f"shape {tuple(h.shape)} must be {fitting}")
    queries, keys = (
        part[0].repeat_interleave(heads // part.shape[1], 0).float() for part in (q, k)
    )
    for index, (sequence, number) in enumerate(
        zip(chunk_indices[::2], chunk_indices[1::2], strict=True)
    ):
        start = cu_seqlens[sequence] + number * CHUNK
        chunk = slice(start, min(start + CHUNK, cu_seqlens[sequence + 1]))
        decay = g[0, :, chunk]
        reach = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp(max=0.0).exp().tril()
        attention = (queries[:, chunk] @ keys[:, chunk].transpose(1, 2) * reach).bfloat16()
        earlier = (queries[:, chunk] @ h[0, :, index].float()) * decay.exp().unsqueeze(-1)
        out[0, :, chunk] = ((earlier + attention.float() @ v[0, :, chunk].float()) * scale).to(
            out.dtype
        )
    return out
