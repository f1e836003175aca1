"""A tiny Qwen3-MoE in float32, in which rounding decides no routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from vllm_ascend_hsx.demo.tiny_models import EXPERTS_PER_TOKEN, HEAD_DIM, NUM_EXPERTS, build_model, common_config, draw_weights


def build_qwen3_moe(directory: Path, *, seed: int = 0) -> Path:
    """Build one of four layers and return its directory; see build_model."""
    return build_model(directory, "qwen3_moe", _create, dtype="float32", layers=4, seed=seed)


def _create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3MoeConfig(
        **common_config(layers),
        intermediate_size=512,
        moe_intermediate_size=128,
        head_dim=HEAD_DIM,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    model = Qwen3MoeForCausalLM(config)
    draw_weights(model, generator)
    return model, {}
