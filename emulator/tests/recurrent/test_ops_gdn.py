"""The kernels of GatedDeltaNet against the recurrence, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated import int32, random, scenarios, side_stream

import ascend_npu_emulator.ops.hooks  # noqa: F401 - registers the references for Triton kernels
from ascend_npu_emulator.ops.recurrent import gated_delta_rule as rule
from ascend_npu_emulator.ops.triton.kernels import REFERENCES

KEY_HEADS, HEADS, SIZE = 2, 4, 128
SCALE = SIZE**-0.5
FLA = "vllm_ascend.ops.triton.fla"


def near(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Assert that the largest error is at most `tolerance` times the largest element."""
    error = ((actual.double() - exact).abs().max() / exact.abs().max()).item()
    assert error < tolerance, f"{error:.2e}"


# ---- the gates ----


def test_the_gates_follow_their_definition() -> None:
    a_log, dt_bias, a, b = (
        random(HEADS, seed=1),
        random(HEADS, seed=2),
        12 * random(9, HEADS, seed=3),
        random(9, HEADS, seed=4),
    )
    a, b = a.bfloat16(), b.bfloat16()
    g, beta = rule.npu_fused_gdn_gating(a_log, a, b, dt_bias)
    assert (g.shape, g.dtype, beta.dtype) == ((1, 9, HEADS), torch.float32, torch.bfloat16)
    for token in range(9):
        for head in range(HEADS):
            x = a[token, head].item() + dt_bias[head].item()
            exact = -math.exp(a_log[head].item()) * (x if x > 20 else math.log1p(math.exp(x)))
            assert g[0, token, head].item() == pytest.approx(exact, rel=1e-5, abs=1e-7)
            assert beta[0, token, head].item() == pytest.approx(
                1 / (1 + math.exp(-b[token, head].item())), rel=2**-8
            )


# ---- the gated delta rule ----


