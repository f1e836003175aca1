"""Builds a tiny Qwen3.5-MoE with random weights: GatedDeltaNet in three layers of four, gated full attention, experts and one shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_hybrid import draw_what_a_hybrid_adds, widen_routing_margins
from transformers import PreTrainedModel, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    NUM_EXPERTS,
    VOCAB_SIZE,
    build_model,
    draw_weights,
)

NUM_HEADS, NUM_KV_HEADS = 8, 4
NUM_KEY_HEADS, NUM_VALUE_HEADS = 2, 4  # of GatedDeltaNet: two value heads share a key, as in the published models
# Head sizes of the published models: the kernels for GatedDeltaNet are written for 128, and vllm-ascend 0.23.0 wants a page of
# recurrent state to be as large as the keys of a whole number of tokens, at every TP size.
HEAD_DIM, LINEAR_HEAD_DIM = 256, 128
FULL_ATTENTION_INTERVAL = 4


def build_qwen3_5_moe(directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0) -> Path:
    """Builds a Qwen3.5-MoE of about 15 MB and returns its directory; see build_model.

    It is the class that vllm 0.23.0 registers and that is published, with a vision tower, which is as small as it can be; serve it
    with `language_model_only`.
    """
    return build_model(directory, "qwen3_5_moe", _qwen3_5_moe, dtype=dtype, layers=layers, seed=seed)


def _qwen3_5_moe(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3_5MoeConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": layers,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_POSITIONS,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": LINEAR_HEAD_DIM,
            "linear_value_head_dim": LINEAR_HEAD_DIM,
            "linear_num_key_heads": NUM_KEY_HEADS,
            "linear_num_value_heads": NUM_VALUE_HEADS,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "full_attention_interval": FULL_ATTENTION_INTERVAL,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "mamba_ssm_dtype": "float32",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": HIDDEN_SIZE,
        },
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    model = Qwen3_5MoeForConditionalGeneration(config)
    # transformers 5.5.4 saves the vision tower inside of the language model: the renaming that is meant for the text model alone
    # (conversion_mapping.py:152) is undone for all of it. Without renamings the names are those of the published checkpoints.
    model._weight_conversions = []
    draw_weights(model, generator)
    decoder = model.model.language_model
    draw_what_a_hybrid_adds(decoder, generator)
    widen_routing_margins(decoder, generator)
    return model, {}
