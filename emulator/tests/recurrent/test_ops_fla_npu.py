"""The stand-in for the package fla_npu against the kernels' definitions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated import NPU, int32, random, scenarios
from test_ops_causal_conv1d import convolved
from test_ops_gdn import HEADS, SCALE, SIZE, Inputs, near

import ascend_npu_emulator.ops as ops
from ascend_npu_emulator.ops.recurrent.fla_npu import FUNCTIONS

WIDTH, CHANNELS = 4, 32
PAD, NULL = -1, 0
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _declared() -> None:
    ops.register()


def on_npu(value: Any) -> Any:
    return value.to(NPU) if isinstance(value, torch.Tensor) else value


def with_gaps(rows: torch.Tensor, gap: int = 48) -> torch.Tensor:
    """Return the rows on the NPU, with `gap` elements of value 7 between rows."""
    memory = torch.full((rows.shape[0], rows[0].numel() + gap), 7.0, dtype=rows.dtype, device=NPU)
    view = memory.as_strided(rows.shape, (memory.stride(0), *rows[0].stride()))
    return view.copy_(rows)


def assert_gaps_untouched(view: torch.Tensor, gap: int = 48) -> None:
    size = view[0].numel()
    memory = view.as_strided((view.shape[0], size + gap), (view.stride(0), 1)).cpu()
    assert (memory[:, size:] == 7).all()


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    return FUNCTIONS[name](
        *map(on_npu, args), **{key: on_npu(value) for key, value in kwargs.items()}
    )


# ---- the convolution ----


@pytest.mark.parametrize("activation", [None, "silu"])
def test_prompts_are_convolved_with_their_state_and_store_their_last_inputs(
    activation: str | None, any_mode: None
) -> None:
    # Sequences: new, with a state, shorter than the taps, without tokens, padding, the null block.
    bounds, rows = [0, 7, 12, 13, 13, 16, 18], [4, 2, 1, 3, PAD, NULL]
    has_state = [False, True, True, True, True, True]
    x, weight, bias = (
        random(18, CHANNELS, dtype=BF16),
        random(WIDTH, CHANNELS, seed=1, dtype=BF16),
        random(CHANNELS, seed=2, dtype=BF16),
    )
    before = random(5, WIDTH - 1, CHANNELS, seed=3, dtype=BF16)
    state = with_gaps(before)
    out = call(
        "causal_conv1d_fn", x, weight, bias, conv_states=state, query_start_loc=int32(*bounds), cache_indices=int32(*rows),
        has_initial_state=torch.tensor(has_state), activation=activation, pad_slot_id=PAD, null_block_id=NULL,
    ).cpu()  # fmt: skip
    for sequence, (first, last) in enumerate(pairwise(bounds[:5])):
        begin = before[rows[sequence]] * has_state[sequence]
        exact = convolved(x[first:last], weight, begin, bias, activation is not None)
        torch.testing.assert_close(out[first:last].double(), exact, atol=2**-8, rtol=2**-8)
        if last > first:
            before[rows[sequence]] = torch.cat((begin, x[first:last]))[-(WIDTH - 1) :]
    assert torch.equal(state.cpu(), before)
    assert_gaps_untouched(state)


def test_decodes_advance_their_states_except_the_null_block(any_mode: None) -> None:
    x, weight = random(3, CHANNELS, dtype=BF16), random(WIDTH, CHANNELS, seed=1, dtype=BF16)
    before = random(4, WIDTH - 1, CHANNELS, seed=3, dtype=BF16)
    state, out = with_gaps(before), torch.empty(3, CHANNELS, dtype=BF16, device=NPU)
    rows = (3, NULL, 1)
    returned = call(
        "causal_conv1d_update", x, state, weight, activation="silu", conv_state_indices=int32(*rows),
        query_start_loc=int32(0, 1, 2, 3), max_query_len=1, null_block_id=NULL, out=out,
    )  # fmt: skip
    assert returned is out
    for token in (0, 2):
        exact = convolved(x[token : token + 1], weight, before[rows[token]], None, True)
        torch.testing.assert_close(
            out[token : token + 1].cpu().double(), exact, atol=2**-8, rtol=2**-8
        )
        before[rows[token]] = torch.cat((before[rows[token], 1:], x[token : token + 1]))
    assert torch.equal(state.cpu(), before)
    assert_gaps_untouched(state)


def test_rejected_drafts_and_the_null_block_leave_states_unchanged(any_mode: None) -> None:
    """Run a prompt of five tokens, then steps of two tokens. The next step accepts one or both."""
    x, weight = random(20, CHANNELS, dtype=BF16), random(WIDTH, CHANNELS, seed=1, dtype=BF16)
    state = with_gaps(torch.zeros(3, WIDTH, CHANNELS, dtype=BF16))
    call(
        "causal_conv1d_fn",
        x[:5],
        weight,
        None,
        conv_states=state,
        query_start_loc=int32(0, 5),
        cache_indices=int32(2),
    )
    places = {
        "conv_state_indices": int32(2, NULL),
        "query_start_loc": int32(0, 2, 4),
        "max_query_len": 2,
    }
    real, accepted = 5, 1
    for next_accepted in (1, 2, 2, 1, 2):
        step = torch.cat(
            (
                x[real : real + next_accepted],
                random(4 - next_accepted, CHANNELS, seed=9, dtype=BF16),
            )
        )
        out = call(
            "causal_conv1d_update",
            step,
            state,
            weight,
            num_accepted_tokens=int32(accepted, 1),
            **places,
        ).cpu()
        exact = convolved(step[:2], weight, x[real - 3 : real], None, False)
        torch.testing.assert_close(out[:2].double(), exact, atol=2**-8, rtol=2**-8)
        real, accepted = real + next_accepted, next_accepted
    assert (state[:2].cpu() == 0).all()
    assert_gaps_untouched(state)


def test_update_without_out_writes_its_input() -> None:
    x, weight = random(1, CHANNELS, dtype=BF16).to(NPU), random(WIDTH, CHANNELS, seed=1, dtype=BF16)
    before = x.cpu()
    places = {"conv_state_indices": int32(1), "query_start_loc": int32(0, 1)}
    state = torch.zeros(2, WIDTH - 1, CHANNELS, dtype=BF16)
    assert call("causal_conv1d_update", x, state, weight, max_query_len=1, **places) is x
    torch.testing.assert_close(x.cpu(), before * weight[-1])


def test_row_0_is_updated_without_a_null_block() -> None:
    x, weight = random(1, CHANNELS, dtype=BF16), random(WIDTH, CHANNELS, seed=1, dtype=BF16)
    state = torch.zeros(2, WIDTH - 1, CHANNELS, dtype=BF16, device=NPU)
    places = {"conv_state_indices": int32(0), "query_start_loc": int32(0, 1), "max_query_len": 1}
    call("causal_conv1d_update", x, state, weight, null_block_id=None, **places)
    assert torch.equal(state[0, -1].cpu(), x[0])


# ---- the gated delta rule ----


def test_states_with_gaps_between_rows_are_advanced(any_mode: None) -> None:
    given = Inputs(2, 4)
    state = with_gaps(given.memory)
    out = call(
        "recurrent_gated_delta_rule", given.q, given.k, given.v, state, g=given.g, beta=given.beta, scale=SCALE,
        actual_seq_lengths=int32(0, 1, 1), ssm_state_indices=int32(3, 1),
    ).cpu()  # fmt: skip
    for token, row in enumerate((3, 1)):
        exact, states = given.recurred(token, token + 1, given.state[row])
        near(out[token], exact[0], 2**-8)
        near(state[row].cpu().transpose(-1, -2), states[0], 1e-5)
    assert torch.equal(state[[0, 2]].cpu(), given.memory[[0, 2]])
    assert_gaps_untouched(state)


BOUNDS = [0, 1, 71, 199]  # one token, a full and a partial chunk, two full chunks
INDICES = [0, 0, 1, 0, 1, 1, 2, 0, 2, 1]


def chunked(given: Inputs, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the function as vllm-ascend does. Return output [tokens, heads, V] and last states."""
    q, k, v = (
        part.transpose(0, 1).unsqueeze(0).contiguous() for part in (given.q, given.k, given.v)
    )
    options = {"initial_state": given.state, "output_final_state": True, "chunk_size": 64, "layout": "BNSD", "scale": SCALE,
               "cu_seqlens": BOUNDS, "chunk_indices": INDICES, "use_exp2": False, "use_qk_l2norm_in_kernel": False,
               "allow_neg_eigval": False, "disable_recompute": True, "state_v_first": False}  # fmt: skip
    positional = {
        "q": q,
        "k": k,
        "v": v,
        "g": given.g.unsqueeze(0),
        "beta": given.beta.unsqueeze(0),
    }
    positional |= {name: changes.pop(name) for name in positional if name in changes}
    out, last, *rest = call("chunk_gated_delta_rule_fwd", *positional.values(), **options | changes)
    assert rest == [None] * 8
    return out[0].cpu(), last.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_chunked_rule_equals_the_recurrence(dtype: torch.dtype) -> None:
    given = Inputs(BOUNDS[-1], 3)
    given.state = given.state.to(dtype)
    out, last = chunked(given)
    assert (out.dtype, last.dtype) == (BF16, dtype)
    for sequence, (first, end) in enumerate(pairwise(BOUNDS)):
        exact, states = given.recurred(first, end, given.state[sequence])
        near(out[first:end], exact, 0.02)
        near(last[sequence], states[-1], 0.02)


