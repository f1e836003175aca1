"""torch.npu's functions about device memory. The accounting is in csrc/memory/."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator

import torch

from ascend_npu_emulator.devices import Device, index_of
from ascend_npu_emulator.missing import NotEmulated
from ascend_npu_emulator.native import core

# torch.accelerator's original functions, bound here because vllm-ascend later replaces them with
# torch.npu's (patch_torch_accelerator.py:14).
_stats = torch.accelerator.memory_stats
_reset_peak = torch.accelerator.reset_peak_memory_stats
_reset_accumulated = torch.accelerator.reset_accumulated_memory_stats


def empty_cache() -> None:
    """Return reserved but unused memory to the device."""
    core.empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return (free, total) bytes of the device.

    Memory that this process has not reserved counts as free.
    """
    core.create_context()
    return core.memory_info(index_of(device))


def memory_stats(device: Device = None) -> OrderedDict[str, int]:
    """Return all counters, in counts and bytes, by dotted name, e.g. "allocated_bytes.all.peak"."""
    core.create_context()
    return _stats(index_of(device))


def _stat(name: str, device: Device) -> int:
    return memory_stats(device)[name]


def memory_allocated(device: Device = None) -> int:
    """Return the bytes that tensors occupy."""
    return _stat("allocated_bytes.all.current", device)


def max_memory_allocated(device: Device = None) -> int:
    """Return the peak of the bytes that tensors occupy, since the start or the last reset."""
    return _stat("allocated_bytes.all.peak", device)


def memory_reserved(device: Device = None) -> int:
    """Return the bytes reserved from the device, used or not."""
    return _stat("reserved_bytes.all.current", device)


def max_memory_reserved(device: Device = None) -> int:
    """Return the peak of the bytes reserved from the device, since the start or the last reset."""
    return _stat("reserved_bytes.all.peak", device)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset all peaks to the current values."""
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

    Bytes are counted in whole blocks, with sizes that are powers of two. "allocated" counts all
    blocks that the allocator holds, "active" the blocks of tensors (torch_npu/npu/memory.py:191,
    2.10.0.post4).
    """
    stats = core.host_memory_stats()
    return OrderedDict(
        (f"{name}.{key}", value)
        for name in sorted(stats)
        for key, value in sorted(stats[name].items())
    )


def host_empty_cache() -> None:
    """Return unused pinned memory to the host."""
    core.host_empty_cache()


memory_snapshot = NotEmulated("torch.npu.memory.memory_snapshot")


class NPUPluggableAllocator:
    """vllm-ascend's allocator for sleep mode (csrc/memory/mapping.h). No other is emulated.

    Args:
        path_to_so_file: ignored. vllm-ascend passes the library that it has loaded, here None
            (device_allocator/camem.py:64 in 0.23.0).
        alloc_fn_name, free_fn_name: names of the library's functions.

    Raises:
        NotImplementedError: if the functions are not vllm-ascend's.
    """

    def __init__(self, path_to_so_file: str | None, alloc_fn_name: str, free_fn_name: str) -> None:
        if (alloc_fn_name, free_fn_name) != ("my_malloc", "my_free"):
            raise NotImplementedError(
                f"an allocator with {alloc_fn_name} and {free_fn_name} is not implemented by the "
                "emulated NPU"
            )
        self._allocator = alloc_fn_name

    def allocator(self) -> str:
        """Return the argument for MemPool."""
        return self._allocator


class MemPool:
    """A pool of device memory; see csrc/memory/pools.h.

    Args:
        allocator: result of NPUPluggableAllocator.allocator(). None: the device's memory.
    """

    _numbers = itertools.count(1)

    def __init__(self, allocator: str | None = None) -> None:
        self.allocator = allocator
        self.id = (0, next(self._numbers))
        self._pool = core.MemPool(has_allocator=allocator is not None)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    """Allocate from the pool within the block, in all threads.

    Args:
        pool: the pool.
        device: the NPU on which to use the pool; default: the current one.
    """
    index = index_of(device)
    core.create_context()
    core.begin_pool(index, pool._pool)
    try:
        yield
    finally:
        core.end_pool(index, pool._pool)
