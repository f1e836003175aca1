"""Check, read, map and dequantise the tensors of a file."""

from __future__ import annotations

import ctypes
import errno
import mmap as memory_map
import os
import weakref
from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    QUANTIZATIONS,
    SCALES,
    TOKEN_IDS,
    FormatError,
    Header,
    TensorInfo,
)
from vllm_ascend_hsx.protocol.rows import FP8_DTYPE, ROW_DTYPES

if TYPE_CHECKING:
    import torch

# torch's names of the dtypes of rows and token ids, by safetensors name.
_ROW_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NUMPY_DTYPES = ("float16", "float32", "float64")  # of rows, if numpy has the dtype
_ID_DTYPES = {"I64": "int64", "I32": "int32"}
_LARGEST_ROW = 1 << 26  # elements; the largest models have two million
# The smallest scale, as float32. Rows whose largest magnitude is below 4.5e-10 become mostly 0.
LEAST_SCALE = 9.999999960041972e-13

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED of sys/mman.h
# A prototype of our own: other packages may have changed the attribute of ctypes.pythonapi.
_VIEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view = _VIEW(("PyMemoryView_FromMemory", ctypes.pythonapi))
_WRITABLE = 0x200  # PyBUF_WRITE of CPython's pybuffer.h


def check_tensors(header: Header) -> None:
    """Require the tensors of a file of hidden states, from any producer. Raises FormatError."""
    missing = {HIDDEN_STATES, TOKEN_IDS} - header.tensors.keys()
    if missing:
        raise FormatError(f"it has no {' and no '.join(sorted(missing))}")
    states, ids = header.tensors[HIDDEN_STATES], header.tensors[TOKEN_IDS]
    if len(states.shape) != 3:
        raise FormatError(
            f"{HIDDEN_STATES} has shape {list(states.shape)}, not [tokens, layers, hidden]"
        )
    if not 0 < prod(states.shape[1:]) <= _LARGEST_ROW:
        raise FormatError(
            f"{HIDDEN_STATES} {list(states.shape)} has rows of {prod(states.shape[1:])} numbers"
        )
    if len(ids.shape) != 1 or states.shape[:1] != ids.shape:
        raise FormatError(
            f"{TOKEN_IDS} {list(ids.shape)} does not fit {HIDDEN_STATES} {list(states.shape)}"
        )
    for name, tensor, dtypes in (
        (HIDDEN_STATES, states, _ROW_DTYPES),
        (TOKEN_IDS, ids, _ID_DTYPES),
    ):
        if tensor.dtype not in dtypes:
            raise FormatError(f"{name} is {tensor.dtype}, not one of {', '.join(dtypes)}")
    _check_quantization(header.metadata, states, header.tensors.get(SCALES))


def _check_quantization(
    metadata: dict[str, str], states: TensorInfo, scales: TensorInfo | None
) -> None:
    method, before = metadata.get("quantization"), metadata.get("dtype", "BF16")
    if method not in (None, *QUANTIZATIONS.values()):
        raise FormatError(f"its rows have the unknown quantization {method!r}")
    if scales is None and method is not None:
        raise FormatError(f"its rows are {method}, but it has no {SCALES}")
    if scales is None:
        return
    if (states.dtype, scales.dtype, scales.shape) != (FP8_DTYPE, "F32", (states.shape[0], 1, 1)):
        fits_not = (
            f"{scales.dtype} {list(scales.shape)} does not fit {HIDDEN_STATES} {states.dtype} "
            f"{list(states.shape)}"
        )
        raise FormatError(f"{SCALES} {fits_not}")
    if before not in ROW_DTYPES:
        raise FormatError(f"its rows were quantised from {before}, which is not supported")


