"""Find the hccl group of a kernel, and exchange tensors among the ranks."""

import os
from typing import Any

import torch
import torch.distributed as dist

from ascend_npu_emulator.ops.checks import check


def group_called(op: str, argument: str, hcom: str, world_size: int | None = None) -> Any:
    """Return the process group of the communicator named ``hcom``.

    Raises ``ValueError`` naming operator and argument if there is no such group, or if the group's
    size is not ``world_size``.
    """
    npu = torch.device("npu")
    for group in dist.distributed_c10d._world.pg_map:
        backend: Any = group._get_backend(npu) if npu in group._device_types else None
        if backend is not None and hcom == backend.get_hccl_comm_name(group.rank()):
            check(
                world_size in (None, group.size()),
                op,
                "world_size",
                f"{world_size} must be {group.size()}, the size of {hcom}",
            )
            return group
    raise ValueError(f"{op}: {argument}: this process has no hccl group {hcom!r}")


def gather(group: Any, op: str, call: str, mine: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks, in rank order along the first dimension.

    This is launched like a collective. Every rank must call it for the same operator, with a tensor
    of the same shape and dtype and with the same ``call``, the arguments in which ranks must agree.
    """
    everyones = torch.empty(
        (group.size() * mine.shape[0], *mine.shape[1:]), dtype=mine.dtype, device=mine.device
    )
    group._get_backend(mine.device).gather_for_kernel(op, call, everyones, mine.contiguous())
    return everyones


def buffer_size() -> int:
    """Return the bytes of each rank's buffer for a group."""
    return int(os.environ.get("HCCL_BUFFSIZE", "200")) << 20
