"""Compare extracted hidden states with a reference, and diagnose differences."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

# In units of the dtype's eps (2**-7 for bfloat16): relative error of a row at most 5 eps = 4 %,
# error of an element at most 20 eps of the row's root mean square. Measured on the tiny models,
# transformers in bfloat16 against float32: 2.1 % and 8 %. The closest two different rows of one
# layer are 9 % apart.
ROW_TOLERANCE = 5.0
ELEMENT_TOLERANCE = 20.0
# Two right implementations of a quantised target differ more: rounding decides the int8 value of an
# element.
QUANTISED = 2.0
# The tolerance holds for up to this many layers. Each layer rounds on top of the previous one, so
# in deeper models the error grows like a random walk.
TOLERANCE_DEPTH = 4
# Summation order alone causes larger differences in float32 than the dtype's eps.
LEAST_EPS = 1e-5


class Comparison(NamedTuple):
    """The result of compare().

    `reason` is empty for a match and otherwise describes the difference.
    """

    max_abs_difference: float
    verdict: Literal["match", "mismatch"]
    reason: str

    @property
    def matches(self) -> bool:
        return self.verdict == "match"


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    layer_ids: Sequence[int] | None = None,
    roundings: float = 1.0,
) -> Comparison:
    """Compare extracted rows, [tokens, layers, hidden], with the reference.

    The dtype sets the tolerance.

    The reason names rows that are missing, not finite, zero, shifted, permuted or foreign, and
    layers in the wrong order. With layer_ids, deep layers get a wider tolerance: sqrt(id / 4) times
    that of the fourth. It is multiplied by roundings: QUANTISED for a quantised target.
    """
    if actual.shape != expected.shape:
        return Comparison(
            float("inf"), "mismatch", f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        )
    eps = layer_eps(actual.dtype, layer_ids or [0] * actual.shape[1]) * roundings
    a, e = actual.float().cpu(), expected.float().cpu()
    if not a.isfinite().all():
        rows = (~a.isfinite()).any(-1).any(-1).nonzero().flatten().tolist()
        return Comparison(
            float("nan"), "mismatch", f"{name_rows(rows)} not finite (NaN or infinity)"
        )
    difference = (a - e).abs()
    largest = difference.max().item() if difference.numel() else 0.0
    bad = ~equal_rows(a, e, eps)  # [tokens, layers]
    if not bad.any():
        return Comparison(largest, "match", "")
    return Comparison(largest, "mismatch", _diagnose(a, e, bad, eps))


def layer_eps(dtype: torch.dtype, layer_ids: Sequence[int]) -> torch.Tensor:
    """Return the rounding error of an element per layer, float32 [layers]: the tolerances' unit."""
    depths = torch.tensor([max(TOLERANCE_DEPTH, i) for i in layer_ids])
    return max(torch.finfo(dtype).eps, LEAST_EPS) * (depths / TOLERANCE_DEPTH).sqrt()


def equal_rows(a: torch.Tensor, e: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Return bool [...]: True for rows of a [..., hidden] equal to e's within the tolerance.

    eps (see layer_eps) broadcasts to that shape.
    """
    difference = a - e
    rms = e.square().mean(-1).sqrt()
    near = difference.square().mean(-1).sqrt() <= ROW_TOLERANCE * eps * rms
    return near & (difference.abs().amax(-1) <= ELEMENT_TOLERANCE * eps * rms)


def _diagnose(a: torch.Tensor, e: torch.Tensor, bad: torch.Tensor, eps: torch.Tensor) -> str:
    zero = ((a == 0).all(-1) & bad).any(-1).nonzero().flatten().tolist()
    if zero:
        return f"{name_rows(zero)} zero"
    order = [
        next((m for m in range(e.shape[1]) if equal_rows(a[:, i], e[:, m], eps[m]).all()), None)
        for i in range(e.shape[1])
    ]
    if None not in order:
        return f"layers in the wrong order: the slots hold what belongs in slots {order}"
    # The deepest wrong layer distinguishes tokens best: in layer 0 equal tokens have equal rows.
    layer = int(bad.any(0).nonzero().max())
    rows = bad[:, layer].nonzero().flatten().tolist()
    sources = {row: _source(a[row, layer], e[:, layer], eps[layer]) for row in rows}
    moved = {row: source for row, source in sources.items() if source is not None}
    if len(moved) == len(rows):
        shifts = {source - row for row, source in moved.items()}
        if len(shifts) == 1:
            return f"{name_rows(rows)} shifted by {shifts.pop():+d}"
        if sorted(moved) == sorted(moved.values()):
            return f"{name_rows(rows)} permuted: {_examples(moved)}"
        return f"{name_rows(rows)} from other positions: {_examples(moved)}"
    difference = (a - e).norm(dim=-1) / e.norm(dim=-1)
    worst = int(difference.argmax())
    token, slot = divmod(worst, e.shape[1])
    wrong = bad.any(-1).nonzero().flatten().tolist()
    text = (
        f"{name_rows(wrong)} wrong (row {token}, layer slot {slot}: relative error "
        f"{difference.max().item():.1%})"
    )
    return (
        f"{text}; {name_rows(list(moved))} from other positions: {_examples(moved)}"
        if moved
        else text
    )


def _source(row: torch.Tensor, candidates: torch.Tensor, eps: torch.Tensor) -> int | None:
    """Return the index of the expected row that this row equals, if any."""
    nearest = int((candidates - row).norm(dim=-1).argmin())
    return nearest if equal_rows(row, candidates[nearest], eps) else None


def _examples(moved: dict[int, int]) -> str:
    return ", ".join(f"row {row} holds row {source}" for row, source in list(moved.items())[:3])


def name_rows(rows: list[int]) -> str:
    """Return `row 3 is` or `rows 3-7, 9 are`, with at most five ranges of ascending rows."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][1] == row - 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:5]) + (
        ", ..." if len(runs) > 5 else ""
    )
    return f"row {text} is" if len(rows) == 1 else f"rows {text} are"
