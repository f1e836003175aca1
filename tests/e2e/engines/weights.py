"""Replace weights while an engine runs. Each function is called in every worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_again(worker: Any, path: str) -> None:
    """Load the weights of a checkpoint in place."""
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    experts = [each for each in runner.model.modules() if hasattr(each, "w2_weight")]
    with set_current_vllm_config(worker.vllm_config):
        if all(hasattr(each.w2_weight, "weight_loader") for each in experts):
            runner.reload_weights(weights_path=path)
        else:
            _load_after_wake_up(runner, experts, path)


def _load_after_wake_up(runner: Any, experts: list[Any], path: str) -> None:
    """Load a MoE as vllm-ascend's example does (examples/offline_weight_load.py:226 in 0.23.0).

    `wake_up` of 0.23.0 leaves experts in the layout of the checkpoint, and without loaders.
    """
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    for each in experts:
        each.w2_weight.weight_loader = each.w13_weight.weight_loader = each.weight_loader
    for file in sorted(Path(path).glob("*.safetensors")):
        runner.model.load_weights(load_file(file).items())
    process_weights_after_loading(runner.model, runner.vllm_config.model_config, runner.device)


def _weights(worker: Any) -> dict[str, Any]:
    """Return the tensors that the kernels read: parameters, and results of quantisation."""
    import torch

    found = dict(worker.model_runner.model.named_parameters())
    for name, module in worker.model_runner.model.named_modules():
        found |= {
            f"{name}.{key}": value
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
    return found


def keep(worker: Any) -> None:
    """Copy the weights to the host."""
    worker.kept_by_test = {name: weight.cpu() for name, weight in _weights(worker).items()}


def put_back(worker: Any) -> None:
    """Copy them back to the device."""
    for name, weight in _weights(worker).items():
        weight.data.copy_(worker.kept_by_test[name])
