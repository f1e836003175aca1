"""The content of those parts of an output that the hardware leaves undefined.

A kernel that fills 5 of 8 rows leaves whatever the allocator had in the other 3. Zeros would hide
code that reads such rows by mistake. NaN would break correct code: vllm-ascend multiplies undefined
rows by a routing weight of 0 and adds them, which is right for any finite value. So they hold a
large finite value.
"""

import torch

POISON = (
    1024.0  # exact in float16, bfloat16 and float32, and large enough to ruin any result it enters
)


def poisoned(
    shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of POISON, or of int8's largest number, on the device of ``like``."""
    wanted = dtype or like.dtype
    value = POISON if wanted.is_floating_point else torch.iinfo(torch.int8).max
    return torch.full(shape, value, dtype=wanted, device=like.device)
