"""torch.npu's random numbers. Each NPU has its own generator, independent of the CPU's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ascend_npu_emulator.devices import Device, device_count, index_of
from ascend_npu_emulator.native import core


def _generator(device: Device = None) -> torch.Generator:
    return core.default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device with the same number."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current device with a random number."""
    _generator().seed()


def seed_all() -> None:
    """Seed every device with the same random number."""
    manual_seed_all(_generator(0).seed())


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _generator().initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the generator's state, a CPU tensor of bytes."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set a state that get_rng_state returned."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the devices, in order."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
