"""How rows become what is stored: as they are, or as float8_e4m3fn with a scale per token."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.protocol.rows import RowFormat

_FP8_MAX = 448.0  # the largest value of float8_e4m3fn
_LEAST_SCALE = 1e-12  # of a row of zeros; both are hs_connectors' (0.9.0, fp8_utils.py)
_AT_A_TIME = 256 << 10  # elements that are quantised at a time: 1 MiB of float32, which stays in the processor's cache

Scales = npt.NDArray[np.float32]


class RowEncoder(ABC):
    """The rows of one request on their way to where they are stored. Several threads may use it, not for the same position at once."""

    @abstractmethod
    def encode(self, first: int, data: memoryview) -> memoryview:
        """What is stored of rows.

        Args:
            first: token position of the first row.
            data: the bytes of whole rows in the model's dtype.

        Returns:
            The bytes of as many stored rows. They are the calling thread's until it encodes the next rows of any request.
        """

    @abstractmethod
    def scales(self, tokens: int) -> Scales | None:
        """float32 [tokens], of the rows that were encoded last for each position; None if rows are stored as they are."""


class Passthrough(RowEncoder):
    """Rows are stored as the model computed them; nothing is copied."""

    def encode(self, first: int, data: memoryview) -> memoryview:
        return data

    def scales(self, tokens: int) -> None:
        return None


class Fp8PerToken(RowEncoder):
    """float8_e4m3fn, with scale = max(largest magnitude of the token's layers / 448, 1e-12): bit for bit hs_connectors' (0.9.0).

    Args:
        row_format: quantised.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self._row_format = row_format
        self._mutex = threading.Lock()  # guards the next one, which is replaced when it grows
        self._scales = np.zeros(0, np.float32)

    def encode(self, first: int, data: memoryview) -> memoryview:
        workspace = _of_thread()
        stored, scales = workspace.quantize(data, self._row_format)
        with self._mutex:
            end = first + len(scales)
            if end > len(self._scales):
                grown = np.zeros(max(end, 2 * len(self._scales)), np.float32)
                grown[: len(self._scales)] = self._scales
                self._scales = grown
            self._scales[first:end] = scales
        return stored

    def scales(self, tokens: int) -> Scales:
        with self._mutex:
            assert tokens <= len(self._scales), f"scales of {tokens} tokens were asked for, and rows of {len(self._scales)} encoded"
            return self._scales[:tokens].copy()


def encoder_for(row_format: RowFormat) -> RowEncoder:
    """A new encoder for one request."""
    return Fp8PerToken(row_format) if row_format.is_quantized else Passthrough()


class _Workspace:
    """The memory in which one thread quantises. It grows to the largest write and is used again."""

    def __init__(self) -> None:
        import torch  # not before it is needed: files are also written, and read, where there is no torch

        _use_one_thread()
        # Of each dtype: its own, the integer of its size, and the bits of that which are its magnitude.
        self._dtypes = {
            "BF16": (torch.bfloat16, torch.int16, 0x7FFF),
            "F16": (torch.float16, torch.int16, 0x7FFF),
            "F32": (torch.float32, torch.int32, 0x7FFFFFFF),
        }
        self._stored = memoryview(b"")
        self._wide = torch.empty(0)

    def quantize(self, data: memoryview, row_format: RowFormat) -> tuple[memoryview, Scales]:
        """The stored bytes of rows, which begin at a page so that O_DIRECT takes them, and float32 [rows]."""
        import torch

        elements = row_format.stored_row_bytes
        count = data.nbytes // row_format.row_bytes
        scales = torch.empty(count)
        if not count:
            return memoryview(b""), scales.numpy()
        if data.readonly:  # torch has no tensors that cannot be written
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
            # The magnitude of a float grows with its bits, also to infinity and NaN; integers are compared several times as fast.
            masked = wide.view(-1).view(bits)[: part.numel()].view(part.shape)
            torch.bitwise_and(part.view(bits), magnitude, out=masked)
            scale = scales[begin : begin + step]
            scale.copy_(masked.amax(dim=1).view(dtype)).div_(_FP8_MAX).clamp_(min=_LEAST_SCALE)
            source = part if part.dtype == torch.float32 else wide.copy_(part)
            torch.div(source, scale.unsqueeze(1), out=wide)
            target[begin : begin + step].copy_(wide)
        return stored, scales.numpy()


class _PerThread(threading.local):
    workspace: _Workspace | None = None


_per_thread = _PerThread()


def _of_thread() -> _Workspace:
    if _per_thread.workspace is None:
        _per_thread.workspace = _Workspace()
    return _per_thread.workspace


def _use_one_thread() -> None:
    """Have torch's operations of this thread run in it alone: writers are as many as are to have a core."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    # That was also for threads that use torch for the first time later; these are somebody else's.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()
