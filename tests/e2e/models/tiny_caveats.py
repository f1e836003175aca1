"""Tiny models that vllm-ascend computes differently: YaRN, and a sliding window."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_ascend_hsx.demo.tiny_models import (
    HEAD_DIM,
    MAX_POSITIONS,
    build_model,
    common_config,
    draw_weights,
)

WINDOW = 32
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": MAX_POSITIONS // 8,
}


def build_yarn(directory: Path, **rope: Any) -> Path:
    """Build a Qwen3 in float32 with YaRN, with the same weights for any other parameters `rope`."""
    return build_model(
        directory,
        f"qwen3-{rope}",
        partial(_yarn, rope={**YARN, **rope}),
        dtype="float32",
        layers=4,
        seed=0,
    )


def build_mistral(directory: Path, window: int) -> Path:
    """Build a Mistral in float32 with a window in each layer, and the same weights for any."""
    return build_model(
        directory,
        f"mistral-window{window}",
        partial(_mistral, window=window),
        dtype="float32",
        layers=4,
        seed=0,
    )


def _yarn(
    layers: int, generator: torch.Generator, *, rope: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3Config(
        **common_config(layers), intermediate_size=512, head_dim=HEAD_DIM, rope_parameters=rope
    )
    return _drawn(Qwen3ForCausalLM(config), generator)


def _mistral(
    layers: int, generator: torch.Generator, *, window: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = MistralConfig(
        **common_config(layers), intermediate_size=512, head_dim=HEAD_DIM, sliding_window=window
    )
    return _drawn(MistralForCausalLM(config), generator)


def _drawn(
    model: PreTrainedModel, generator: torch.Generator
) -> tuple[PreTrainedModel, dict[str, Any]]:
    draw_weights(model, generator)
    return model, {}
