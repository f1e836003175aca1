"""A Triton language that runs on the host, one program of the grid after the other.

Blocks are torch tensors on the host, and scalars 0-dimensional ones. Only loads and stores touch
device memory. They use the emulated device's own operators, so a kernel keeps its place in the
order of its stream.

Every access is checked against the tensor of its pointer. A write outside it raises; hardware would
overwrite something else. A read close to it returns POISON, as hardware returns whatever is there
(vllm-ascend's rejection kernels read element -1 and discard it). A read further away raises,
because hardware may fault. A function of ``tl`` that is missing here raises NotImplementedError
with its name.
"""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .poison import POISON

# Bytes around a tensor that may be read without a fault: the device aligns allocations to them.
_NEIGHBOURHOOD = 512
Value = Any  # a block, a scalar, or a Python number: kernels mix them freely


@dataclass
class Program:
    """The program that is running, and its grid. The launcher sets it before each program."""

    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    kernel: str = ""


PROGRAM = Program()


class Pointer:
    """A pointer argument: a tensor's storage from its first element on, and offsets into it."""

    def __init__(self, tensor: torch.Tensor, name: str, offsets: Value = 0) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self._memory = torch.as_strided(tensor.detach(), (size,), (1,))
        self._name = name
        self._offsets = torch.as_tensor(offsets)
        self.dtype = tensor.dtype

    def __add__(self, offsets: Value) -> "Pointer":
        moved = object.__new__(Pointer)
        moved._memory, moved._name, moved.dtype = self._memory, self._name, self.dtype
        moved._offsets = self._offsets + offsets
        return moved

    __radd__ = __add__

    def __sub__(self, offsets: Value) -> "Pointer":
        return self + (-offsets)

    def _places(self, mask: Value, what: str, margin: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return offsets, mask and whether they are inside, all of one shape.

        Raises IndexError for an active offset more than ``margin`` elements outside the tensor.
        """
        active = torch.as_tensor(True if mask is None else mask, dtype=torch.bool)
        offsets, active = torch.broadcast_tensors(self._offsets.long(), active)
        size = self._memory.numel()
        far = offsets[active & ((offsets < -margin) | (offsets >= size + margin))]
        if far.numel():
            raise IndexError(
                f"Triton kernel {PROGRAM.kernel}, program {PROGRAM.index}: {what} {self._name} at {far.tolist()[:8]}, "
                f"which lies outside its {size} elements"
            )
        return offsets, active, (offsets >= 0) & (offsets < size)

    def read(self, mask: Value, other: Value) -> torch.Tensor:
        """Return the block; ``other``, or 0 as in Ascend's backend, where the mask is not set."""
        offsets, active, inside = self._places(mask, "reads", _NEIGHBOURHOOD // self.dtype.itemsize)
        filler = torch.as_tensor(0 if other is None else other).to(self.dtype)
        found = torch.as_tensor(POISON).to(self.dtype).expand(offsets.shape).clone()
        there = active & inside
        if bool(there.any()):
            found[there] = self._memory.index_select(0, offsets[there].to(self._memory.device)).cpu()
        return torch.where(active, found, filler)

    def write(self, value: Value, mask: Value, accumulate: bool = False) -> None:
        offsets, active, _ = self._places(mask, "writes", 0)
        block = torch.as_tensor(value)
        shape = torch.broadcast_shapes(offsets.shape, block.shape)
        offsets, active, block = offsets.expand(shape), active.expand(shape), block.expand(shape)
        if bool(active.any()):
            device = self._memory.device
            places, values = offsets[active].to(device), block[active].to(self.dtype).to(device)
            self._memory.index_put_((places,), values, accumulate=accumulate)


class _Language:
    """The namespace ``tl``."""

    bfloat16, float16, float32, float64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
    uint8, uint16, uint32, uint64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
    dtype = torch.dtype
    tensor = torch.Tensor

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

    # ---- making blocks ----
    @staticmethod
    def arange(start: int, end: int) -> torch.Tensor:
        return torch.arange(int(start), int(end), dtype=torch.int32)

    @staticmethod
    def full(shape: Sequence[int], value: Value, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), float(value) if dtype.is_floating_point else int(value), dtype=dtype)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    # ---- element by element ----
    @staticmethod
    def where(condition: Value, x: Value, y: Value) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition).bool(), x, y)

    @staticmethod
    def maximum(x: Value, y: Value) -> torch.Tensor:
        return torch.maximum(*_alike(x, y))

    @staticmethod
    def minimum(x: Value, y: Value) -> torch.Tensor:
        return torch.minimum(*_alike(x, y))

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    sqrt = staticmethod(torch.sqrt)
    rsqrt = staticmethod(torch.rsqrt)
    sigmoid = staticmethod(torch.sigmoid)

    @staticmethod
    def cdiv(x: Value, div: Value) -> Value:
        return (x + div - 1) // div

    # ---- over an axis ----
    @staticmethod
    def sum(input: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
        total = input.sum() if axis is None else input.sum(axis, keepdim=keep_dims)
        return total.to(input.dtype) if input.dtype != torch.bool else total.to(torch.int32)

    @staticmethod
    def max(input: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
        return input.amax() if axis is None else input.amax(axis, keepdim=keep_dims)

    @staticmethod
    def min(input: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
        return input.amin() if axis is None else input.amin(axis, keepdim=keep_dims)

    @staticmethod
    def argmax(input: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the index of the largest element, the lowest of equal ones."""
        best = input.amax(axis, keepdim=True)
        return (input == best).to(torch.int8).argmax(axis).to(torch.int32)

    # ---- shapes ----
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
    def get_element(src: torch.Tensor, indice: Sequence[Value]) -> torch.Tensor:
        return src[tuple(int(index) for index in indice)]

    @staticmethod
    def extract_slice(ful: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        return ful[_window(offsets, sizes, strides)].clone()

    @staticmethod
    def insert_slice(
        ful: torch.Tensor, sub: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
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
    """A name that the emulated language lacks. It may be mentioned, but raises when used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self._name} is not part of the emulated Triton (kernel {PROGRAM.kernel or 'not running'})")


def _alike(x: Value, y: Value) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.as_tensor(x), torch.as_tensor(y)
    common = torch.result_type(first, second)
    return first.to(common), second.to(common)


def _window(offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(int(offset), int(offset) + int(size) * int(stride), int(stride))
        for offset, size, stride in zip(offsets, sizes, strides, strict=True)
    )


tl = _Language()
