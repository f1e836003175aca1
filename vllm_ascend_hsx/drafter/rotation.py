"""Turn rows of rotated targets (QuaRot) back into the basis of the original model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TurnBack:
    """Undo the rotation of rows before they are staged: X = (X @ Q) @ Q.T, in float32.

    The constructor allocates all device memory; see StagingCache. The matrix is copied to the
    device with the first rows after the start, and with the first rows after `before_sleep`.

    Args:
        rotation: Q, float32 [hidden, hidden], orthogonal, on the host.
        most_rows: rows of a buffer. More rows are processed in several passes.
        device: the worker's NPU.
    """

    def __init__(self, rotation: torch.Tensor, most_rows: int, device: torch.device) -> None:
        self._on_host: torch.Tensor | None = rotation.T.contiguous()
        self._transposed = torch.empty_like(self._on_host, device=device)
        self._rotated = self._transposed.new_empty(most_rows, len(rotation))
        self._turned = torch.empty_like(self._rotated)

    @property
    def matrix(self) -> torch.Tensor:
        """Qᵀ on the device, float32 [hidden, hidden]."""
        return self._transposed

    def before_sleep(self) -> None:
        """Copy the matrix to the host, because sleep level 2 discards device memory.

        Raises:
            RuntimeError: if the device has failed.
        """
        if self._on_host is None:
            self._on_host = self._transposed.cpu()

    def __call__(self, layers: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write turned rows to `out`, on the current stream.

        Args:
            layers: one [rows, hidden] per layer of `out`.
            out: [rows, layers, hidden], in the same dtype.
        """
        if self._on_host is not None:
            self._transposed.copy_(self._on_host)
            self._on_host = None
        for begin in range(0, len(out), len(self._rotated)):
            for index, layer in enumerate(layers):
                rotated = layer[begin : begin + len(self._rotated)]
                count = len(rotated)
                self._rotated[:count].copy_(rotated)
                torch.mm(self._rotated[:count], self._transposed, out=self._turned[:count])
                out[begin : begin + count, index].copy_(self._turned[:count])
