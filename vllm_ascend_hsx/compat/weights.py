"""Load weights again for `hsx hardware-report`.

Nothing here is declared as a patch point: no extraction needs it, so a release without it must not
refuse servers.
"""

from __future__ import annotations

from typing import Any


def reload_weights(worker: Any, path: str) -> None:
    """Load the weights of a checkpoint in place.

    Reason: vllm-ascend's worker has an RPC of that name since 0.30 only. The runner has the method
    in 0.23, 0.26 and 0.30 (v1/worker/gpu_model_runner.py:5320 in 0.23.0), model runner V2 too
    (v1/worker/gpu/model_runner.py:357). The configuration is set as NPUWorker.load_model sets it
    (vllm-ascend's worker/worker.py:691).

    Args:
        worker: vllm-ascend's NPUWorker.
        path: directory of a checkpoint of the same model.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_path=path)