def dequantized(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise rows to the model's dtype.

    In bfloat16 and float32 both factors are converted to that dtype and multiplied, as in
    hs_connectors 0.9.0 (fp8_utils.py:54), so both readers give the same bits. In float16 the
    product is computed in float32 first, because scales of small rows are below float16's range.

    Args:
        rows: float8_e4m3fn [tokens, layers, hidden].
        scales: float32 [tokens, 1, 1].
        dtype: bfloat16, float16 or float32.
    """
    factors = scales.dtype if str(dtype) == "torch.float16" else dtype
    return rows.to(factors).mul_(scales.to(factors)).to(dtype)


def to_numpy(rows: torch.Tensor, dtype: object) -> npt.NDArray[Any]:
    """Return rows as a numpy array; see `HiddenStates.numpy`. Raises like it."""
    import torch

    stored = str(rows.dtype).removeprefix("torch.")
    name = "float32" if stored not in _NUMPY_DTYPES else stored
    if dtype is not None:  # a name, or a type of numpy, ml_dtypes or torch
        name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    if name == "bfloat16":
        try:
            kind = import_module("ml_dtypes").bfloat16
        except ModuleNotFoundError:
            problem = "dtype='bfloat16' needs the package ml_dtypes, because numpy has no bfloat16"
            remedy = (
                "pip install ml_dtypes, or leave dtype out for float32, which has the same values"
            )
            raise ModuleNotFoundError(f"{problem}; {remedy}", name="ml_dtypes") from None
        return rows.to(torch.bfloat16).view(torch.int16).numpy().view(kind)
    if name not in _NUMPY_DTYPES:
        raise ValueError(
            f"dtype={dtype!r:.100}: give {', '.join(_NUMPY_DTYPES)} or bfloat16, or None"
        )
    return rows.to(getattr(torch, name)).numpy()


def read_tensor(fd: int, info: TensorInfo, mapped: bool) -> torch.Tensor:
    """Read a tensor of the file open at `fd`.

    Args:
        fd: the open file; may be closed afterwards.
        info: position and type, from a header that `read_header` and `check_tensors` accepted.
        mapped: whether to map the tensor if possible. Changes stay private.

    Raises:
        FormatError: if the file was truncated meanwhile.
        OSError: if it cannot be read, or memory is short.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = "torch is not installed, but hidden states are read into torch tensors"
        remedy = "install torch, any build of it (no NPU is needed), or vllm-ascend-hsx[reader]"
        raise ModuleNotFoundError(f"{problem}; {remedy}", name="torch") from None
    dtype = torch_dtype(info.dtype)
    size = info.end - info.begin
    if not size:
        return torch.empty(info.shape, dtype=dtype)
    if mapped and info.begin % dtype.itemsize == 0:  # other producers may not align their tensors
        start = info.begin // memory_map.ALLOCATIONGRANULARITY * memory_map.ALLOCATIONGRANULARITY
        view = _mapped(fd, start, info.end)
        tensor = torch.frombuffer(
            view, dtype=dtype, count=size // dtype.itemsize, offset=info.begin - start
        )
        return tensor.reshape(info.shape)
    try:
        buffer = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        problem = f"not enough memory for a tensor of {size} bytes; mmap=True reads only used pages"
        raise OSError(errno.ENOMEM, problem) from error
    _read_into(fd, buffer.numpy().data, info.begin)
    return buffer.view(dtype).reshape(info.shape)


def _mapped(fd: int, start: int, end: int) -> memoryview:
    """Map bytes [start, end) of a file until the view of them is freed.

    Not by the module mmap: before Python 3.13 it keeps a descriptor open for each mapping.

    Raises:
        FormatError: if the file was truncated. A mapping would end the process.
        OSError: if the file cannot be mapped.
    """
    if os.fstat(fd).st_size < end:
        raise FormatError("it was truncated while it was being read")
    address = _libc.mmap(
        None,
        end - start,
        memory_map.PROT_READ | memory_map.PROT_WRITE,
        memory_map.MAP_PRIVATE,
        fd,
        start,
    )
    if address == _FAILED:
        number = ctypes.get_errno()
        limit = (
            "; drop some items (a mapped file takes two mappings), or raise vm.max_map_count"
            if number == errno.ENOMEM
            else ""
        )
        raise OSError(number, os.strerror(number) + limit)
    view: memoryview = _view(address, end - start, _WRITABLE)
    # Not when the interpreter ends: tensors may be in use then.
    weakref.finalize(view, _libc.munmap, address, end - start).atexit = False
    return view


def dtype_name(name: str) -> str:
    """Return torch's name of a safetensors dtype, without torch."""
    return {**_ROW_DTYPES, **_ID_DTYPES}[name]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a safetensors dtype."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name(name))
    return dtype


def model_dtype(metadata: Mapping[str, str]) -> torch.dtype:
    """Return the dtype of dequantised rows."""
    return torch_dtype(metadata.get("dtype", "BF16"))


def read_at(fd: int, begin: int, end: int) -> memoryview:
    """Read bytes [begin, end) of a file.

    Raises:
        FormatError: if the file was truncated meanwhile.
        OSError: if the file cannot be read.
    """
    block = memoryview(bytearray(end - begin))
    _read_into(fd, block, begin)
    return block


def _read_into(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from the file. One preadv reads at most 2 GiB."""
    while into:
        read = os.preadv(fd, [into], offset)
        if read == 0:
            raise FormatError(f"it was truncated to {offset} bytes while it was being read")
        into = into[read:]
        offset += read
