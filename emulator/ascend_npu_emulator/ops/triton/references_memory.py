"""Reference for the Triton kernel that copies Mamba states between raw device addresses."""

from __future__ import annotations

from ascend_npu_emulator.ops.triton.kernels import Arguments
from ascend_npu_emulator.ops.triton.pointers import memory_at
from ascend_npu_emulator.ops.triton.references import refers_to


@refers_to("vllm_ascend.ops.triton.batch_memcpy.batch_memcpy_kernel")
def batch_memcpy(grid: tuple[int, ...], arguments: Arguments) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``, in stream order.

    The race detector does not see these copies, because it tracks tensors. (vllm_ascend 0.23.0,
    ops/triton/batch_memcpy.py:10)
    """
    lists = (arguments[name][: grid[0]].tolist() for name in ("src_ptrs", "dst_ptrs", "sizes"))
    for source, target, size in zip(*lists, strict=True):
        if size:
            device = arguments["src_ptrs"].device
            memory_at(target, size, device).copy_(memory_at(source, size, device))
