"""The c10d backend "hccl" (csrc/hccl/): options, registration, and the underlying gloo group."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as NativeBackend
from torch._C._distributed_c10d import PrefixStore, Store

from ascend_npu_emulator.native import core

ProcessGroupHCCL: Any = core.ProcessGroupHCCL  # c10d.Backend, a class of csrc/hccl/


class Options(NativeBackend.Options):
    """torch_npu's ProcessGroupHCCL.Options."""

    def __init__(self) -> None:
        super().__init__("hccl", dist.default_pg_timeout)
        self.is_high_priority_stream = False
        self.op_timeout = self._timeout
        self.hccl_config: dict[str, Any] = {}
        self.global_ranks_in_group: list[int] = []
        self.group_id = ""


def transport(
    store: Store, rank: int, size: int, options: object
) -> tuple[NativeBackend, str, str, list[int], Store]:
    """Return the gloo group that carries an hccl group, and the identity of that group.

    Called by csrc/hccl/hccl.h. The identity is the communicator's name, the group's name, the ranks
    and a store for the records of waiting ranks (csrc/hccl/waits.h). If torch.distributed made the
    group, the ranks are global and all groups share the store. Otherwise ranks and store are local
    to the group.

    Args:
        store, rank, size: arguments of the hccl group.
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
    name = store.get("hccl/name").decode()
    group_id = getattr(options, "group_id", "")
    waits = PrefixStore("hccl/waits", _shared(store) if group_id else store)
    return (
        gloo,
        name,
        group_id or name,
        getattr(options, "global_ranks_in_group", []) or list(range(size)),
        waits,
    )


def _shared(store: Store) -> Store:
    """Return the store that all groups share, without the prefixes of one group."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _create(group: Any, options: Any) -> Any:
    if options is None:
        options = Options()
        options._timeout = group.timeout
    # As in torch_npu, empty ranks mean the default group.
    options.global_ranks_in_group = group.global_ranks_in_group
    options.group_id = group.group_id
    return ProcessGroupHCCL(group.store, group.group_rank, group.group_size, options)


def register() -> None:
    """Register "hccl" with torch.distributed as the backend of npu tensors."""
    ProcessGroupHCCL.Options = Options
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
    dist.is_hccl_available = lambda: True  # type: ignore[attr-defined]
