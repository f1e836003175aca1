"""Configurations with and without our connector, and vLLM's classes to patch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from vllm_ascend_hsx.config import FAILURE_REPORT_TIMEOUT_S

OPTIONS = {"shared_storage_path": "/data", "drain_timeout_s": 100, "storage_timeout_s": 20}
OURS = {
    "kv_connector": "AscendHiddenStatesConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": OPTIONS,
}
PATIENCE = 100 + 20 + FAILURE_REPORT_TIMEOUT_S


def transfer(kv_connector: str, extra: dict[str, Any]) -> Any:
    return SimpleNamespace(
        kv_connector=kv_connector, kv_role="kv_producer", kv_connector_extra_config=extra
    )


ALONE = transfer("AscendHiddenStatesConnector", OPTIONS)
OTHER = transfer("MooncakeConnector", {})


def config(kv_transfer_config: Any = ALONE, shutdown_timeout: int = 0) -> Any:
    parallel = SimpleNamespace(data_parallel_size=1, assigned_physical_gpu_ids=None)
    return SimpleNamespace(
        kv_transfer_config=kv_transfer_config,
        shutdown_timeout=shutdown_timeout,
        parallel_config=parallel,
    )


def fresh(real: type, *names: str) -> Any:
    """Return a subclass with vLLM's original methods, even after our plugin was loaded."""
    return type(
        real.__name__,
        (real,),
        {name: inspect.unwrap(inspect.getattr_static(real, name)) for name in names},
    )
