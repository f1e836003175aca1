"""Quantise rows to float8_e4m3fn with a scale per token."""

from __future__ import annotations

import functools
import mmap
import threading

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.protocol.rows import RowFormat

_FP8_MAX = 448.0  # largest value of float8_e4m3fn
_LEAST_SCALE = 1e-12  # scale of a row of zeros; both as in hs_connectors 0.9.0 (fp8_utils.py)
# Elements quantised at a time: 1 MiB of float32 stays in the processor's cache.
_AT_A_TIME = 256 << 10

Scales = npt.NDArray[np.float32]


class Fp8PerToken:
    """Encodes the rows of one request, bit for bit like hs_connectors 0.9.0.

    The scale of a token is max(largest magnitude in all layers / 448, 1e-12). Several threads may
    use an encoder for different positions.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self._row_format = row_format
        self._scales: list[tuple[int, Scales]] = []  # first position and scales of each write

    def encode(self, first: int, data: memoryview) -> memoryview:
        """Quantise rows from token position `first` on, and keep their scales.

        `data` are whole rows in the model's dtype. The returned bytes are valid until the calling
        thread encodes again.
        """
        stored, scales = _workspace().quantize(data, self._row_format)
        self.keep(first, scales)
        return stored

    def keep(self, first: int, scales: Scales) -> None:
        """Keep the scales, float32 [rows], of rows from token position `first` on."""
        self._scales.append((first, scales))

    def scales(self, tokens: int) -> Scales:
        """Return float32 [tokens], the scale last computed for each position."""
        joined = np.zeros(tokens, np.float32)
        for first, scales in self._scales:
            joined[first : first + len(scales)] = scales[: max(0, tokens - first)]
        return joined


def encoder_for(row_format: RowFormat) -> Fp8PerToken | None:
    """Return a new encoder for one request, or None if rows are stored in the model's dtype."""
    return Fp8PerToken(row_format) if row_format.is_quantized else None


class _Workspace(threading.local):
    """Memory for quantising, one per thread. It grows to the largest write and is reused."""

    def __init__(self) -> None:
        import torch  # only here: files are also written and read without torch

        _use_one_thread()
        # For each dtype: torch's dtype, the integer of the same size, and the magnitude's bits.
        self._dtypes = {
            "BF16": (torch.bfloat16, torch.int16, 0x7FFF),
            "F16": (torch.float16, torch.int16, 0x7FFF),
            "F32": (torch.float32, torch.int32, 0x7FFFFFFF),
        }
        self._stored = memoryview(b"")
        self._wide = torch.empty(0)

    def quantize(self, data: memoryview, row_format: RowFormat) -> tuple[memoryview, Scales]:
        """Return the bytes to store, page-aligned for O_DIRECT, and the scales float32 [rows]."""
        import torch

        elements = row_format.stored_row_bytes
        count = data.nbytes // row_format.row_bytes
        scales = torch.empty(count)
        if not count:
            return memoryview(b""), scales.numpy()
        if data.readonly:  # torch has no read-only tensors
            data = memoryview(bytearray(data))
        if len(self._stored) < count * elements:
            self._stored = memoryview(mmap.mmap(-1, count * elements))
        stored = self._stored[: count * elements]
        dtype, bits, magnitude = self._dtypes[row_format.dtype]
        rows = torch.frombuffer(data, dtype=dtype).view(count, elements)
        target = torch.frombuffer(stored, dtype=torch.float8_e4m3fn).view(count, elements)
        step = min(count, max(1, _AT_A_TIME // elements))
        if self._wide.numel() < step * elements:
            self._wide = torch.empty(step * elements)
        for begin in range(0, count, step):
            part = rows[begin : begin + step]
            wide = self._wide[: part.numel()].view(part.shape)
            # Magnitudes of floats have the order of their bits as integers, up to infinity and NaN,
            # and integers are compared several times as fast.
            masked = wide.view(-1).view(bits)[: part.numel()].view(part.shape)
            torch.bitwise_and(part.view(bits), magnitude, out=masked)
            scale = scales[begin : begin + step]
            scale.copy_(masked.amax(dim=1).view(dtype)).div_(_FP8_MAX).clamp_(min=_LEAST_SCALE)
            source = part if part.dtype == torch.float32 else wide.copy_(part)
            torch.div(source, scale.unsqueeze(1), out=wide)
            target[begin : begin + step].copy_(wide)
        return stored, scales.numpy()


@functools.cache
def _workspace() -> _Workspace:
    return _Workspace()


def _use_one_thread() -> None:
    """Limit torch's operations in this thread to one core, because each writer uses one core."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    # This also set the default for threads that use torch for the first time later. Restore it.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()
