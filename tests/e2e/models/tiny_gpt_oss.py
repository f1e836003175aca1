"""Build a tiny gpt-oss: sliding-window and full attention, sinks, experts with biases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    MAX_POSITIONS,
    NUM_EXPERTS,
    NUM_HEADS,
    ROUTING,
    build_model,
    choose_experts,
    common_config,
    draw_weights,
    follow_choice,
)

HEAD_DIM = 64  # as in the published models
WINDOW = 32


def build_gpt_oss(
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    layers: int = 4,
    seed: int = 0,
    window: int = WINDOW,
) -> Path:
    """Build a gpt-oss of 10 MB whose even layers see `window` tokens, the current one included.

    The weights are the same for every window. Otherwise like demo.tiny_models.build_minimax_m2.
    """
    name = f"gpt_oss-window{window}"
    return build_model(
        directory, name, partial(_gpt_oss, window=window), dtype=dtype, layers=layers, seed=seed
    )


def _gpt_oss(
    layers: int, generator: torch.Generator, *, window: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = GptOssConfig(
        **common_config(layers),
        intermediate_size=128,
        head_dim=HEAD_DIM,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=window,
        # vllm 0.23.0 assumes YaRN with all of these keys (model_executor/models/gpt_oss.py:79).
        # Prompts are longer than the original positions, to use scaled frequencies.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 32,
        },
        rms_norm_eps=1e-5,  # vllm hard-codes this number
    )
    model = GptOssForCausalLM(config)
    draw_weights(model, generator)
    _draw_gpt_oss_parameters(model, generator)
    _widen_routing_margins(model, generator)
    return model, {}


@torch.no_grad()
def _draw_gpt_oss_parameters(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw sinks and biases large enough to matter, and experts [in, out] scaled by inputs."""
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        # The sinks take a quarter of the attention in a sliding layer, a tenth in a full one.
        attention.sinks.copy_(3.0 + torch.randn(NUM_HEADS, generator=generator))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.bias.copy_(0.2 * torch.randn(projection.bias.shape, generator=generator))
        for matrix in (experts.gate_up_proj, experts.down_proj):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) / matrix.shape[1] ** 0.5)
        for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
            bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))


@torch.no_grad()
def _widen_routing_margins(model: PreTrainedModel, generator: torch.Generator) -> None:
    """As in demo/tiny_models.py; here the projections have biases."""
    choose_experts(model.get_input_embeddings().weight, generator)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[ROUTING] *= 0.1
        layer.self_attn.o_proj.bias[ROUTING] *= 0.1
        layer.mlp.experts.down_proj[:, :, ROUTING] *= 0.1
        layer.mlp.experts.down_proj_bias[:, ROUTING] *= 0.1
        follow_choice(layer.mlp.router.weight, 0.3, generator)
        layer.mlp.router.bias.copy_(0.02 * torch.randn(NUM_EXPERTS, generator=generator))
