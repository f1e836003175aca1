"""torch.npu's functions for the number, selection and properties of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from ascend_npu_emulator.native import core
from ascend_npu_emulator.settings import Settings

Device: TypeAlias = "torch.device | str | int | None"

# Name of the chip and CANN's number, by generation: a card of an Atlas 800I A2, and one die of an
# A3 card. Software selects kernels by the number (vllm_ascend/utils.py:850 requires 220 to 225 for
# A2, 250 to 255 for A3). Both have 20 cube and 40 vector cores.
CHIPS = {"a2": ("Ascend910B3", 222), "a3": ("Ascend910_9362", 255)}


def soc() -> str:
    """Return the generation of the emulated NPUs, a2 or a3."""
    return Settings.from_environment().soc


@dataclass(frozen=True)
class Properties:
    """Result of torch.npu.get_device_properties."""

    name: str
    total_memory: int
    cube_core_num: int = 20
    vector_core_num: int = 40
    L2_cache_size: int = 192 << 20
    uuid: str | None = None


def index_of(device: Device) -> int:
    """Return the device's index. None and "npu" mean the current device.

    Raises ValueError for another device type.
    """
    if device is None:
        return core.current_device()
    if isinstance(device, int):
        return core.current_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {device}")
    return core.current_device() if device.index is None else device.index


def device_count() -> int:
    """Return the number of NPUs that ASCEND_RT_VISIBLE_DEVICES makes visible.

    The number is fixed once a device has been used.
    """
    return core.device_count()


def is_available() -> bool:
    """Return whether an NPU is visible."""
    return device_count() > 0


def current_device() -> int:
    """Return the index of this thread's current device."""
    return core.current_device()


def set_device(device: Device) -> None:
    """Set this thread's current device. Raises RuntimeError if the device does not exist."""
    core.set_device(index_of(device))


def synchronize(device: Device = None) -> None:
    """Block until all work of all streams of the device has completed."""
    core.create_context()
    torch.accelerator.synchronize(index_of(device))


def get_device_name(device: Device = None) -> str:
    """Return the name of the emulated chip."""
    index_of(device)
    return CHIPS[soc()][0]


def get_device_properties(device: Device = None) -> Properties:
    """Return name, memory and core counts of the device."""
    index = index_of(device)
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid NPU device id {index}: {device_count()} device(s) are visible")
    return Properties(get_device_name(), Settings.from_environment().hbm_bytes)


def get_soc_version() -> int:
    """Return CANN's number of the chip."""
    return CHIPS[soc()][1]


class device:
    """``with torch.npu.device(d):`` makes d the current device within the block."""

    def __init__(self, device: Device) -> None:
        self.idx = index_of(device)

    def __enter__(self) -> None:
        self._before = core.device_without_set()
        if self.idx != self._before:
            core.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        core.return_to_device(max(self._before, 0))


class device_of(device):
    """``with torch.npu.device_of(t):`` makes the device of an npu tensor current.

    Ignores other tensors.
    """

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device if obj.device.type == "npu" else None)
