"""Tiny Qwen3-MoE models in float32, and in bfloat16 with routing independent of rounding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from routing import widen_routing_margins
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    NUM_EXPERTS,
    build_model,
    common_config,
    draw_weights,
)


def build_qwen3_moe(directory: Path, *, seed: int = 0) -> Path:
    """Build one of four layers in float32 and return the directory; see build_model."""
    create = partial(_create, {}, HEAD_DIM)
    return build_model(directory, "qwen3_moe", create, dtype="float32", layers=4, seed=seed)


def build_bfloat16_qwen3_moe(directory: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Build one with the heads of published models, whose experts the embedding decides on."""
    create = partial(_create, {"heads": 4, "kv_heads": 2}, 128)
    return build_model(
        directory, "qwen3_moe of wide heads", create, dtype="bfloat16", layers=layers, seed=seed
    )


def _create(
    heads: dict[str, int], head_dim: int, layers: int, generator: torch.Generator
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3MoeConfig(
        **common_config(layers, **heads),
        intermediate_size=512,
        moe_intermediate_size=128,
        head_dim=head_dim,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    model = Qwen3MoeForCausalLM(config)
    draw_weights(model, generator)
    if heads:
        widen_routing_margins(model, generator)
    return model, {}
