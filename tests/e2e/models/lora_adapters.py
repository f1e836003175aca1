"""Tiny adapters (LoRA) in peft's format, and the model with a merged adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_hsx.demo.tiny_models import ROUTING

RANK, ALPHA = 8, 12  # an adapter's product is scaled by ALPHA / RANK
SHARE = 0.3  # share of the layer's own output in the product, before scaling
WEIGHTS = "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_adapter(directory: Path, model: Path, modules: Sequence[str], seed: int) -> Path:
    """Write a random adapter of all linear layers with these names, and return the directory."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in modules:
            rows, columns = weight.shape
            tensors[f"{_PREFIX}{layer}{_A}"] = (
                torch.randn(RANK, columns, generator=generator) / columns**0.5
            ).to(weight.dtype)
            b = torch.randn(rows, RANK, generator=generator) * SHARE / RANK**0.5
            if layer.endswith("o_proj"):
                b[ROUTING] *= (
                    0.1  # as in the models: rounding must not change the choice of experts
                )
            tensors[f"{_PREFIX}{layer}{_B}"] = b.to(weight.dtype)
    assert tensors, f"{model} has no {modules}"
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Write the model with W + ALPHA / RANK * B A for W, in float32; return the directory."""
    weights = {
        name: weight.float() for name, weight in load_file(model / "model.safetensors").items()
    }
    tensors = load_file(adapter / WEIGHTS)
    for layer in (name.removesuffix(_A) for name in tensors if name.endswith(_A)):
        product = tensors[f"{layer}{_B}"].float() @ tensors[f"{layer}{_A}"].float()
        weights[f"{layer.removeprefix(_PREFIX)}.weight"] += ALPHA / RANK * product
    directory.mkdir(parents=True)
    shutil.copyfile(model / "config.json", directory / "config.json")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
