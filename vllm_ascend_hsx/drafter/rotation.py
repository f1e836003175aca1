"""Rows of rotated targets (QuaRot), turned back into the model's own basis."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TurnBack:
    """Undo the rotation of rows on their way to a slot: X = (X @ Q) @ Q.T, in float32.

    Its buffers are allocated with it: see StagingCache.

    Args:
        rotation: Q, float32 [hidden, hidden], orthogonal.
        most_rows: rows of a buffer; more are turned one buffer after the other.
    """

    def __init__(self, rotation: torch.Tensor, most_rows: int) -> None:
        self._transposed = rotation.T.contiguous()
        self._rotated = rotation.new_empty(most_rows, len(rotation))
        self._turned = torch.empty_like(self._rotated)

    @property
    def matrix(self) -> torch.Tensor:
        """Qᵀ on the device, float32 [hidden, hidden]."""
        return self._transposed

    def __call__(self, layers: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write rows on the current stream.

        Args:
            layers: one [rows, hidden] per layer of `out`.
            out: [rows, layers, hidden], in the same dtype.
        """
        for begin in range(0, len(out), len(self._rotated)):
            for index, layer in enumerate(layers):
                rotated = layer[begin : begin + len(self._rotated)]
                count = len(rotated)
                self._rotated[:count].copy_(rotated)
                torch.mm(self._rotated[:count], self._transposed, out=self._turned[:count])
                out[begin : begin + count, index].copy_(self._turned[:count])
