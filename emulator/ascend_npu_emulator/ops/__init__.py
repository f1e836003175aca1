"""References, in plain torch, for the operators and Triton kernels that vllm-ascend calls.

``register()`` declares the operators. ``patch_hooks()`` returns the patches to apply to modules
after import. ``find(name)`` returns the operator ``torch_npu.<name>``. An operator without a
reference is declared too. When called, it raises NotImplementedError with the operator's name.
"""

from ascend_npu_emulator.ops.hooks import patch_hooks, put_libraries, put_linear_attention
from ascend_npu_emulator.ops.registration import declare, find

__all__ = ["find", "patch_hooks", "register"]


def register() -> None:
    """Declare every operator with the real schema. Idempotent."""
    declare()
    put_libraries()
    put_linear_attention()
