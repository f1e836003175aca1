"""compare() accepts rounding, and names every known mistake of extraction."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.demo.compare import compare

TOKENS, LAYERS, HIDDEN = 24, 3, 64


def states(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Return [tokens, LAYERS, HIDDEN] of unrelated rows."""
    return torch.randn(tokens, LAYERS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def changed(change: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    rows = states().to(torch.bfloat16)
    result = change(rows)
    return rows if result is None else result


def zero_rows(rows: torch.Tensor) -> None:
    rows[4:7] = 0


def one_layer_zero(rows: torch.Tensor) -> None:
    rows[5, 1] = 0


def nan_row(rows: torch.Tensor) -> None:
    rows[9, 2, 3] = torch.nan


def shift_from_eight(rows: torch.Tensor) -> None:
    rows[8:-1] = rows[9:].clone()
    rows[-1] = states(seed=1)[0]


def shift_all_but_first(rows: torch.Tensor) -> None:
    rows[1:] = rows[:-1].clone()


def swap(rows: torch.Tensor) -> None:
    rows[[3, 7]] = rows[[7, 3]]


def repeat(rows: torch.Tensor) -> None:
    rows[[10, 12]] = rows[[2, 5]]


def foreign(rows: torch.Tensor) -> None:
    rows[16:20] = states(seed=1)[:4]


def one_element(rows: torch.Tensor) -> None:
    rows[11, 0, 40] += 0.5


MISTAKES = {
    zero_rows: "rows 4-6 are zero",
    one_layer_zero: "row 5 is zero",
    nan_row: "row 9 is not finite",
    shift_all_but_first: "rows 1-23 are shifted by -1",
    shift_from_eight: "rows 8-23 are wrong .* from other positions: row 8 holds row 9",
    swap: "rows 3, 7 are permuted: row 3 holds row 7, row 7 holds row 3",
    repeat: "rows 10, 12 are from other positions: row 10 holds row 2, row 12 holds row 5",
    foreign: "rows 16-19 are wrong .row 1[6-9], layer slot [0-2]: relative error 1",
    one_element: "row 11 is wrong .row 11, layer slot 0: relative error [4-9]",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_mistake_in_rows_is_named(mistake: Callable[[torch.Tensor], None]) -> None:
    result = compare(changed(mistake), states())
    assert result.verdict == "mismatch"
    assert not result.matches
    assert re.search(MISTAKES[mistake], result.reason), result.reason


def test_layers_in_the_wrong_order_are_named() -> None:
    result = compare(states()[:, [2, 0, 1]].to(torch.bfloat16), states())
    assert (
        result.reason == "layers in the wrong order: the slots hold what belongs in slots [2, 0, 1]"
    )


def test_the_same_layer_twice_is_named() -> None:
    """Upstream's result for a layer id out of range."""
    assert "[1, 1, 2]" in compare(states()[:, [1, 1, 2]].to(torch.bfloat16), states()).reason


def test_missing_rows_are_reported_as_a_shape() -> None:
    assert (
        compare(states()[:-2], states()).reason
        == f"shape [{TOKENS - 2}, {LAYERS}, {HIDDEN}], expected [{TOKENS}, {LAYERS}, {HIDDEN}]"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_to_the_dtype_is_a_match(dtype: torch.dtype) -> None:
    result = compare(states().to(dtype), states())
    assert result.matches
    assert result.reason == ""
    assert result.max_abs_difference <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_finer_dtype_has_a_finer_tolerance(dtype: torch.dtype) -> None:
    """A rounding error in bfloat16 is a mistake in the other dtypes."""
    noise = states() * (1 + 0.02 * states(seed=3))
    assert compare(noise.to(torch.bfloat16), states()).matches
    assert not compare(noise.to(dtype), states()).matches


def test_deep_layers_have_a_wider_tolerance() -> None:
    """Six per cent is a mistake after four layers and rounding after thirty-six."""
    noise = (states() + 0.06 * states(seed=3)).to(torch.bfloat16)
    assert not compare(noise, states()).matches
    assert not compare(noise, states(), [1, 2, 36]).matches
    assert compare(noise, states(), [36, 48, 62]).matches


def test_empty_rows_match() -> None:
    assert compare(states(0), states(0)).matches


@given(st.integers(1, 40), st.data())
def test_any_rearrangement_of_rows_is_detected_and_named(tokens: int, data: st.DataObject) -> None:
    sources = data.draw(st.lists(st.integers(0, tokens - 1), min_size=tokens, max_size=tokens))
    expected = states(tokens)
    result = compare(expected[sources].to(torch.bfloat16), expected)
    wrong = [row for row, source in enumerate(sources) if row != source]
    assert result.matches == (not wrong)
    if wrong:
        assert f"{wrong[0]}" in result.reason.partition(" ")[2].partition(" ")[0]
        assert any(word in result.reason for word in ("shifted", "permuted", "other positions"))
