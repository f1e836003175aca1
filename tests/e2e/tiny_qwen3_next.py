"""Builds a tiny Qwen3-Next with random weights: GatedDeltaNet in three layers of four, gated full attention, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_hybrid import draw_what_a_hybrid_adds, widen_routing_margins
from tiny_qwen3_5_moe import FULL_ATTENTION_INTERVAL, HEAD_DIM, LINEAR_HEAD_DIM, NUM_KEY_HEADS, NUM_VALUE_HEADS
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    NUM_EXPERTS,
    VOCAB_SIZE,
    build_model,
    draw_weights,
)

# Half of Qwen3.5's: its states are bfloat16, and a page of them is as large as the keys of 128 tokens.
NUM_HEADS, NUM_KV_HEADS = 4, 2


def build_qwen3_next(directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0) -> Path:
    """Builds a Qwen3-Next of about 20 MB and returns its directory; see build_model."""
    return build_model(directory, "qwen3_next", _qwen3_next, dtype=dtype, layers=layers, seed=seed)


def _qwen3_next(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=LINEAR_HEAD_DIM,
        linear_value_head_dim=LINEAR_HEAD_DIM,
        linear_num_key_heads=NUM_KEY_HEADS,
        linear_num_value_heads=NUM_VALUE_HEADS,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        full_attention_interval=FULL_ATTENTION_INTERVAL,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3NextForCausalLM(config)
    draw_weights(model, generator)
    draw_what_a_hybrid_adds(model.model, generator)
    widen_routing_margins(model.model, generator)
    return model, {}
