"""Changes to other packages' modules: Triton, and stand-ins for CANN's libraries."""

import sys
from collections.abc import Callable
from types import ModuleType

from . import triton_refs, triton_refs_gdn, triton_refs_memory  # noqa: F401  (their import registers the references)
from .triton_kernels import make_triton


def put_triton(module: ModuleType) -> None:
    """Make ``vllm.triton_utils`` look as on a machine with Triton-Ascend; see triton_kernels.py."""
    triton = make_triton()
    vars(module).update(HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=triton.language)


def put_empty_libraries() -> None:
    """Add an empty extension module in place of vllm-ascend's, which does not load without CANN.

    ``enable_custom_op()`` is true if it can be imported (vllm_ascend/utils.py:435). registration.py
    declares the operators that the real one would.
    """
    name = "vllm_ascend.vllm_ascend_C"
    if name not in sys.modules:
        module = ModuleType(name, "Empty: its operators are declared by the emulated NPU.")
        sys.modules[name] = module


def patch_hooks() -> dict[str, Callable[[ModuleType], None]]:
    """Return the functions to apply to modules right after their import, by module name."""
    return {"vllm.triton_utils": put_triton}
