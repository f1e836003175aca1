"""Patches of other packages' modules: Triton, and stand-ins for CANN's libraries."""

import sys
from collections.abc import Callable
from types import ModuleType

from ascend_npu_emulator.devices import soc
from ascend_npu_emulator.missing import NotEmulated
from ascend_npu_emulator.native import core
from ascend_npu_emulator.ops.recurrent import fla_npu
from ascend_npu_emulator.ops.schemas import is_at_least
from ascend_npu_emulator.ops.triton import references, references_gdn, references_memory  # noqa: F401  (they register themselves)
from ascend_npu_emulator.ops.triton.kernels import make_triton


def put_triton(module: ModuleType) -> None:
    """Make ``vllm.triton_utils`` the same as with Triton-Ascend; see triton/kernels.py."""
    triton = make_triton()
    # vllm 0.30 also imports triton.language directly (v1/worker/gpu/sample/watermark.py:31). The
    # parent package is not added, because torch would then assume that Triton is installed.
    language = ModuleType("triton.language", "Part of the emulated NPU.")
    language.math = triton.language  # type: ignore[attr-defined]
    sys.modules.setdefault(language.__name__, language)
    vars(module).update(
        HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=triton.language
    )


def put_libraries() -> None:
    """Replace vllm-ascend's extension module, because the real one does not load without CANN.

    ``enable_custom_op()`` is true if the module can be imported (vllm_ascend/utils.py:435).
    registration.py declares the operators. The module has the functions of sleep mode
    (csrc/camem_allocator.cpp:325 in 0.23.0).
    """
    name = "vllm_ascend.vllm_ascend_C"
    if name not in sys.modules:
        module = ModuleType(name, "Its operators are declared by the emulated NPU.")
        vars(module).update(
            init_module=core.init_module,
            python_create_and_map=core.create_and_map,
            python_unmap_and_release=core.unmap_and_release,
        )
        sys.modules[name] = module


def put_linear_attention() -> None:
    """Add the package ``fla_npu``. vllm-ascend 0.30 uses its kernels for linear attention.

    Only vllm-ascend's images have the real package (Dockerfile). A function without a reference
    raises when it is called.
    """
    if not is_at_least("0.30"):
        return
    parent: ModuleType | None = None
    for name in ("fla_npu", "fla_npu.ops", "fla_npu.ops.ascendc"):
        if name in sys.modules:
            return
        module = sys.modules[name] = ModuleType(name, "Part of the emulated NPU.")
        module.__path__ = []
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    assert parent is not None
    vars(parent).update(fla_npu.FUNCTIONS, __getattr__=NotEmulated(parent.__name__).__getattr__)


def build_for_soc(module: ModuleType) -> None:
    """Set ``vllm_ascend._build_info`` to the values of the wheel for this generation of NPUs.

    SOC_VERSION is fixed when vllm-ascend is built, and vllm-ascend refuses to run on another
    generation (vllm_ascend/utils.py:862). Nothing else in Python differs: setup_emulated.py builds
    for A2.
    """
    if soc() != "a2":
        vars(module)["__device_type__"] = soc().upper()


def patch_hooks() -> dict[str, Callable[[ModuleType], None]]:
    """Return the functions to apply to modules right after their import, by module name."""
    return {"vllm.triton_utils": put_triton, "vllm_ascend._build_info": build_for_soc}
