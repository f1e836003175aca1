"""torch.npu's functions about device memory. The accounting is in csrc/memory/."""

from __future__ import annotations

from collections import OrderedDict

import torch

from vllm_ascend_hsx.emulator.devices import Device, index_of
from vllm_ascend_hsx.emulator.missing import NotEmulated
from vllm_ascend_hsx.emulator.native import core

# torch.accelerator's own functions, bound early: vllm-ascend replaces them by torch.npu's
# (patch_torch_accelerator.py:14).
_stats = torch.accelerator.memory_stats
_reset_peak = torch.accelerator.reset_peak_memory_stats
_reset_accumulated = torch.accelerator.reset_accumulated_memory_stats


def empty_cache() -> None:
    """Return reserved but unused memory to the device."""
    core.empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return (free, total) bytes of the device.

    Memory is free if this process has not reserved it.
    """
    core.create_context()
    return core.memory_info(index_of(device))


def memory_stats(device: Device = None) -> OrderedDict[str, int]:
    """Return all counters by dotted name, e.g. "allocated_bytes.all.peak"; counts and bytes."""
    core.create_context()
    return _stats(index_of(device))


def _stat(name: str, device: Device) -> int:
    return memory_stats(device)[name]


def memory_allocated(device: Device = None) -> int:
    """Return the bytes in tensors."""
    return _stat("allocated_bytes.all.current", device)


def max_memory_allocated(device: Device = None) -> int:
    """Return the most bytes in tensors since the start or the last reset."""
    return _stat("allocated_bytes.all.peak", device)


def memory_reserved(device: Device = None) -> int:
    """Return the bytes reserved from the device, used or not."""
    return _stat("reserved_bytes.all.current", device)


def max_memory_reserved(device: Device = None) -> int:
    """Return the most bytes reserved from the device since the start or the last reset."""
    return _stat("reserved_bytes.all.peak", device)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset peaks to the present values."""
    core.create_context()
    _reset_peak(index_of(device))


def reset_max_memory_allocated(device: Device = None) -> None:
    """Do the same as reset_peak_memory_stats."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Reset the totals of allocated and freed memory to 0."""
    core.create_context()
    _reset_accumulated(index_of(device))


def host_memory_stats() -> OrderedDict[str, int]:
    """Return the counters of pinned memory by dotted name, e.g. "allocated_bytes.current".

    Bytes are those of whole blocks, whose sizes are powers of two. "allocated" counts blocks that
    the allocator holds, "active" those of tensors (torch_npu/npu/memory.py:191, 2.10.0.post4).
    """
    stats = core.host_memory_stats()
    return OrderedDict((f"{name}.{key}", value) for name in sorted(stats) for key, value in sorted(stats[name].items()))


def host_empty_cache() -> None:
    """Return unused pinned memory to the host."""
    core.host_empty_cache()


memory_snapshot = NotEmulated("torch.npu.memory.memory_snapshot")
MemPool = NotEmulated("torch.npu.memory.MemPool")
NPUPluggableAllocator = NotEmulated("torch.npu.memory.NPUPluggableAllocator")
use_mem_pool = NotEmulated("torch.npu.memory.use_mem_pool")
