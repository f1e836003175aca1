"""Read or map the tensors of a file."""

from __future__ import annotations

import errno
import mmap as memory_map
import os
from math import prod
from typing import TYPE_CHECKING

from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    TOKEN_IDS,
    FormatError,
    Header,
    TensorInfo,
)

if TYPE_CHECKING:
    import torch

# torch's names of the dtypes of rows and token ids, by safetensors name.
_ROW_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_ID_DTYPES = {"I64": "int64", "I32": "int32"}
_LARGEST_ROW = 1 << 26  # elements; the largest models have two million
_TORCH_DTYPES = {**_ROW_DTYPES, **_ID_DTYPES}


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
        problem = "hidden states are read into torch tensors, and torch is not installed here"
        remedy = "install torch, any build of it (no NPU is needed), or vllm-ascend-hsx[reader]"
        raise ModuleNotFoundError(f"{problem}; {remedy}", name="torch") from None
    dtype = torch_dtype(info.dtype)
    size = info.end - info.begin
    if not size:
        return torch.empty(info.shape, dtype=dtype)
    if mapped and info.begin % dtype.itemsize == 0:  # other producers may not align their tensors
        start = info.begin // memory_map.ALLOCATIONGRANULARITY * memory_map.ALLOCATIONGRANULARITY
        protection = memory_map.PROT_READ | memory_map.PROT_WRITE
        try:
            view = memory_map.mmap(
                fd, info.end - start, flags=memory_map.MAP_PRIVATE, prot=protection, offset=start
            )
        except ValueError as error:  # mmap compares the file's length
            raise FormatError("it was cut off while it was read") from error
        return torch.frombuffer(
            view, dtype=dtype, count=size // dtype.itemsize, offset=info.begin - start
        ).reshape(info.shape)
    try:
        buffer = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(
            errno.ENOMEM,
            f"not enough memory for a tensor of {size} bytes; mmap=True reads only used pages",
        ) from error
    _read_at(fd, buffer.numpy().data, info.begin)
    return buffer.view(dtype).reshape(info.shape)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a safetensors name."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[name])
    return dtype


def _read_at(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from the file; the system may give less at a time than is asked for (never more than 2 GiB)."""
    while into:
        read = os.preadv(fd, [into], offset)
        if read == 0:
            raise FormatError(f"it ended at byte {offset} while it was read")
        into = into[read:]
        offset += read
