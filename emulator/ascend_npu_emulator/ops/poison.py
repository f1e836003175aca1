"""A value for the parts of an output that the hardware leaves undefined.

A kernel that fills 5 of 8 rows leaves old memory in the other 3. Zeros would hide code that reads
undefined rows by mistake. NaN would break correct code: vllm-ascend multiplies undefined rows by a
routing weight of 0 and adds them, and this is correct for any finite value. The value is therefore
large and finite.
"""

import torch

POISON = (
    1024.0  # exact in float16, bfloat16 and float32, and large enough to change any result visibly
)


def poisoned(
    shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of POISON, or for int8 of the largest number, on the device of ``like``."""
    wanted = dtype or like.dtype
    value = POISON if wanted.is_floating_point else torch.iinfo(torch.int8).max
    return torch.full(shape, value, dtype=wanted, device=like.device)
