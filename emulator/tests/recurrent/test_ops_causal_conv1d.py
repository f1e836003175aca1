"""The causal convolution of GatedDeltaNet against the definition, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated import close, int32, random, scenarios

from ascend_npu_emulator.ops.recurrent.causal_conv1d import npu_causal_conv1d_custom

PAD = -1


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Convolve x [tokens, channels] after `before` [width - 1, channels], in float64."""
    inputs, out = torch.cat((before, x)).double(), torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        out[token] = 0.0 if bias is None else bias.double()
        for tap in range(weight.shape[0]):
            out[token] += inputs[token + tap] * weight[tap].double()
    return out / (1 + (-out).exp()) if silu else out


def conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, **options: Any
) -> torch.Tensor:
    optional = (
        "bias",
        "query_start_loc",
        "cache_indices",
        "initial_state_mode",
        "num_accepted_tokens",
    )
    given = {
        **{f"{name}_opt": None for name in optional},
        "activation_mode": 1,
        "pad_slot_id": PAD,
        "run_mode": 0,
        **options,
    }
    output = torch.full_like(x, 77.0)
    assert npu_causal_conv1d_custom(output, x, weight, state, **given) is output
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_prefill_convolves_state_and_sequence(width: int, silu: bool, dtype: torch.dtype) -> None:
    # Sequences: new, with a state, shorter than the taps, without tokens, and padding.
    bounds, rows = [0, 7, 12, 13, 13, 16], [4, 2, 0, 3, PAD]
    x, weight, bias = (
        random(16, 32, dtype=dtype),
        random(width, 32, seed=1, dtype=dtype),
        random(32, seed=2, dtype=dtype),
    )
    state = random(5, width + 1, 32, seed=3, dtype=dtype)
    before, has_state = state.clone(), [False, True, True, True, True]
    out = conv(
        x,
        weight,
        state,
        bias_opt=bias,
        query_start_loc_opt=int32(*bounds),
        cache_indices_opt=int32(*rows),
        initial_state_mode_opt=torch.tensor(has_state),
        activation_mode=int(silu),
    )
    for sequence, (first, last) in enumerate(pairwise(bounds[:-1])):
        begin = before[rows[sequence], : width - 1] * has_state[sequence]
        close(out[first:last], convolved(x[first:last], weight, begin, bias, silu))
        if last > first:
            before[rows[sequence], : width - 1] = torch.cat((begin, x[first:last]))[-(width - 1) :]
    assert (out[13:] == 77).all()
    assert torch.equal(state, before)


def test_updates_token_by_token_equal_one_prefill() -> None:
    x, weight, state = random(6, 16), random(4, 16, seed=1), torch.zeros(3, 3, 16)
    whole = conv(
        x,
        weight,
        state.clone(),
        query_start_loc_opt=torch.tensor([0, 6]),
        cache_indices_opt=torch.tensor([2]),
    )
    for token in range(6):
        # The second sequence is padding. Only the first column of the table is used.
        pair = torch.stack((x[token], x[0]))
        table = torch.tensor([[2, 1], [PAD, PAD]], dtype=torch.int32)
        out = conv(
            pair,
            weight,
            state,
            query_start_loc_opt=torch.tensor([0, 1, 1]),
            cache_indices_opt=table,
            run_mode=1,
        )
        torch.testing.assert_close(out[0], whole[token])
        assert (out[1] == 77).all()
    assert torch.equal(state[2], x[-3:])
    assert (state[:2] == 0).all()


def test_an_update_takes_several_tokens_of_a_sequence() -> None:
    x, weight, state = random(5, 16), random(4, 16, seed=1), random(2, 3, 16, seed=2)
    exact = torch.cat(
        (
            convolved(x[:3], weight, state[1], None, False),
            convolved(x[3:], weight, state[0], None, False),
        )
    )
    bounds, rows = torch.tensor([0, 3, 5]), torch.tensor([1, 0])
    out = conv(
        x,
        weight,
        state,
        query_start_loc_opt=bounds,
        cache_indices_opt=rows,
        activation_mode=0,
        run_mode=1,
    )
    close(out, exact)
    assert torch.equal(state[1], x[:3])


def test_rejected_drafts_do_not_change_the_convolution() -> None:
    """Accept one, three and two of three tokens. The next step follows the accepted tokens only."""
    x, weight, state = random(20, 16), random(4, 16, seed=1), torch.zeros(2, 5, 16)
    state[1, :3] = x[:3]
    bounds, rows, real, accepted = torch.tensor([0, 3]), torch.tensor([1]), 3, 1
    for next_accepted in (1, 3, 2, 1):
        step = torch.cat((x[real : real + next_accepted], random(3 - next_accepted, 16, seed=9)))
        out = conv(
            step,
            weight,
            state,
            query_start_loc_opt=bounds,
            cache_indices_opt=rows,
            activation_mode=0,
            run_mode=1,
            num_accepted_tokens_opt=torch.tensor([accepted]),
        )
        exact = convolved(step, weight, x[real - 3 : real], None, False)
        close(out, exact)
        real, accepted = real + next_accepted, next_accepted


def test_padding_does_not_change_a_state() -> None:
    x, weight, state = random(4, 16), random(4, 16, seed=1), random(3, 3, 16, seed=2)
    expected = state.clone()
    expected[0] = torch.cat((state[0, 1:], x[2:3]))
    conv(x, weight, state, cache_indices_opt=int32(PAD, PAD, 0, PAD), run_mode=1)
    assert torch.equal(state, expected)


def wrong(**changes: Any) -> Callable[[], object]:
    right = {"x": torch.ones(2, 16), "weight": torch.ones(4, 16), "state": torch.ones(2, 3, 16)}
    right["query_start_loc_opt"] = torch.tensor([0, 2])
    return lambda: conv(**right | changes)


ONES = torch.ones(1)
WRONG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "accepted tokens in a prefill": (
        wrong(num_accepted_tokens_opt=ONES),
        "num_accepted_tokens_opt",
    ),
    "five taps": (wrong(weight=torch.ones(5, 16)), "width 5"),
    "channels that are no multiple of 16": (
        wrong(weight=torch.ones(4, 24), x=torch.ones(2, 24)),
        "24 channels",
    ),
    "a transposed state": (wrong(state=torch.ones(2, 16, 3).transpose(1, 2)), "contiguous"),
    "a state too short for the taps": (wrong(state=torch.ones(2, 2, 16)), "places"),
    "a prefill without bounds": (wrong(query_start_loc_opt=None), "query_start_loc_opt"),
    "an update with new sequences": (
        wrong(run_mode=1, initial_state_mode_opt=ONES),
        "initial_state_mode_opt",
    ),
}


@scenarios("call, message", WRONG_CALLS)
def test_error_names_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"npu_causal_conv1d_custom.*{message}"):
        call()


def test_base_call_is_valid() -> None:
    wrong()()
