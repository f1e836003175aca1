"""Pointers of the emulated Triton: loads and stores of a running program, checked.

A write outside a pointer's tensor raises; hardware would overwrite other memory. A read close to
the tensor returns POISON, where hardware returns arbitrary bytes (vllm-ascend's rejection kernels
read element -1 and discard it). A read further away raises, because hardware may fault.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ascend_npu_emulator.devices import current_device
from ascend_npu_emulator.ops.poison import POISON

# Bytes around a tensor that can be read without a fault: the device's alignment of allocations.
_NEIGHBOURHOOD = 512
Value = Any  # a block, a scalar, or a Python number; kernels mix them


@dataclass
class Program:
    """The running program and the grid. The launcher sets both before each program."""

    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    kernel: str = ""


PROGRAM = Program()


@dataclass(frozen=True)
class PointerType:
    """The dtype of a pointer, ``tl.pointer_type``, with the dtype of the elements."""

    element_ty: torch.dtype


class Address(torch.Tensor):
    """A 64-bit scalar that was loaded, or computed from a loaded scalar.

    A kernel may convert it to a pointer.
    """

    def to(self, dtype: Any, **options: Any) -> Any:  # type: ignore[override]
        return (
            AddressPointer(int(self), dtype)
            if isinstance(dtype, PointerType)
            else super().to(dtype, **options)
        )


class Pointer:
    """A pointer argument: a tensor's storage from the first element on, and offsets into it."""

    def __init__(self, tensor: torch.Tensor, name: str, offsets: Value = 0) -> None:
        if tensor.dtype == torch.uint64:  # addresses; torch has few operators for uint64
            tensor = tensor.view(torch.int64)
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self._memory = torch.as_strided(tensor.detach(), (size,), (1,))
        self._name = name
        self._offsets = torch.as_tensor(offsets)
        self.dtype = PointerType(tensor.dtype)

    def __add__(self, offsets: Value) -> "Pointer":
        moved = object.__new__(Pointer)
        moved._memory, moved._name, moved.dtype = self._memory, self._name, self.dtype
        moved._offsets = self._offsets + offsets
        return moved

    __radd__ = __add__

    def __sub__(self, offsets: Value) -> "Pointer":
        return self + (-offsets)

    def _places(
        self, mask: Value, what: str, margin: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return offsets, mask and whether each offset is inside the tensor, all of one shape.

        Raises IndexError for an active offset more than ``margin`` elements outside the tensor.
        """
        active = torch.as_tensor(True if mask is None else mask, dtype=torch.bool)
        offsets, active = torch.broadcast_tensors(self._offsets.long(), active)
        size = self._memory.numel()
        far = offsets[active & ((offsets < -margin) | (offsets >= size + margin))]
        if far.numel():
            raise IndexError(
                f"Triton kernel {PROGRAM.kernel}, program {PROGRAM.index}: {what} {self._name} "
                f"at {far.tolist()[:8]}, outside the {size} elements"
            )
        return offsets, active, (offsets >= 0) & (offsets < size)

    def read(self, mask: Value, other: Value) -> torch.Tensor:
        """Return the block; ``other``, or 0 as in Ascend's backend, where the mask is not set."""
        dtype = self.dtype.element_ty
        offsets, active, inside = self._places(mask, "reads", _NEIGHBOURHOOD // dtype.itemsize)
        filler = torch.as_tensor(0 if other is None else other).to(dtype)
        found = torch.as_tensor(POISON).to(dtype).expand(offsets.shape).clone()
        there = active & inside
        if bool(there.any()):
            found[there] = self._memory.index_select(
                0, offsets[there].to(self._memory.device)
            ).cpu()
        block = torch.where(active, found, filler)
        return block.as_subclass(Address) if dtype == torch.int64 and not block.dim() else block

    def write(self, value: Value, mask: Value, accumulate: bool = False) -> None:
        offsets, active, _ = self._places(mask, "writes", 0)
        block = torch.as_tensor(value)
        shape = torch.broadcast_shapes(offsets.shape, block.shape)
        offsets, active, block = offsets.expand(shape), active.expand(shape), block.expand(shape)
        if bool(active.any()):
            device = self._memory.device
            places, values = (
                offsets[active].to(device),
                block[active].to(self.dtype.element_ty).to(device),
            )
            self._memory.index_put_((places,), values, accumulate=accumulate)

    def write_or(self, value: Value, mask: Value) -> None:
        """Set the bits of ``value``, also where elements of the block share an offset."""
        offsets, active, block = torch.broadcast_tensors(
            *self._places(mask, "writes", 0)[:2], torch.as_tensor(value)
        )
        places, which = offsets[active].unique(return_inverse=True)
        if not places.numel():
            return
        shifts = torch.arange(8 * self.dtype.element_ty.itemsize)
        bits = (block[active].long().unsqueeze(1) >> shifts) & 1
        found = torch.zeros(places.shape[0], shifts.shape[0], dtype=torch.int64).index_add_(
            0, which, bits
        )
        total, places = (
            (found.clamp(max=1) << shifts).sum(1).to(self.dtype.element_ty),
            places.to(self._memory.device),
        )
        self._memory.index_put_(
            (places,), self._memory.index_select(0, places) | total.to(self._memory.device)
        )


class AddressPointer(Pointer):
    """A pointer that a kernel made from an address.

    Accesses are not checked, because the size of the memory is unknown. The race detector does not
    see them, because it tracks tensors.
    """

    def __init__(self, address: int, dtype: PointerType, offsets: Value = 0) -> None:
        self._address, self._name = address, hex(address)
        self.dtype = PointerType(torch.int64) if dtype.element_ty == torch.uint64 else dtype
        self._offsets = torch.as_tensor(offsets)

    def __add__(self, offsets: Value) -> "AddressPointer":
        return AddressPointer(self._address, self.dtype, self._offsets + offsets)

    __radd__ = __add__

    def _places(
        self, mask: Value, what: str, margin: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        active = torch.as_tensor(True if mask is None else mask, dtype=torch.bool)
        offsets, active = torch.broadcast_tensors(self._offsets.long(), active)
        if bool((offsets[active] < 0).any()):
            raise IndexError(
                f"Triton kernel {PROGRAM.kernel}, program {PROGRAM.index}: {what} before address "
                f"{self._name}"
            )
        count = int(offsets[active].max()) + 1 if bool(active.any()) else 0
        device = torch.device("npu", current_device())
        self._memory = memory_at(
            self._address, count * self.dtype.element_ty.itemsize, device
        ).view(self.dtype.element_ty)
        return offsets, active, torch.ones_like(active)


def memory_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes of device memory as a tensor that does not own the memory."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,))  # type: ignore[call-overload]
