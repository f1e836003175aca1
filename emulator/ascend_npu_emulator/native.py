"""Load the C++ part and initialise the emulated devices in this process."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from ascend_npu_emulator.build import MODULE, library
from ascend_npu_emulator.settings import Settings


def _load() -> ModuleType:
    settings = Settings.from_environment()
    spec = importlib.util.spec_from_file_location(MODULE, library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.start(settings.npus, settings.hbm_bytes)
    set_modes(module, settings)
    return module


def set_modes(module: ModuleType, settings: Settings) -> None:
    """Apply modes and injected failures. Call this before any device is used."""
    module.set_late(settings.late)
    module.set_queue(settings.queue)
    module.set_spin(settings.spin)
    if settings.fail:
        module.fail(settings.fail)
    if settings.fail_file:
        module.watch_for_fault(settings.fail_file)


# The pybind module of csrc/npu.cpp. The first import of this module loads it, once per process.
core = _load()
