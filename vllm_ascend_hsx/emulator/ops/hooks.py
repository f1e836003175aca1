"""What is put into other packages' modules once they are imported: the emulated Triton, and the modules CANN's libraries would be."""

import sys
from collections.abc import Callable
from types import ModuleType

from . import triton_refs, triton_refs_gdn, triton_refs_memory  # noqa: F401  (their import registers the references)
from .triton_kernels import make_triton


def put_triton(module: ModuleType) -> None:
    """Make ``vllm.triton_utils`` answer as on a machine with Triton-Ascend (see triton_kernels.py)."""
    triton = make_triton()
    vars(module).update(HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=triton.language)


def put_empty_libraries() -> None:
    """Stand in for the extension module of vllm-ascend's operators, which does not load without CANN.

    Importing it is what makes ``enable_custom_op()`` true (vllm_ascend/utils.py:435); the operators that the real one would
    declare are declared by registration.py.
    """
    name = "vllm_ascend.vllm_ascend_C"
    if name not in sys.modules:
        module = ModuleType(name, "Empty: its operators are declared by the emulated NPU.")
        sys.modules[name] = module


def patch_hooks() -> dict[str, Callable[[ModuleType], None]]:
    """Module name to the function that is to be applied right after that module has been imported, before anyone reads from it."""
    return {"vllm.triton_utils": put_triton}