def test_chunked_prompts_continue_from_the_last_states() -> None:
    given = Inputs(BOUNDS[-1], 3)
    _, last = chunked(given)
    later = Inputs(BOUNDS[-1], 3, seed=20)
    later.state = last
    out, _ = chunked(later)
    exact, _ = later.recurred(71, 199, given.recurred(71, 199, given.state[2])[1][-1])
    near(out[71:199], exact, 0.03)


# ---- errors ----


def bad_conv(name: str, **changes: Any) -> Callable[[], object]:
    def run() -> object:
        right: dict[str, Any] = {"x": torch.ones(2, CHANNELS, dtype=BF16), "weight": torch.ones(WIDTH, CHANNELS, dtype=BF16),
                                 "query_start_loc": int32(0, 1, 2)}  # fmt: skip
        state = torch.ones(3, WIDTH - 1, CHANNELS, dtype=BF16)
        if name == "causal_conv1d_fn":
            right |= {
                "bias": None,
                "conv_states": state,
                "cache_indices": int32(1, 2),
                "has_initial_state": torch.tensor([True, False]),
            }
        else:
            right |= {"conv_state": state, "conv_state_indices": int32(1, 2), "max_query_len": 1}
        return call(name, **right | changes)

    return run


def bad_rule(**changes: Any) -> Callable[[], object]:
    def run() -> object:
        given = Inputs(9, 9)
        right: dict[str, Any] = {"beta": given.beta, "g": given.g, "actual_seq_lengths": int32(0, *[1] * 9),
                                 "ssm_state_indices": int32(*range(9)), "state": given.memory}  # fmt: skip
        return call("recurrent_gated_delta_rule", given.q, given.k, given.v, **right | changes)

    return run


