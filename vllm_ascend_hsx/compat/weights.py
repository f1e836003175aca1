"""Weights loaded while the engine runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_hsx.compat.engine import methods
from vllm_ascend_hsx.compat.patch_points import patch
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_30

ENGINE_CORE = "vllm.v1.engine.core"
SET_VERSION = "set_weight_version"
_FOLLOWS = "rows of earlier weights are not reused, and files name the weights of their rows"
_NAMES = "files have the user's name of the weights"
# Calls by vLLM itself that change no weights: at start-up, in LLM.__repr__, before updates.
_HARMLESS_CALLS = frozenset(
    {"update_max_model_len", "get_model_inspection", "init_weight_transfer_engine"}
)


@patch(ENGINE_CORE, "EngineCore.collective_rpc", SINCE_0_23, why=_FOLLOWS)
def follow_weights(
    original: Any,
    self: Any,
    method: Any,
    timeout: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Start a new version of the weights when a client calls the workers.

    Our connector then reuses no earlier rows, and drops name and fingerprint of the earlier
    weights.

    Reason: such calls replace weights: `reload_weights`, `update_weights`, or a function of an RL
    framework (v1/engine/core.py:810 and v1/engine/async_llm.py:1105 in 0.23.0). vLLM leaves it to
    the client to reset the prefix cache. Until then the cache has keys and values of the earlier
    weights. An extracted request must not read them, or the rows would depend on them.

    The call `set_weight_version` names the weights and reaches no worker. Before 0.30 vLLM cannot
    name weights.
    """
    connector = self.scheduler.connector
    if method == SET_VERSION and (namers := list(methods(connector, "name_weights"))):
        for name_weights in namers:
            name_weights(*args, **(kwargs or {}))
        return []
    if method not in _HARMLESS_CALLS:
        for weights_may_change in methods(connector, "weights_may_change"):
            weights_may_change()
    result = original(self, method, timeout, args, kwargs)
    if method == "reload_weights" and (directory := _directory(*args, **(kwargs or {}))):
        for weights_are_of in methods(connector, "weights_are_of"):
            weights_are_of(directory)
    return result


def _directory(
    weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True
) -> str | None:
    """Return the directory that `reload_weights` has read; None for another source.

    The parameters are vLLM's (v1/worker/gpu_model_runner.py:5320 in 0.23.0).
    """
    is_read = weights_iterator is None and weights_path is not None and os.path.isdir(weights_path)
    return str(weights_path) if is_read else None


@patch(ENGINE_CORE, "EngineCore.set_weight_version", SINCE_0_30, why=_NAMES)
def name_weights(original: Any, self: Any, weight_version: str) -> None:
    """Pass the name of the weights to our connector, too.

    Reason: `/finish_weight_update` and `/update_weight_version` set the name in the engine, and
    only `/weight_info` reads it (v1/engine/core.py:973 in 0.30.0).
    """
    for name in methods(self.scheduler.connector, "name_weights"):
        name(weight_version)
    original(self, weight_version)


def reload_weights(worker: Any, path: str) -> None:
    """Load the weights of a checkpoint in place, for `hsx hardware-report`.

    This is not a patch point: extraction does not need it, so a release without it must not refuse
    servers.

    Reason: vllm-ascend's worker has an RPC of that name only since 0.30. The runner has the method
    in 0.23, 0.26 and 0.30 (v1/worker/gpu_model_runner.py:5320 in 0.23.0), model runner V2 too
    (v1/worker/gpu/model_runner.py:357). The configuration is set as in NPUWorker.load_model
    (vllm-ascend's worker/worker.py:691).

    Args:
        worker: vllm-ascend's NPUWorker.
        path: directory of a checkpoint of the same model.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_path=path)
