"""Compare a file with the rows that transformers computes, and identify wrong rows.

Tolerance: in float32 no element differs by more than 1e-5 from transformers in float64. In bfloat16
a row may differ by 4 % of the norm, and an element by 16 % of the row's root mean square, from
transformers in float32; demo/compare.py gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_ascend_hsx.demo.compare import equal_rows, layer_eps, name_rows
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load

EXACT = 1e-5  # largest |difference| of an element in a float32 file
LOAD_SECONDS = 60.0
KNOWN_TOKENS = 20_000  # remembered by a reference; 200 MB for a tiny model in float64
# dtype of the reference: this rounding is then negligible.
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


class Served(NamedTuple):
    """A sequence that the engine has served.

    Attributes:
        name: name for the message.
        token_ids: prompt and generated tokens.
        begun, ended: times of any clock; ended is None while it runs.
    """

    name: str
    token_ids: tuple[int, ...]
    begun: int
    ended: int | None


class Reference:
    """The rows of any token sequence in all layers of a model, in a wider dtype than the model's.

    Remembers the last sequences. A prefix of a known sequence is cut from it: no row depends on a
    later token, so only rounding differs, by 1e-14 in float64 (test_oracle.py).

    Args:
        model: directory of the model.
        num_layers: layers of the model; ids 0 to num_layers are computed.
        dtype: dtype of the model: float32 or bfloat16.
    """

    def __init__(self, model: Path, num_layers: int, dtype: torch.dtype) -> None:
        self.model = model
        self._layer_ids = range(num_layers + 1)
        self.dtype = dtype
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def rows(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        """Return [tokens, layers, hidden] in the wider dtype, layers in the order of layer_ids."""
        wanted = tuple(token_ids)
        whole = next((known for known in self._known if known[: len(wanted)] == wanted), wanted)
        rows = self._known.pop(whole, None)
        if rows is None:
            rows = self._compute(whole)
        self._known[whole] = rows  # now the latest
        while sum(map(len, self._known)) > KNOWN_TOKENS:
            del self._known[next(iter(self._known))]
        return rows[: len(wanted), list(layer_ids)]

    def _compute(self, token_ids: Sequence[int]) -> torch.Tensor:
        return reference_hidden_states(self.model, token_ids, self._layer_ids, WIDER[self.dtype])


class Found(NamedTuple):
    """Contents of a wrong row.

    Attributes:
        what: description, or the wrong layer slots of a row that was found elsewhere.
        whose: request of the found row; empty for the same request.
        shift: position of the found row minus the position of the wrong row; None if not found.
    """

    what: str
    whose: str = ""
    shift: int | None = None


class Oracle:
    """Checks files of one model.

    Args:
        reference: reference of the model.
        layer_ids: layer ids given to the server.
    """

    def __init__(self, reference: Reference, layer_ids: Sequence[int]) -> None:
        self._reference = reference
        self._layer_ids = tuple(layer_ids)
        self._dtype = reference.dtype
        self._eps = layer_eps(reference.dtype, self._layer_ids)

    def verdict(
        self,
        path: Path,
        own: Served,
        num_rows: int,
        num_prompt_tokens: int,
        served: Iterable[Served] = (),
    ) -> str:
        """Return a description of the mistakes in a file, or the empty string.

        Args:
            path: the file. Waits until the lock is released.
            own: the file's request.
            num_rows: expected number of tokens, from the first on.
            num_prompt_tokens: number of prompt tokens among them.
            served: every sequence that the engine has served; own may be among them.
        """
        try:
            states = load(path, LOAD_SECONDS)
        except (HiddenStatesError, FileNotFoundError, TimeoutError) as error:
            return f"{own.name}: there is no file: {error}"
        others = [each for each in served if each.name != own.name]
        problem = self._labels(
            states, own.token_ids[:num_rows], num_prompt_tokens, others
        ) or self._rows(states, own, num_rows, others)
        return f"{own.name}: {problem}" if problem else ""

    def _labels(
        self,
        states: HiddenStates,
        expected: tuple[int, ...],
        num_prompt_tokens: int,
        others: Sequence[Served],
    ) -> str:
        """Return mistakes other than wrong rows."""
        found = tuple(states.token_ids.tolist())
        if found != expected:
            twins = [other.name for other in others if other.token_ids[: len(found)] == found]
            if twins:
                return f"token_ids are those of {twins[0]}"
            if found[: len(expected)] == expected or expected[: len(found)] == found:
                return f"it has {len(found)} tokens, expected {len(expected)}"
            first = next(
                index for index, (a, e) in enumerate(zip(found, expected, strict=False)) if a != e
            )
            return (
                f"token_ids differ from position {first} on: {found[first]}, expected "
                f"{expected[first]}"
            )
        if states.hidden_states.dtype != self._dtype or tuple(states.layer_ids) != self._layer_ids:
            return (
                f"it says {states.hidden_states.dtype} and layers {states.layer_ids}, expected "
                f"{self._dtype} and {self._layer_ids}"
            )
        if states.num_prompt_tokens != num_prompt_tokens:
            return (
                f"it says that {states.num_prompt_tokens} tokens are the prompt's, expected "
                f"{num_prompt_tokens}"
            )
        return ""

    # Rows

    def _rows(
        self, states: HiddenStates, own: Served, num_rows: int, others: Sequence[Served]
    ) -> str:
        actual = states.hidden_states.to(WIDER[self._dtype])
        expected = self._reference.rows(own.token_ids[:num_rows], self._layer_ids)
        if actual.shape != expected.shape:
            return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        bad = ~self._equal(actual, expected)  # [tokens, layers]
        if not bad.any():
            return ""
        order = self._layer_order(actual, expected)
        if order is not None:
            return f"layers in the wrong order: the slots hold what belongs in slots {order}"
        candidates = self._candidates(own, others)
        clauses: dict[tuple[str, str, int | None], list[int]] = {}
        largest = 0.0
        for row in bad.any(1).nonzero().flatten().tolist():
            found = self._identify(actual[row], bad[row], row, candidates)
            if found.what.startswith("garbage"):
                largest = max(largest, float((actual[row] - expected[row]).abs().max()))
            clauses.setdefault((found.what, found.whose, found.shift), []).append(row)
        text = "; ".join(_clause(rows, *key) for key, rows in clauses.items())
        return f"{text} (off by at most {largest:.2g})" if largest else text

    def _equal(self, a: torch.Tensor, e: torch.Tensor, slots: slice = slice(None)) -> torch.Tensor:
        """Compare rows [..., layers, hidden]; `slots` are e's layers. Returns [..., layers]."""
        if self._dtype is torch.float32:
            return (a - e).abs().amax(-1) <= EXACT
        return equal_rows(a, e, self._eps[slots])

    def _layer_order(self, actual: torch.Tensor, expected: torch.Tensor) -> list[int] | None:
        """Return the layer in each slot, if every slot holds some layer."""
        slots = [slice(index, index + 1) for index in range(expected.shape[1])]
        order = [
            next(
                (m.start for m in slots if self._equal(actual[:, i], expected[:, m], m).all()), None
            )
            for i in slots
        ]
        return None if None in order else order

    def _candidates(self, own: Served, others: Sequence[Served]) -> list[tuple[str, torch.Tensor]]:
        """Return (whose, [tokens, layers, hidden]) of all computed rows, likely ones first."""
        rows = [("", self._reference.rows(own.token_ids, self._layer_ids))]
        for other in others:
            stale = other.ended is not None and other.ended < own.begun
            whose = f"{other.name}, which had ended before (stale)" if stale else other.name
            rows.append((whose, self._reference.rows(other.token_ids, self._layer_ids)))
        return rows

    def _identify(
        self,
        row: torch.Tensor,
        bad: torch.Tensor,
        position: int,
        candidates: Sequence[tuple[str, torch.Tensor]],
    ) -> Found:
        """Identify the contents of the wrong layers of a row [layers, hidden]."""
        where = "" if bad.all() else f" in layer slots {bad.nonzero().flatten().tolist()}"
        if not row.isfinite().all():
            return Found(f"not finite{where}")
        if (row[bad] == 0).all():
            return Found(f"zero{where}")
        for whose, rows in candidates:
            sources = self._equal(row, rows)[:, bad].all(1).nonzero().flatten().tolist()
            if sources:
                return Found(
                    where, whose, min(sources, key=lambda source: abs(source - position)) - position
                )
        return Found(f"garbage{where}: in no request's rows")


def _clause(rows: list[int], what: str, whose: str, shift: int | None) -> str:
    if shift is None:
        return f"{name_rows(rows)} {what}"
    if not whose:
        return f"{name_rows(rows)} shifted by {shift:+d}{what}"
    first, last = rows[0] + shift, rows[-1] + shift
    return (
        f"{name_rows(rows)} from {whose}, position {first}"
        + (f" to {last}" if last > first else "")
        + what
    )