def bad_chunks(**changes: Any) -> Callable[[], object]:
    return lambda: chunked(Inputs(BOUNDS[-1], 3), **changes)


FN, UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
CHUNKS = "chunk_gated_delta_rule_fwd: "
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "x in float32": (
        bad_conv(FN, x=torch.ones(2, CHANNELS)),
        ValueError,
        "causal_conv1d: x: dtype",
    ),
    "int64 rows": (
        bad_conv(FN, cache_indices=torch.tensor([1, 2])),
        ValueError,
        FN + ": cache_indices: dtype",
    ),
    "two columns of rows": (
        bad_conv(UPDATE, conv_state_indices=int32(1, 2).view(1, 2)),
        ValueError,
        UPDATE + ": cache_indices: shape",
    ),
    "a row too few": (
        bad_conv(FN, cache_indices=int32(1)),
        ValueError,
        FN + ": cache_indices: 1 entries must be 2",
    ),
    "an unknown activation": (bad_conv(FN, activation="gelu"), ValueError, "activation: 'gelu'"),
    "a transposed state": (
        bad_conv(
            FN,
            conv_states=torch.ones(3, CHANNELS, WIDTH - 1, dtype=BF16, device=NPU).transpose(1, 2),
        ),
        ValueError,
        "gaps between rows only",
    ),
    "a state with too few places": (
        bad_conv(FN, conv_states=torch.ones(3, WIDTH - 2, CHANNELS, dtype=BF16)),
        ValueError,
        "conv_state: 2 places are too few",
    ),
    "an update of unknown length": (
        bad_conv(UPDATE, max_query_len=-1),
        ValueError,
        "max_query_len: -1",
    ),
    "accepted tokens of too few sequences": (
        bad_conv(UPDATE, num_accepted_tokens=int32(1)),
        ValueError,
        UPDATE + ": num_accepted_tokens: 1 entries must be 2",
    ),
    "block scheduling": (
        bad_conv(UPDATE, initial_state_idx=int32(1)),
        NotImplementedError,
        "initial_state_idx",
    ),
    "nine tokens of a sequence": (
        bad_rule(actual_seq_lengths=int32(0, 9)),
        ValueError,
        "actual_seq_lengths: 9 tokens of one sequence exceed 8",
    ),
    "a transposed state of the rule": (
        bad_rule(state=Inputs(9, 9).memory.to(NPU).transpose(-1, -2)),
        ValueError,
        "gaps between rows only",
    ),
    "another layout": (bad_chunks(layout="BSND"), NotImplementedError, CHUNKS + "layout"),
    "exponents of two": (bad_chunks(use_exp2=True), NotImplementedError, CHUNKS + "use_exp2"),
    "tokens beyond the sequences": (
        bad_chunks(cu_seqlens=[0, 1, 71, 198]),
        ValueError,
        CHUNKS + "cu_seqlens",
    ),
    "chunks out of order": (
        bad_chunks(chunk_indices=[*INDICES[2:], 0, 0]),
        ValueError,
        CHUNKS + "chunk_indices",
    ),
    "g by heads first": (
        bad_chunks(g=torch.zeros(1, HEADS, BOUNDS[-1])),
        ValueError,
        CHUNKS + "g: shape",
    ),
    "small heads": (
        bad_chunks(
            **{name: torch.zeros(1, HEADS, BOUNDS[-1], SIZE // 2, dtype=BF16) for name in "qkv"}
        ),
        ValueError,
        "head size 64",
    ),
}


@scenarios("run, error, message", REFUSED)
def test_error_names_argument(
    run: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run()


def test_base_calls_are_valid() -> None:
    for run in (bad_conv(FN), bad_conv(UPDATE), bad_rule(), bad_chunks()):
        run()