class Inputs:
    """Arguments: q and k of norm 1, slow decay, two value heads per key head."""

    def __init__(self, tokens: int, sequences: int, seed: int = 0) -> None:
        q, k = (random(tokens, KEY_HEADS, SIZE, seed=seed + index) for index in (1, 2))
        self.q, self.k = ((part / part.norm(dim=-1, keepdim=True)).bfloat16() for part in (q, k))
        self.v = random(tokens, HEADS, SIZE, seed=seed + 3, dtype=torch.bfloat16)
        self.beta = random(tokens, HEADS, seed=seed + 4).sigmoid().bfloat16()
        self.g = -0.1 * random(tokens, HEADS, seed=seed + 5).abs()
        self.state = random(sequences, HEADS, SIZE, SIZE, seed=seed + 6)  # [K, V]
        self.memory = self.state.transpose(-1, -2).contiguous()  # [V, K], the layout in memory

    def recurred(
        self, first: int, last: int, state: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return outputs [tokens, heads, V] and the state after each token, in float64."""
        out, states, state = (
            torch.zeros(last - first, HEADS, SIZE, dtype=torch.float64),
            [],
            state.double(),
        )
        for token in range(first, last):
            for head in range(HEADS):
                q, k = (
                    part[token, head * KEY_HEADS // HEADS].double() for part in (self.q, self.k)
                )
                forgotten = state[head] * self.g[token, head].double().exp()
                delta = (self.v[token, head].double() - k @ forgotten) * self.beta[
                    token, head
                ].double()
                state = state.clone()
                state[head] = forgotten + torch.outer(k, delta)
                out[token - first, head] = SCALE * q @ state[head]
            states.append(state)
        return out, states


def recurrent(given: Inputs, lengths: list[int], rows: list[int], **options: Any) -> torch.Tensor:
    """Advance `given.memory` in place."""
    places = {"actual_seq_lengths": int32(0, *lengths), "ssm_state_indices": int32(*rows)}
    options = {
        "beta": given.beta,
        "g": given.g,
        "scale": SCALE,
        "state": given.memory,
        **places,
        **options,
    }
    return rule.npu_recurrent_gated_delta_rule(
        given.q, given.k, given.v, options.pop("state"), **options
    )


def assert_state(given: Inputs, row: int, exact: torch.Tensor) -> None:
    near(given.memory[row].transpose(-1, -2), exact, 1e-5)


def test_one_token_per_sequence_advances_its_state() -> None:
    given = Inputs(3, 5)
    before = given.memory.clone()
    out = recurrent(given, [1, 1, 0], [4, 1, 0])  # the third row is padding
    for token, row in enumerate([4, 1]):
        exact, states = given.recurred(token, token + 1, given.state[row])
        near(out[token], exact[0], 2**-8)
        assert_state(given, row, states[0])
    assert torch.equal(given.memory[[0, 2, 3]], before[[0, 2, 3]])


def test_padding_does_not_change_a_state() -> None:
    given = Inputs(4, 3)
    before = given.memory.clone()
    out = recurrent(given, [1, 0, 0, 0], [0, 0, 0, 0])
    exact, states = given.recurred(0, 1, given.state[0])
    near(out[0], exact[0], 2**-8)
    assert_state(given, 0, states[0])
    assert torch.equal(given.memory[1:], before[1:])


def test_each_token_of_a_sequence_stores_a_state() -> None:
    given = Inputs(5, 6)
    out = recurrent(given, [3, 2], [5, 0, 2, 3, 4])
    for first, last, rows in ((0, 3, (5, 0, 2)), (3, 5, (3, 4))):
        exact, states = given.recurred(first, last, given.state[rows[0]])
        near(out[first:last], exact, 2**-8)
        for row, after in zip(rows, states, strict=True):
            assert_state(given, row, after)


def test_sequence_continues_after_its_last_accepted_token() -> None:
    given = Inputs(5, 6)
    recurrent(given, [3, 2], [5, 0, 2, 3, 4], num_accepted_tokens=int32(2, 1))
    for row, first, last, begin in ((2, 0, 3, 0), (4, 3, 5, 3)):
        assert_state(given, row, given.recurred(first, last, given.state[begin])[1][-1])


# ---- the gated delta rule, chunk by chunk ----

BOUNDS = [0, 1, 71, 71, 199]  # one token, a full and a partial chunk, no token, two full chunks
CHUNKS = [
    (0, 0, 1),
    (1, 1, 65),
    (1, 65, 71),
    (3, 71, 135),
    (3, 135, 199),
]  # (sequence, first, last + 1)
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
        "chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd_kernel",
        k=given.k.unsqueeze(0),
        beta=given.beta.t().unsqueeze(1),
        g_cumsum=g.permute(2, 0, 1),
        A=out,
        H=HEADS,
        Hg=KEY_HEADS,
        BT=64,
        USE_G=True,
    )
    return out


def inverted(lower: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    diagonal = torch.full((1, TOKENS, HEADS, 16), float("nan"))
    launch("solve_tril.solve_tril_16x16_kernel", A=lower, Ad=diagonal, BT=64)
    inverse = torch.full((1, TOKENS, HEADS, 64), float("nan"), dtype=dtype)
    launch(
        "solve_tril.merge_16x16_to_64x64_inverse_kernel", A=lower, Ad=diagonal, Ai=inverse, BT=64
    )
    return inverse


def applied(
    given: Inputs, inverse: torch.Tensor, g: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    w, u = (torch.full((1, TOKENS, HEADS, SIZE), float("nan"), dtype=dtype) for _ in range(2))
    launch(
        "wy_fast.recompute_w_u_fwd_kernel",
        k=given.k.unsqueeze(0),
        v=given.v.unsqueeze(0),
        beta=given.beta.t().unsqueeze(0),
        w=w,
        u=u,
        A=inverse,
        g=g.transpose(1, 2),
        H=HEADS,
        Hg=KEY_HEADS,
        BT=64,
    )
    return w, u


def test_decays_are_summed_from_the_start_of_each_chunk() -> None:
    given = Inputs(TOKENS, 4)
    g = summed(given.g)
    for _, first, last in CHUNKS:
        for token in range(first, last):
            torch.testing.assert_close(
                g[0, token], given.g[first : token + 1].sum(0), atol=1e-6, rtol=1e-5
            )


def test_key_products_are_weighted_and_lower_triangular() -> None:
    given = Inputs(TOKENS, 4)
    lower = dotted(given, summed(given.g))
    for _, first, last in CHUNKS:
        for i, j in ((0, 0), (0, 1), (3, 2), (5, 1), (63, 0), (63, 62), (40, 17)):
            if first + max(i, j) >= last:
                continue
            for head in range(HEADS):
                k = given.k[:, head * KEY_HEADS // HEADS].double()
                between = given.g[first + j + 1 : first + i + 1, head].double().sum()
                exact = (
                    given.beta[first + i, head].double()
                    * (k[first + i] @ k[first + j])
                    * between.exp()
                    if i > j
                    else 0.0
                )
                assert lower[0, first + i, head, j].item() == pytest.approx(
                    float(exact), rel=1e-4, abs=1e-6
                )
        assert (lower[0, first:last, :, last - first :] == 0).all()


def test_inverse_times_matrix_is_the_identity() -> None:
    given = Inputs(TOKENS, 4)
    lower = (
        dotted(given, summed(given.g)) * 3
    )  # larger than with keys of norm 1, to move the inverse far from I - A
    inverse = inverted(lower, torch.float32)
    assert not inverse.isnan().any()
    for _, first, last in CHUNKS:
        length = last - first
        identity = torch.eye(length, dtype=torch.float64).expand(HEADS, -1, -1)
        matrix, found = (
            part[0, first:last, :, :length].double().transpose(0, 1) for part in (lower, inverse)
        )
        near((identity + matrix) @ found, identity, 1e-4)
        assert (found.triu(1) == 0).all()


def test_w_and_u_are_the_inverse_times_weighted_keys_and_values() -> None:
    given = Inputs(TOKENS, 4)
    g = summed(given.g)
    inverse = inverted(dotted(given, g), torch.float32)
    w, u = applied(given, inverse, g, torch.float32)
    for _, first, last in CHUNKS:
        for head in range(HEADS):
            own = inverse[0, first:last, head, : last - first].double()
            beta, decay = (
                given.beta[first:last, head, None].double(),
                g[0, first:last, head, None].double().exp(),
            )
            near(u[0, first:last, head], own @ (beta * given.v[first:last, head].double()), 1e-5)
            near(
                w[0, first:last, head],
                own @ (beta * decay * given.k[first:last, head * KEY_HEADS // HEADS].double()),
                1e-5,
            )


def test_chunk_kernels_in_sequence_equal_the_recurrence() -> None:
    given = Inputs(TOKENS, 4)
    bfloat16, g = torch.bfloat16, summed(given.g)
    w, u = applied(given, inverted(dotted(given, g), bfloat16), g, bfloat16)
    q, k, w, u = (
        part.transpose(1, 2).contiguous()
        for part in (given.q.unsqueeze(0), given.k.unsqueeze(0), w, u)
    )
    g = g.transpose(1, 2).contiguous()
    # vllm-ascend leaves out sequences without tokens.
    bounds, begin = [0, 1, 71, 199], given.state[[0, 1, 3]]
    h, v_new, final = rule.chunk_gated_delta_rule_fwd_h(
        k,
        w,
        u,
        g,
        initial_state=begin,
        output_final_state=True,
        chunk_size=64,
        save_new_value=True,
        cu_seqlens=bounds,
    )
    indices = [0, 0, 1, 0, 1, 1, 2, 0, 2, 1]
    out = rule.chunk_fwd_o(
        q, k, v_new, h, SCALE, g=g, cu_seqlens=bounds, chunk_indices=indices, chunk_size=64
    )
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        exact, states = given.recurred(first, last, begin[sequence])
        near(out[0, :, first:last].transpose(0, 1), exact, 0.02)
        near(final[sequence], states[-1], 0.02)
    after = given.recurred(1, 65, begin[1])[1][-1]
    near(h[0, :, 2], after, 0.02)
    assert torch.equal(h[0, :, 1], begin[1].bfloat16())


def test_states_of_new_sequences_are_cleared() -> None:
    states, has_state = random(3, 2, 4, 4), torch.tensor([True, False, True])
    expected = states.clone()
    expected[1] = 0
    REFERENCES[f"{FLA}.utils._clear_ssm_states_kernel"](
        (3, 1), {"states_ptr": states, "has_initial_state_ptr": has_state}
    )
    assert torch.equal(states, expected)


def test_states_are_copied_between_addresses_in_stream_order(any_mode: None) -> None:
    states = random(4, 6).npu()
    row = 6 * 4
    addresses = torch.tensor([states.data_ptr(), states.data_ptr() + row]).npu()
    targets = torch.tensor([states.data_ptr() + 2 * row, states.data_ptr() + 3 * row + 8]).npu()
    sizes = torch.tensor([row, 8]).npu()
    with side_stream() as stream:
        states[0] = 5.0
        copy = REFERENCES["vllm_ascend.ops.triton.batch_memcpy.batch_memcpy_kernel"]
        copy((2,), {"src_ptrs": addresses, "dst_ptrs": targets, "sizes": sizes})
        states[0] = 7.0
        stream.synchronize()
    expected = random(4, 6)
    expected[0], expected[2], expected[3, 2:4] = 7.0, 5.0, expected[1, :2]
    assert torch.equal(states.cpu(), expected)


# ---- errors ----


def bad_step(**changes: Any) -> Callable[[], object]:
    return lambda: recurrent(Inputs(3, 3), [1, 1, 1], [0, 1, 2], **changes)


def bad_states(**changes: Any) -> Callable[[], object]:
    part, begin = (
        torch.zeros(1, HEADS, 64, SIZE, dtype=torch.bfloat16),
        torch.zeros(1, HEADS, SIZE, SIZE),
    )
    right = {
        "g": torch.zeros(1, HEADS, 64),
        "initial_state": begin,
        "output_final_state": True,
        "chunk_size": 64,
    }
    return lambda: rule.chunk_gated_delta_rule_fwd_h(part, part, part, **right | changes)


def small_heads() -> object:
    part, g = torch.zeros(1, HEADS, 64, 64, dtype=torch.bfloat16), torch.zeros(1, HEADS, 64)
    return rule.chunk_fwd_o(
        part, part, part, part, SCALE, g=g, cu_seqlens=[0, 64], chunk_indices=[0, 0], chunk_size=64
    )


STEP, STATES = "npu_recurrent_gated_delta_rule.*", "chunk_gated_delta_rule_fwd_h: "
ONES = torch.ones(1)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "more tokens accepted than given": (
        bad_step(num_accepted_tokens=int32(1, 1, 2)),
        ValueError,
        STEP + "num_accepted_tokens",
    ),
    "decays per key": (bad_step(gk=ONES), NotImplementedError, STEP + "gk"),
    "no decays": (bad_step(g=None), ValueError, STEP + "g: must be given"),
    "beta in float32": (bad_step(beta=torch.ones(3, HEADS)), ValueError, STEP + "beta: dtype"),
    "int64 lengths": (
        bad_step(actual_seq_lengths=torch.tensor([0, 1, 1, 1])),
        ValueError,
        STEP + "actual_seq_lengths: dtype",
    ),
    "a state that is not contiguous": (
        bad_step(state=Inputs(3, 3).state.transpose(-1, -2)),
        ValueError,
        r"state: strides .* written in place",
    ),
    "chunks with decays per key": (bad_states(gk=True), NotImplementedError, STATES + "gk"),
    "exponents of two": (bad_states(use_exp2=True), NotImplementedError, STATES + "use_exp2"),
    "transposed states of chunks": (
        bad_states(transpose_state_layout=True),
        NotImplementedError,
        STATES + "transpose_state_layout",
    ),
    "heads smaller than the kernel's tiles": (
        small_heads,
        ValueError,
        "chunk_fwd_o: q: head size 64 must be 128",
    ),
}


@scenarios("call, error, message", REFUSED)
def test_error_names_operator_and_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_base_calls_are_valid() -> None:
    bad_step()()
    bad_states()()
