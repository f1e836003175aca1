"""A Triton language that runs on the host, one program of the grid after the other.

Blocks are torch tensors on the host, and scalars are 0-dimensional tensors. Only loads and stores
access device memory (pointers.py). They use the emulated device's operators, so a kernel runs in
the order of the stream. A missing function of ``tl`` raises NotImplementedError with the function's
name.
"""

import builtins
import enum
from collections.abc import Sequence
from typing import Any

import torch

from ascend_npu_emulator.ops.triton import random as triton_random
from ascend_npu_emulator.ops.triton.pointers import (
    PROGRAM,
    AddressPointer,
    Pointer,
    PointerType,
    Value,
)


class _PropagateNan(enum.Enum):
    """``tl.PropagateNan``: a maximum with NaN is NaN (ALL) or the other value (NONE)."""

    NONE = 0
    ALL = 0xFFFF


class _Language:
    """The namespace ``tl``."""

    bfloat16, float16, float32, float64 = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    )
    int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
    uint8, uint16, uint32, uint64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
    dtype = torch.dtype
    tensor = torch.Tensor
    pointer_type = PointerType
    PropagateNan = _PropagateNan
    rand = staticmethod(triton_random.rand)
    randint = staticmethod(triton_random.randint)

    @staticmethod
    def constexpr(value: Value) -> Value:
        return value

    # ---- the grid ----
    @staticmethod
    def program_id(axis: int) -> torch.Tensor:
        return torch.tensor(PROGRAM.index[axis], dtype=torch.int32)

    @staticmethod
    def num_programs(axis: int) -> torch.Tensor:
        return torch.tensor(PROGRAM.grid[axis], dtype=torch.int32)

    # ---- memory ----
    @staticmethod
    def load(pointer: Pointer, mask: Value = None, other: Value = None) -> torch.Tensor:
        return pointer.read(mask, other)

    @staticmethod
    def store(pointer: Pointer, value: Value, mask: Value = None) -> None:
        pointer.write(value, mask)

    @staticmethod
    def atomic_add(pointer: Pointer, val: Value, mask: Value = None) -> torch.Tensor:
        before = pointer.read(mask, None)
        pointer.write(val, mask, accumulate=True)
        return before

    @staticmethod
    def atomic_or(pointer: Pointer, val: Value, mask: Value = None) -> torch.Tensor:
        before = pointer.read(mask, None)
        pointer.write_or(val, mask)
        return before

    @staticmethod
    def debug_barrier() -> None:
        """Do nothing: a program has one thread here."""

    # ---- for the compiler ----
    @staticmethod
    def multiple_of(input: Value, values: Value) -> Value:
        return input

    @staticmethod
    def static_assert(cond: Value, msg: str = "") -> None:
        if not cond:
            raise AssertionError(f"Triton kernel {PROGRAM.kernel}: {msg}")

    # ---- making blocks ----
    @staticmethod
    def arange(start: int, end: int) -> torch.Tensor:
        return torch.arange(int(start), int(end), dtype=torch.int32)

    @staticmethod
    def full(shape: Sequence[int], value: Value, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(
            tuple(shape), float(value) if dtype.is_floating_point else int(value), dtype=dtype
        )

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    @staticmethod
    def cast(input: Value, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, PointerType):
            return AddressPointer(int(input), dtype)
        block = torch.as_tensor(input)
        return block.view(dtype) if bitcast else block.to(dtype)

    # ---- element by element ----
    @staticmethod
    def where(condition: Value, x: Value, y: Value) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition).bool(), x, y)

    @staticmethod
    def maximum(
        x: Value, y: Value, propagate_nan: _PropagateNan = _PropagateNan.NONE
    ) -> torch.Tensor:
        return (torch.maximum if propagate_nan is _PropagateNan.ALL else torch.fmax)(*_alike(x, y))

    @staticmethod
    def minimum(
        x: Value, y: Value, propagate_nan: _PropagateNan = _PropagateNan.NONE
    ) -> torch.Tensor:
        return (torch.minimum if propagate_nan is _PropagateNan.ALL else torch.fmin)(*_alike(x, y))

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    sqrt = staticmethod(torch.sqrt)
    rsqrt = staticmethod(torch.rsqrt)
    sigmoid = staticmethod(torch.sigmoid)
    abs = staticmethod(torch.abs)
    floor = staticmethod(torch.floor)

    @staticmethod
    def cdiv(x: Value, div: Value) -> Value:
        return (x + div - 1) // div

    # ---- over an axis ----
    @staticmethod
    def sum(input: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
        total = input.sum() if axis is None else input.sum(axis, keepdim=keep_dims)
        return total.to(input.dtype) if input.dtype != torch.bool else total.to(torch.int32)

    @staticmethod
    def max(
        input: torch.Tensor,
        axis: int | None = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:
        if not return_indices:
            return input.amax() if axis is None else input.amax(axis, keepdim=keep_dims)
        if axis is None or keep_dims or not return_indices_tie_break_left:
            raise NotImplementedError(
                "tl.max with these options is not part of the emulated Triton (kernel "
                f"{PROGRAM.kernel})"
            )
        return input.amax(axis), _Language.argmax(input, axis)

    @staticmethod
    def cumsum(input: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
        block = input.flip(axis) if reverse else input
        total = block.cumsum(axis, dtype=torch.int32 if block.dtype == torch.bool else block.dtype)
        return total.flip(axis) if reverse else total

    @staticmethod
    def min(input: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
        return input.amin() if axis is None else input.amin(axis, keepdim=keep_dims)

    @staticmethod
    def argmax(input: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the index of the largest element; the lowest index for ties."""
        best = input.amax(axis, keepdim=True)
        return (input == best).to(torch.int8).argmax(axis).to(torch.int32)

    # ---- shapes ----
    @staticmethod
    def reshape(input: torch.Tensor, *shape: Any) -> torch.Tensor:
        return input.reshape(shape[0] if isinstance(shape[0], tuple | list) else shape)

    @staticmethod
    def trans(input: torch.Tensor, *dims: int) -> torch.Tensor:
        return input.permute(dims) if dims else input.transpose(0, 1)

    @staticmethod
    def broadcast_to(input: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return input.expand(tuple(shape))

    @staticmethod
    def split(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a[..., 0], a[..., 1]

    @staticmethod
    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack(torch.broadcast_tensors(a, b), -1)

    @staticmethod
    def gather(src: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
        return src.gather(axis, index.long())

    @staticmethod
    def get_element(src: torch.Tensor, indice: Sequence[Value]) -> torch.Tensor:
        return src[tuple(int(index) for index in indice)]

    @staticmethod
    def extract_slice(
        ful: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        return ful[_window(offsets, sizes, strides)].clone()

    @staticmethod
    def insert_slice(
        ful: torch.Tensor,
        sub: torch.Tensor,
        offsets: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
    ) -> torch.Tensor:
        whole = ful.clone()
        whole[_window(offsets, sizes, strides)] = sub
        return whole

    # ---- loops ----
    @staticmethod
    def range(*bounds: Value) -> builtins.range:
        return builtins.range(*(int(bound) for bound in bounds))

    static_range = range

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown(f"tl.{name}")


class _Unknown:
    """A name that the emulated language lacks. It can be referenced but raises when used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(
            f"{self._name} is not part of the emulated Triton (kernel "
            f"{PROGRAM.kernel or 'not running'})"
        )


def _alike(x: Value, y: Value) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.as_tensor(x), torch.as_tensor(y)
    common = torch.result_type(first, second)
    return first.to(common), second.to(common)


def _window(
    offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
) -> tuple[slice, ...]:
    return tuple(
        slice(int(offset), int(offset) + int(size) * int(stride), int(stride))
        for offset, size, stride in zip(offsets, sizes, strides, strict=True)
    )


tl = _Language()
