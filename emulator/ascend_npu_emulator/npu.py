"""The module ``torch.npu``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ascend_npu_emulator import memory, random
from ascend_npu_emulator.devices import (
    current_device,
    device,
    device_count,
    device_of,
    get_device_name,
    get_device_properties,
    get_soc_version,
    is_available,
    set_device,
    synchronize,
)  # fmt: skip
from ascend_npu_emulator.graphs import (
    ExternalEvent,
    NPUGraph,
    graph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    is_current_stream_capturing,
)  # fmt: skip
from ascend_npu_emulator.memory import (
    empty_cache,
    host_empty_cache,
    host_memory_stats,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)  # fmt: skip
from ascend_npu_emulator.missing import NotEmulated, unknown
from ascend_npu_emulator.native import core
from ascend_npu_emulator.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)  # fmt: skip
from ascend_npu_emulator.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "Event", "ExternalEvent", "NPUGraph", "Stream", "StreamContext", "current_device",
    "current_stream", "default_stream", "device", "device_count", "device_of", "empty_cache",
    "get_amp_supported_dtype", "get_device_name", "get_device_properties", "get_rng_state",
    "get_rng_state_all", "get_soc_version", "graph", "graph_pool_handle", "graph_task_group_begin",
    "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end", "host_empty_cache",
    "host_memory_stats", "init", "initial_seed", "is_available", "is_bf16_supported",
    "is_current_stream_capturing", "is_initialized", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory", "memory_allocated",
    "memory_reserved", "memory_stats", "random", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_peak_memory_stats", "seed", "seed_all",
    "set_compile_mode", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "stream",
    "synchronize",
]  # fmt: skip

# Settings that select between equivalent computations. The emulator has only one of them.
config = SimpleNamespace(allow_internal_format=False)

make_graphed_callables = NotEmulated("torch.npu.make_graphed_callables")
# vllm-ascend 0.26 calls these functions to offload KV caches to the host.
_launch_host_func = NotEmulated("torch.npu._launch_host_func")
_subscribe_report = NotEmulated("torch.npu._subscribe_report")


def set_compile_mode(jit_compile: bool = False) -> None:
    """Do nothing: the emulated NPU compiles no operators."""


def init() -> None:
    """Initialise the devices in this process. Called automatically on first use."""
    core.create_context()


_lazy_init = init


def is_initialized() -> bool:
    """Return whether this process has used a device."""
    return core.context_created()


def _is_in_bad_fork() -> bool:
    return core.forked()


def is_bf16_supported() -> bool:
    """Return True."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may use."""
    return [torch.float16, torch.bfloat16, torch.float32]


def __getattr__(name: str) -> Any:
    unknown("torch.npu", name)
