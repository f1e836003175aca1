"""What stands in the parts of an output that the hardware leaves undefined.

A kernel that is told to fill 5 of 8 rows leaves whatever the allocator had in the other 3. Zeros there would be kinder than the
hardware: code that reads such rows by mistake would go on working. NaN would be harsher than it: vllm-ascend multiplies
undefined rows by a routing weight of 0 and adds them up, which is right for any finite value. So: a large finite value.
"""

import torch

POISON = 1024.0  # exact in float16, bfloat16 and float32, and large enough to ruin any result it enters


def poisoned(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ``shape`` on the device of ``like`` whose every element is POISON (for integers too)."""
    return torch.full(shape, POISON, dtype=dtype or like.dtype, device=like.device)
