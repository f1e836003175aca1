"""Reference for the Triton kernel that copies Mamba states between raw device addresses."""

from __future__ import annotations

import torch

from .triton_kernels import Arguments
from .triton_refs import refers_to


def _bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes of device memory as a tensor that does not own them."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,))  # type: ignore[call-overload]


@refers_to("vllm_ascend.ops.triton.batch_memcpy.batch_memcpy_kernel")
def batch_memcpy(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``, in stream order.

    The race detector does not see these copies: it knows memory by its tensors. (vllm_ascend
    0.23.0, ops/triton/batch_memcpy.py:10)
    """
    lists = (arguments[name][: grid[0]].tolist() for name in ("src_ptrs", "dst_ptrs", "sizes"))
    for source, target, size in zip(*lists, strict=True):
        if size:
            device = arguments["src_ptrs"].device
            _bytes_at(target, size, device).copy_(_bytes_at(source, size, device))
