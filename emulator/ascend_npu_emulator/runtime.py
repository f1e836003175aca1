"""Register the device "npu" with torch and fill ``torch_npu`` when it is imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from ascend_npu_emulator import (
    graphs,
    hccl,
    import_hooks,
    memory,
    npu,
    ops,
    random,
    streams,
)
from ascend_npu_emulator.missing import NotEmulated, unknown
from ascend_npu_emulator.native import core

VERSION = "2.10.0.post4"  # the version that vllm-ascend 0.23.0 to 0.30.0rc2 require
# Codes of dtypes that torch lacks, as operators take them: 256 plus the aclDataType.
DTYPES = {"hifloat8": 290, "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296}


def install(package: ModuleType) -> None:
    """Register device, c10d backend and operators with torch, and fill the package.

    Args:
        package: the module ``torch_npu`` during import.
    """
    rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules["torch.npu"] = npu
    torch.version.cann = "8.5.0"  # type: ignore[attr-defined]  # read by vllm_ascend/utils.py:484
    hccl.register()
    ops.register()
    import_hooks.install(ops.patch_hooks())
    import_hooks.stand_in_for_torchvision()
    _fill(package)


def _fill(package: ModuleType) -> None:
    name = package.__name__

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        found = ops.find(wanted)
        return unknown(name, wanted) if found is None else found

    namespace = vars(package)
    namespace.update(
        __version__=VERSION,
        __getattr__=attribute,
        Format=NotEmulated(f"{name}.Format"),
        empty_with_format=NotEmulated(f"{name}.empty_with_format"),
        get_npu_format=NotEmulated(f"{name}.get_npu_format"),
        **DTYPES,
    )
    _submodule(package, "npu", npu)
    for part in (graphs, memory, random, streams):
        _submodule(package, f"npu.{part.__name__.rpartition('.')[2]}", part)
    _submodule(
        package,
        "_C",
        _weak_ref_tensor=core.weak_ref,
        _NPUTaskGroupHandle=graphs.TaskGroupHandle,
        _npu_hasPrimaryContext=core.has_context,
    )
    _submodule(package, "_C._distributed_c10d", ProcessGroupHCCL=hccl.ProcessGroupHCCL)
    _submodule(package, "op_plugin")
    _submodule(package, "op_plugin.atb")
    # vllm-ascend calls this to load CANN's ATB operators. Here ops.register declares all operators.
    _submodule(package, "op_plugin.atb._atb_ops", _register_atb_extensions=lambda: None)
    _submodule(
        package, "_inductor"
    )  # the real module patches torch.compile; the emulated module is empty
    _submodule(package, "multiprocessing")
    _submodule(
        package,
        "multiprocessing.reductions",
        rebuild_npu_tensor=NotEmulated(f"{name}.multiprocessing.reductions.rebuild_npu_tensor"),
    )
    _submodule(package, "atb", npu_paged_cache_load=ops.find("npu_paged_cache_load"))
    _submodule(
        package, "profiler", __getattr__=lambda wanted: _not_emulated(f"{name}.profiler", wanted)
    )
    _submodule(
        package,
        "profiler.dynamic_profile",
        step=NotEmulated(f"{name}.profiler.dynamic_profile.step"),
    )


def _not_emulated(module: str, name: str) -> NotEmulated:
    if name.startswith("__"):
        raise AttributeError(name)
    return NotEmulated(f"{module}.{name}")


def _submodule(
    package: ModuleType, path: str, module: ModuleType | None = None, **names: Any
) -> ModuleType:
    full = f"{package.__name__}.{path}"
    if module is None:
        module = ModuleType(full, "Part of the emulated torch_npu.")
        module.__path__ = []
    vars(module).update(names)
    sys.modules[full] = module
    parent, _, last = full.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module
