"""The self-test after loading: send known rows through every step of an extracted row.

The test runs before vLLM measures memory, and launches each operator of an engine step for the
first time. If rows are wrong or the device fails, the start ends with an error that names the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

import torch

from vllm_ascend_hsx.drafter.landing import HostChunk, Lander
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.shapes import pinned_size, turned_rows
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache, StagingSlot, npu
from vllm_ascend_hsx.protocol.errors import UserError

_LANDS_IN_S = 60.0
_RING_BYTES = 1 << 20
_PERIOD = 127  # rows of the pattern; values from -63 to 63 are exact in bfloat16
_STRIDE = 3  # offset in rows between two layers, because rows and layers must differ
_RTOL, _ATOL = 2**-6, 1.0  # for rows that are turned back; the standard deviation is 37
_CHECK_DEVICE = "Run `hsx doctor`: the versions of CANN, torch_npu and the driver must fit."


class SelfTestError(UserError):
    """A step of the self-test has failed."""


class Difference(NamedTuple):
    """The first wrong element: the index of the row, and a description."""

    row: int
    text: str


class Step(Enum):
    """A step on the path of a row, and the remedy for a failure."""

    RING = (
        "ring",
        (
            "Let each worker pin more memory (ulimit -l, the container's limit), or install driver "
            "25.5 or newer."
        ),
    )
    UPLOAD = "upload", _CHECK_DEVICE
    STACK = "stack", _CHECK_DEVICE
    TURN_BACK = "turn back", f'{_CHECK_DEVICE} The option rotation="keep" leaves rows rotated.'
    COPY = "copy", f"{_CHECK_DEVICE} Copies need pinned memory and a stream of their own."

    def __init__(self, label: str, remedy: str) -> None:
        self.label, self.remedy = label, remedy

    def failed(self, problem: str) -> SelfTestError:
        """Return an error that names the step."""
        return SelfTestError("self-test", self.label, f"has failed: {problem}", self.remedy)


def run_self_test(staging: StagingCache) -> None:
    """Send known rows through the first slot and a ring of 1 MiB, and compare them.

    Args:
        staging: slots that no request has used.

    Raises:
        SelfTestError: if a step fails or produces wrong rows.
    """
    fill = Step.STACK if staging.matrix is None else Step.TURN_BACK
    rows = Pattern(staging)
    with _attributed(Step.RING):
        row_bytes = rows.shape[1:].numel() * rows.table.element_size()
        ring = PinnedRing(
            pinned_size(max(_RING_BYTES, 2 * row_bytes)), rows.shape[1:], rows.table.dtype
        )
    with _attributed(Step.UPLOAD):
        target_rows = rows.upload()
        npu().synchronize()
    with _attributed(fill):
        staging.write(target_rows, [Span("self-test", 0, rows.shape[0], 0)])
        npu().synchronize()
    slot = staging.take()
    assert slot is not None
    if staging.matrix is not None:
        with _attributed(fill):
            rows.turn_back(staging.matrix)
    with _attributed(Step.COPY):
        wrong = _land(slot, ring, rows)
    if wrong is not None:
        with _attributed(fill):
            in_slot = rows.difference(wrong.row, slot.rows[wrong.row : wrong.row + 1].cpu())
        raise (fill if in_slot else Step.COPY).failed(wrong.text)


class Pattern:
    """Known rows, in the form in which the target returns rows. They differ by position and layer.

    Args:
        staging: as for run_self_test.

    Attributes:
        shape: (rows, layers, hidden) of the rows in the slot.
        table: distinct rows, [127, hidden] in the model's dtype.
    """

    def __init__(self, staging: StagingCache) -> None:
        _, slot_rows, num_layers, hidden_size = staging.rows.shape
        self.shape = torch.Size((turned_rows(slot_rows), num_layers, hidden_size))
        self._order, self._device = staging.layer_order, staging.rows.device
        self._rtol = self._atol = 0.0
        positions = torch.arange(_PERIOD, device="cpu")
        values = positions[:, None] * 37 + torch.arange(hidden_size, device="cpu") * 11
        self.table = (values % _PERIOD - _PERIOD // 2).to(staging.rows.dtype)

    def upload(self) -> list[torch.Tensor]:
        """Return one [rows, hidden] per layer on the device, in the target's order."""
        num_rows, num_layers, _ = self.shape
        positions = torch.arange(num_rows + _STRIDE * num_layers, device="cpu")
        together = self.table[positions % _PERIOD].to(self._device)
        return [
            together[_STRIDE * layer : _STRIDE * layer + num_rows] for layer in range(num_layers)
        ]

    def turn_back(self, matrix: torch.Tensor) -> None:
        """Expect rows multiplied by `matrix`, float32 [hidden, hidden] on the device.

        Raises:
            SelfTestError: if the first row of the matrix is not orthogonal to the others.
        """
        on_host = matrix.cpu()
        unit = torch.zeros(len(on_host), device="cpu")
        unit[0] = 1.0
        if not torch.allclose(on_host @ on_host[0], unit, atol=1e-2):
            raise Step.TURN_BACK.failed("the rotation on the device is not orthogonal")
        self.table = (self.table.float() @ on_host).to(self.table.dtype)
        self._rtol, self._atol = _RTOL, _ATOL

    def difference(self, first: int, rows: torch.Tensor) -> Difference | None:
        """Compare rows with the expected rows. Return None if they are equal.

        Args:
            first: index of the first row.
            rows: [rows, layers, hidden] on the host.
        """
        layers = torch.tensor(self._order, device="cpu")
        index = torch.arange(first, first + len(rows), device="cpu")[:, None] + _STRIDE * layers
        expected = self.table[index % _PERIOD].float()
        same = torch.isclose(rows.float(), expected, self._rtol, self._atol)
        if same.all():
            return None
        row, layer, element = (~same).nonzero()[0].tolist()
        got, wanted = float(rows[row, layer, element]), float(expected[row, layer, element])
        text = (
            f"row {first + row}, layer {layer}, element {element} is {got:g} instead of {wanted:g}"
        )
        return Difference(first + row, text)


def _land(slot: StagingSlot, ring: PinnedRing, rows: Pattern) -> Difference | None:
    """Copy the slot to the host and compare the rows.

    Raises:
        TimeoutError: if the rows do not reach the host in time.
        Exception: from the lander.
    """
    found, errors, landed = list[Difference](), list[Exception](), 0

    def compare(chunk: HostChunk) -> None:
        nonlocal landed
        if not found and (difference := rows.difference(landed, chunk.rows)):
            found.append(difference)
        landed += len(chunk.rows)
        chunk.release(chunk.spans)

    lander = Lander(ring, slot.rows.device, compare, errors.append)
    lander.submit(slot)
    if not lander.close(_LANDS_IN_S):
        lander.abandon()
        raise TimeoutError(
            f"{landed} of {slot.num_rows} rows reached the host within {_LANDS_IN_S:g} s"
        )
    if errors:
        raise errors[0]
    return found[0] if found else None


@contextmanager
def _attributed(step: Step) -> Iterator[None]:
    """Convert an exception into a SelfTestError that names the step."""
    try:
        yield
    except SelfTestError:
        raise
    except Exception as error:
        problem = (
            error.problem
            if isinstance(error, UserError)
            else str(error).partition("\n")[0].rstrip(".")
        )
        raise step.failed(f"{type(error).__name__}: {problem}") from error
