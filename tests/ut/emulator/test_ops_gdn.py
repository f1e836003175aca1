"""The kernels of GatedDeltaNet against the plain recurrence and the plain convolution, token by token in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import vllm_ascend_hsx.emulator.ops.hooks  # noqa: F401 - registers the references for Triton kernels
from vllm_ascend_hsx.emulator.ops import gated_delta_rule as rule
from vllm_ascend_hsx.emulator.ops.causal_conv1d import npu_causal_conv1d_custom
from vllm_ascend_hsx.emulator.ops.triton_kernels import REFERENCES

KEY_HEADS, HEADS, SIZE = 2, 4, 128
SCALE = SIZE**-0.5
FLA = "vllm_ascend.ops.triton.fla"
PAD = -1


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """The largest error is that fraction of the largest element."""
    error = ((actual.double() - exact).abs().max() / exact.abs().max()).item()
    assert error < tolerance, f"{error:.2e}"


# ---- the convolution ----


def convolved(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """One sequence x [tokens, channels] behind the inputs `before` [width - 1, channels], in float64."""
    inputs, out = torch.cat((before, x)).double(), torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float64) if bias is None else bias.double()
        for tap in range(weight.shape[0]):
            total = total + inputs[token + tap] * weight[tap].double()
        out[token] = total / (1 + (-total).exp()) if silu else total
    return out


def conv(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, **options: Any) -> torch.Tensor:
    given = {
        "bias_opt": None, "query_start_loc_opt": None, "cache_indices_opt": None, "initial_state_mode_opt": None,
        "num_accepted_tokens_opt": None, "activation_mode": 1, "pad_slot_id": PAD, "run_mode": 0, **options,
    }
    output = torch.full_like(x, 77.0)
    assert npu_causal_conv1d_custom(output, x, weight, state, **given) is output
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_a_prefill_convolves_each_sequence_behind_its_state(width: int, silu: bool, dtype: torch.dtype) -> None:
    # A new sequence, one with a state, one shorter than the taps, one without tokens, one of padding; a bias; a longer state.
    bounds, rows = [0, 7, 12, 13, 13, 16], [4, 2, 0, 3, PAD]
    x, weight, bias = random(16, 32, dtype=dtype), random(width, 32, seed=1, dtype=dtype), random(32, seed=2, dtype=dtype)
    state = random(5, width + 1, 32, seed=3, dtype=dtype)
    before, has_state = state.clone(), [False, True, True, True, True]
    out = conv(
        x, weight, state, bias_opt=bias, query_start_loc_opt=torch.tensor(bounds, dtype=torch.int32),
        cache_indices_opt=torch.tensor(rows, dtype=torch.int32), initial_state_mode_opt=torch.tensor(has_state), activation_mode=int(silu),
    )
    for sequence, (first, last) in enumerate(pairwise(bounds[:-1])):
        begin = before[rows[sequence], : width - 1] * has_state[sequence]
        exact = convolved(x[first:last], weight, begin, bias, silu)
        torch.testing.assert_close(out[first:last].double(), exact, atol=2e-6, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5)
        if last > first:
            before[rows[sequence], : width - 1] = torch.cat((begin, x[first:last]))[-(width - 1) :]
    assert (out[13:] == 77).all()
    assert torch.equal(state, before)


def test_token_by_token_is_the_same_as_at_once() -> None:
    x, weight, state = random(6, 16), random(4, 16, seed=1), torch.zeros(3, 3, 16)
    whole = conv(x, weight, state.clone(), query_start_loc_opt=torch.tensor([0, 6]), cache_indices_opt=torch.tensor([2]))
    for token in range(6):
        # Beside it a sequence of padding; the table of rows has further columns, of which the first counts.
        pair = torch.stack((x[token], x[0]))
        table = torch.tensor([[2, 1], [PAD, PAD]], dtype=torch.int32)
        out = conv(pair, weight, state, query_start_loc_opt=torch.tensor([0, 1, 1]), cache_indices_opt=table, run_mode=1)
        torch.testing.assert_close(out[0], whole[token])
        assert (out[1] == 77).all()
    assert torch.equal(state[2], x[-3:])
    assert (state[:2] == 0).all()


def test_an_update_takes_several_tokens_of_a_sequence() -> None:
    x, weight, state = random(5, 16), random(4, 16, seed=1), random(2, 3, 16, seed=2)
    exact = torch.cat((convolved(x[:3], weight, state[1], None, False), convolved(x[3:], weight, state[0], None, False)))
    bounds, rows = torch.tensor([0, 3, 5]), torch.tensor([1, 0])
    out = conv(x, weight, state, query_start_loc_opt=bounds, cache_indices_opt=rows, activation_mode=0, run_mode=1)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    assert torch.equal(state[1], x[:3])


def test_drafts_that_were_rejected_leave_no_trace_in_the_convolution() -> None:
    """Three tokens at a time, of which one, three and two are accepted: what comes next is behind the accepted ones alone."""
    x, weight, state = random(20, 16), random(4, 16, seed=1), torch.zeros(2, 5, 16)
    state[1, :3] = x[:3]
    bounds, rows, real, accepted = torch.tensor([0, 3]), torch.tensor([1]), 3, 1
    for next_accepted in (1, 3, 2, 1):
        step = torch.cat((x[real : real + next_accepted], random(3 - next_accepted, 16, seed=9)))
        out = conv(
            step, weight, state, query_start_loc_opt=bounds, cache_indices_opt=rows, activation_mode=0, run_mode=1,
            num_accepted_tokens_opt=torch.tensor([accepted]),
        )
        exact = convolved(step, weight, x[real - 3 : real], None, False)
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
        real, accepted = real + next_accepted, next_accepted


@pytest.mark.parametrize(
    ("changed", "error", "names"),
    [
        ({"num_accepted_tokens_opt": torch.ones(1)}, ValueError, "num_accepted_tokens_opt"),
        ({"weight": torch.ones(5, 16)}, ValueError, "width 5"),
        ({"weight": torch.ones(4, 24), "x": torch.ones(2, 24)}, ValueError, "24 channels"),
        ({"state": torch.ones(2, 16, 3).transpose(1, 2)}, ValueError, "contiguous"),
        ({"state": torch.ones(2, 2, 16)}, ValueError, "places"),
        ({"query_start_loc_opt": None}, ValueError, "query_start_loc_opt"),
        ({"run_mode": 1, "initial_state_mode_opt": torch.ones(1)}, ValueError, "initial_state_mode_opt"),
    ],
)
def test_the_convolution_refuses_what_the_kernel_does(changed: dict[str, Any], error: type[Exception], names: str) -> None:
    given = {"x": torch.ones(2, 16), "weight": torch.ones(4, 16), "state": torch.ones(2, 3, 16)}
    given["query_start_loc_opt"] = torch.tensor([0, 2])
    with pytest.raises(error, match=f"npu_causal_conv1d_custom.*{names}"):
        conv(**{**given, **changed})


# ---- the gates ----


def test_the_gates_follow_their_definition() -> None:
    a_log, dt_bias, a, b = random(HEADS, seed=1), random(HEADS, seed=2), 12 * random(9, HEADS, seed=3), random(9, HEADS, seed=4)
    a, b = a.bfloat16(), b.bfloat16()
    g, beta = rule.npu_fused_gdn_gating(a_log, a, b, dt_bias)
    assert (g.shape, g.dtype, beta.dtype) == ((1, 9, HEADS), torch.float32, torch.bfloat16)
    for token in range(9):
        for head in range(HEADS):
            x = a[token, head].item() + dt_bias[head].item()
            exact = -math.exp(a_log[head].item()) * (x if x > 20 else math.log1p(math.exp(x)))
            assert g[0, token, head].item() == pytest.approx(exact, rel=1e-5, abs=1e-7)
            assert beta[0, token, head].item() == pytest.approx(1 / (1 + math.exp(-b[token, head].item())), rel=2**-8)


# ---- the rule ----


class Inputs:
    """What the rule is given for some tokens: q and k of length 1, a state that forgets slowly, one value head in two sharing its key."""

    def __init__(self, tokens: int, sequences: int, seed: int = 0) -> None:
        q, k = (random(tokens, KEY_HEADS, SIZE, seed=seed + index) for index in (1, 2))
        self.q, self.k = ((part / part.norm(dim=-1, keepdim=True)).bfloat16() for part in (q, k))
        self.v = random(tokens, HEADS, SIZE, seed=seed + 3, dtype=torch.bfloat16)
        self.beta = random(tokens, HEADS, seed=seed + 4).sigmoid().bfloat16()
        self.g = -0.1 * random(tokens, HEADS, seed=seed + 5).abs()
        self.state = random(sequences, HEADS, SIZE, SIZE, seed=seed + 6)  # [K, V]

    def recurred(self, first: int, last: int, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs [tokens, heads, V] and the state after each token, float64: the rule as it is written in gated_delta_rule.py."""
        out, states, state = torch.zeros(last - first, HEADS, SIZE, dtype=torch.float64), [], state.double()
        for token in range(first, last):
            for head in range(HEADS):
                q, k = (part[token, head * KEY_HEADS // HEADS].double() for part in (self.q, self.k))
                forgotten = state[head] * self.g[token, head].double().exp()
                delta = (self.v[token, head].double() - k @ forgotten) * self.beta[token, head].double()
                state = state.clone()
                state[head] = forgotten + torch.outer(k, delta)
                out[token - first, head] = SCALE * q @ state[head]
            states.append(state)
        return out, states


def recurrent(given: Inputs, state: torch.Tensor, lengths: list[int], rows: list[int], **options: Any) -> torch.Tensor:
    return rule.npu_recurrent_gated_delta_rule(
        given.q, given.k, given.v, state, **{
            "beta": given.beta, "g": given.g, "scale": SCALE, "actual_seq_lengths": torch.tensor([0, *lengths], dtype=torch.int32),
            "ssm_state_indices": torch.tensor(rows, dtype=torch.int32), **options,
        },
    )


def test_a_token_of_each_sequence_advances_its_state() -> None:
    given = Inputs(3, 5)
    state = given.state.transpose(-1, -2).contiguous()  # in memory [V, K]
    before = state.clone()
    out = recurrent(given, state, [1, 1, 0], [4, 1, 0])  # the third row is padding
    for token, row in enumerate([4, 1]):
        exact, states = given.recurred(token, token + 1, given.state[row])
        near(out[token], exact[0], 2**-8)
        near(state[row].transpose(-1, -2), states[0], 1e-5)
        before[row] = state[row]
    assert torch.equal(state, before)


def test_padding_does_not_touch_a_state_that_has_its_number() -> None:
    given = Inputs(4, 3)
    state = given.state.transpose(-1, -2).contiguous()
    untouched = state[1:].clone()
    out = recurrent(given, state, [1, 0, 0, 0], [0, 0, 0, 0])
    exact, states = given.recurred(0, 1, given.state[0])
    near(out[0], exact[0], 2**-8)
    near(state[0].transpose(-1, -2), states[0], 1e-5)
    assert torch.equal(state[1:], untouched)
    x, weight, conv_state = random(4, 16), random(4, 16, seed=1), random(3, 3, 16, seed=2)
    expected = conv_state.clone()
    expected[0] = torch.cat((conv_state[0, 1:], x[2:3]))
    rows = torch.tensor([PAD, PAD, 0, PAD], dtype=torch.int32)
    conv(x, weight, conv_state, cache_indices_opt=rows, run_mode=1)
    assert torch.equal(conv_state, expected)


def test_several_tokens_of_a_sequence_leave_a_state_each() -> None:
    given = Inputs(5, 6)
    state = given.state.transpose(-1, -2).contiguous()
    out = recurrent(given, state, [3, 2], [5, 0, 2, 3, 4])
    exact, states = given.recurred(0, 3, given.state[5])
    near(out[:3], exact, 2**-8)
    for row, after in zip((5, 0, 2), states, strict=True):
        near(state[row].transpose(-1, -2), after, 1e-5)
    exact, states = given.recurred(3, 5, given.state[3])
    near(out[3:], exact, 2**-8)
    near(state[4].transpose(-1, -2), states[-1], 1e-5)


def test_a_sequence_begins_behind_its_last_accepted_token() -> None:
    given = Inputs(5, 6)
    state = given.state.transpose(-1, -2).contiguous()
    recurrent(given, state, [3, 2], [5, 0, 2, 3, 4], num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32))
    for row, first, last, begin in ((2, 0, 3, 0), (4, 3, 5, 3)):
        near(state[row].transpose(-1, -2), given.recurred(first, last, given.state[begin])[1][-1], 1e-5)


@pytest.mark.parametrize(
    ("changed", "error", "names"),
    [
        ({"num_accepted_tokens": torch.tensor([1, 1, 2], dtype=torch.int32)}, ValueError, "num_accepted_tokens"),
        ({"gk": torch.ones(1)}, NotImplementedError, "gk"),
        ({"g": None}, ValueError, "g: is needed"),
        ({"beta": torch.ones(3, HEADS)}, ValueError, "beta: dtype"),
        ({"actual_seq_lengths": torch.tensor([0, 1, 1, 1])}, ValueError, "actual_seq_lengths: dtype"),
    ],
)
def test_the_recurrent_kernel_refuses_what_it_does_not_take(changed: dict[str, Any], error: type[Exception], names: str) -> None:
    given = Inputs(3, 3)
    with pytest.raises(error, match=f"npu_recurrent_gated_delta_rule.*{names}"):
        recurrent(given, given.state, [1, 1, 1], [0, 1, 2], **changed)


def test_a_state_that_is_no_contiguous_memory_is_refused() -> None:
    given = Inputs(1, 1)
    with pytest.raises(ValueError, match=r"state: strides .* written in place"):
        recurrent(given, given.state.transpose(-1, -2), [1], [0])


# ---- the rule chunk by chunk ----

BOUNDS = [0, 1, 71, 71, 199]  # one token, a chunk and a bit, none, two full chunks
CHUNKS = [(0, 0, 1), (1, 1, 65), (1, 65, 71), (3, 71, 135), (3, 135, 199)]  # (sequence, first, last + 1)
TOKENS = BOUNDS[-1]


def launch(kernel: str, **arguments: Any) -> None:
    REFERENCES[f"{FLA}.{kernel}"]((1,), {"cu_seqlens": torch.tensor(BOUNDS), **arguments})


def summed(g: torch.Tensor) -> torch.Tensor:
    out = torch.full((1, TOKENS, HEADS), float("nan"))
    off = {"REVERSE": False, "HEAD_FIRST": False, "HAS_SCALE": False}
    launch("cumsum.chunk_local_cumsum_scalar_kernel", s=g.unsqueeze(0), o=out, CHUNK_SIZE=64, **off)
    return out


def dotted(given: Inputs, g: torch.Tensor) -> torch.Tensor:
    out = torch.full((1, TOKENS, HEADS, 64), float("nan"))
    launch(
        "chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd_kernel", k=given.k.unsqueeze(0), beta=given.beta.t().unsqueeze(1),
        g_cumsum=g.permute(2, 0, 1), A=out, H=HEADS, Hg=KEY_HEADS, BT=64, USE_G=True,
    )
    return out


def inverted(lower: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    diagonal = torch.full((1, TOKENS, HEADS, 16), float("nan"))
    launch("solve_tril.solve_tril_16x16_kernel", A=lower, Ad=diagonal, BT=64)
    inverse = torch.full((1, TOKENS, HEADS, 64), float("nan"), dtype=dtype)
    launch("solve_tril.merge_16x16_to_64x64_inverse_kernel", A=lower, Ad=diagonal, Ai=inverse, BT=64)
    return inverse


def applied(given: Inputs, inverse: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    w, u = (torch.full((1, TOKENS, HEADS, SIZE), float("nan"), dtype=dtype) for _ in range(2))
    launch(
        "wy_fast.recompute_w_u_fwd_kernel", k=given.k.unsqueeze(0), v=given.v.unsqueeze(0), beta=given.beta.t().unsqueeze(0),
        w=w, u=u, A=inverse, g=g.transpose(1, 2), H=HEADS, Hg=KEY_HEADS, BT=64,
    )
    return w, u


def test_decays_are_summed_up_from_the_start_of_each_chunk() -> None:
    given = Inputs(TOKENS, 4)
    g = summed(given.g)
    for _, first, last in CHUNKS:
        for token in range(first, last):
            torch.testing.assert_close(g[0, token], given.g[first : token + 1].sum(0), atol=1e-6, rtol=1e-5)


def test_products_of_keys_are_weighed_and_lower_triangular() -> None:
    given = Inputs(TOKENS, 4)
    lower = dotted(given, summed(given.g))
    for _, first, last in CHUNKS:
        for i, j in ((0, 0), (0, 1), (3, 2), (5, 1), (63, 0), (63, 62), (40, 17)):
            if first + max(i, j) >= last:
                continue
            for head in range(HEADS):
                k = given.k[:, head * KEY_HEADS // HEADS].double()
                between = given.g[first + j + 1 : first + i + 1, head].double().sum()
                exact = given.beta[first + i, head].double() * (k[first + i] @ k[first + j]) * between.exp() if i > j else 0.0
                assert lower[0, first + i, head, j].item() == pytest.approx(float(exact), rel=1e-4, abs=1e-6)
        assert (lower[0, first:last, :, last - first :] == 0).all()


def test_the_inverse_times_what_it_inverts_is_the_identity() -> None:
    given = Inputs(TOKENS, 4)
    lower = dotted(given, summed(given.g)) * 3  # larger than keys of length 1 make it: the inverse is far from I - A
    inverse = inverted(lower, torch.float32)
    assert not inverse.isnan().any()
    for _, first, last in CHUNKS:
        length = last - first
        identity = torch.eye(length, dtype=torch.float64).expand(HEADS, -1, -1)
        matrix, found = (part[0, first:last, :, :length].double().transpose(0, 1) for part in (lower, inverse))
        near((identity + matrix) @ found, identity, 1e-4)
        assert (found.triu(1) == 0).all()


def test_w_and_u_are_the_inverse_times_weighed_keys_and_values() -> None:
    given = Inputs(TOKENS, 4)
    g = summed(given.g)
    inverse = inverted(dotted(given, g), torch.float32)
    w, u = applied(given, inverse, g, torch.float32)
    for _, first, last in CHUNKS:
        for head in range(HEADS):
            own = inverse[0, first:last, head, : last - first].double()
            beta, decay = given.beta[first:last, head, None].double(), g[0, first:last, head, None].double().exp()
            near(u[0, first:last, head], own @ (beta * given.v[first:last, head].double()), 1e-5)
            near(w[0, first:last, head], own @ (beta * decay * given.k[first:last, head * KEY_HEADS // HEADS].double()), 1e-5)


def test_the_chunk_kernels_one_after_the_other_are_the_recurrence() -> None:
    given = Inputs(TOKENS, 4)
    bfloat16, g = torch.bfloat16, summed(given.g)
    w, u = applied(given, inverted(dotted(given, g), bfloat16), g, bfloat16)
    q, k, w, u = (part.transpose(1, 2).contiguous() for part in (given.q.unsqueeze(0), given.k.unsqueeze(0), w, u))
    g = g.transpose(1, 2).contiguous()
    # As vllm-ascend calls them: the first without sequences that have no tokens, the second with the numbers of those that have.
    bounds, begin = [0, 1, 71, 199], given.state[[0, 1, 3]]
    h, v_new, final = rule.chunk_gated_delta_rule_fwd_h(
        k, w, u, g, initial_state=begin, output_final_state=True, chunk_size=64, save_new_value=True, cu_seqlens=bounds
    )
    indices = [0, 0, 1, 0, 1, 1, 2, 0, 2, 1]
    out = rule.chunk_fwd_o(q, k, v_new, h, SCALE, g=g, cu_seqlens=bounds, chunk_indices=indices, chunk_size=64)
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        exact, states = given.recurred(first, last, begin[sequence])
        near(out[0, :, first:last].transpose(0, 1), exact, 0.02)
        near(final[sequence], states[-1], 0.02)
    after = given.recurred(1, 65, begin[1])[1][-1]
    near(h[0, :, 2], after, 0.02)
    assert torch.equal(h[0, :, 1], begin[1].bfloat16())


@pytest.mark.parametrize("changed", ["gk", "use_exp2", "transpose_state_layout"])
def test_options_of_the_state_kernel_without_a_reference_are_named(changed: str) -> None:
    part = torch.zeros(1, HEADS, 64, SIZE, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"chunk_gated_delta_rule_fwd_h: {changed}"):
        rule.chunk_gated_delta_rule_fwd_h(part, part, part, torch.zeros(1, HEADS, 64), chunk_size=64, **{changed: True})


def test_heads_smaller_than_the_kernels_tiles_are_refused() -> None:
    part, g = torch.zeros(1, HEADS, 64, 64, dtype=torch.bfloat16), torch.zeros(1, HEADS, 64)
    with pytest.raises(ValueError, match="chunk_fwd_o: q: head size 64 is not 128"):
        rule.chunk_fwd_o(part, part, part, part, SCALE, g=g, cu_seqlens=[0, 64], chunk_indices=[0, 0], chunk_size=64)


def test_states_of_new_sequences_are_cleared() -> None:
    states, has_state = random(3, 2, 4, 4), torch.tensor([True, False, True])
    expected = states.clone()
    expected[1] = 0
    REFERENCES[f"{FLA}.utils._clear_ssm_states_kernel"]((3, 1), {"states_ptr": states, "has_initial_state_ptr": has_state})
    assert torch.equal(states, expected)


def test_states_are_copied_between_addresses_in_the_order_of_the_stream(any_mode: None) -> None:
    states = random(4, 6).npu()
    row = 6 * 4
    addresses = torch.tensor([states.data_ptr(), states.data_ptr() + row]).npu()
    targets = torch.tensor([states.data_ptr() + 2 * row, states.data_ptr() + 3 * row + 8]).npu()
    sizes = torch.tensor([row, 8]).npu()
    with torch.npu.stream(torch.npu.Stream()):
        torch.npu.current_stream().wait_stream(torch.npu.default_stream())
        states[0] = 5.0
        copy = REFERENCES["vllm_ascend.ops.triton.batch_memcpy.batch_memcpy_kernel"]
        copy((2,), {"src_ptrs": addresses, "dst_ptrs": targets, "sizes": sizes})
        states[0] = 7.0
        torch.npu.current_stream().synchronize()
    expected = random(4, 6)
    expected[0], expected[2], expected[3, 2:4] = 7.0, 5.0, expected[1, :2]
    assert torch.equal(states.cpu(), expected)
