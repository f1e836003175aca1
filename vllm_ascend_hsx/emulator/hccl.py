"""The c10d backend "hccl": options, registration, and the gloo group that it uses (csrc/hccl.h)."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as NativeBackend
from torch._C._distributed_c10d import PrefixStore, Store

from vllm_ascend_hsx.emulator.native import core

ProcessGroupHCCL: Any = core.ProcessGroupHCCL  # c10d.Backend, a class of csrc/hccl.h


class Options(NativeBackend.Options):
    """torch_npu's ProcessGroupHCCL.Options."""

    def __init__(self) -> None:
        super().__init__("hccl", dist.default_pg_timeout)
        self.is_high_priority_stream = False
        self.op_timeout = self._timeout
        self.hccl_config: dict[str, Any] = {}


def transport(store: Store, rank: int, size: int, options: object) -> tuple[NativeBackend, str]:
    """Return the gloo group of an hccl group and the name of its communicator.

    Called by csrc/hccl.h.

    Args:
        store, rank, size: of the hccl group.
        options: Options, a timeout as timedelta, or None.
    """
    timeout = (
        options
        if isinstance(options, timedelta)
        else getattr(options, "_timeout", dist.default_pg_timeout)
    )
    gloo = dist.ProcessGroupGloo(PrefixStore("hccl", store), rank, size, timeout)
    if rank == 0:
        store.set("hccl/name", f"hccl_{uuid.uuid4().hex[:12]}")
    return gloo, store.get("hccl/name").decode()


def _create(group: Any, options: Any) -> Any:
    if options is None:
        options = Options()
        options._timeout = group.timeout
    return ProcessGroupHCCL(group.store, group.group_rank, group.group_size, options)


def register() -> None:
    """Register "hccl" with torch.distributed as the backend of npu tensors."""
    ProcessGroupHCCL.Options = Options
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
    dist.is_hccl_available = lambda: True  # type: ignore[attr-defined]
