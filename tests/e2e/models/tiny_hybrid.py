"""Build tiny Qwen3.5, with experts and dense, and Qwen3-Next: GatedDeltaNet in 3 of 4 layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import Run
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    ROUTING,
    build_model,
    choose_experts,
    common_config,
    draw_weights,
    follow_choice,
)

ROPE = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}


def build_qwen3_5_moe(
    directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0
) -> Path:
    """Build a Qwen3.5-MoE of 15 MB with a minimal vision tower; serve it `language_model_only`."""
    return build_model(
        directory, "qwen3_5_moe", _qwen3_5_moe, dtype=dtype, layers=layers, seed=seed
    )


def build_qwen3_5(
    directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0
) -> Path:
    """Build a dense Qwen3.5. Otherwise like build_qwen3_5_moe."""
    return build_model(directory, "qwen3_5", _qwen3_5, dtype=dtype, layers=layers, seed=seed)


def build_qwen3_next(
    directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0
) -> Path:
    """Build a Qwen3-Next of 20 MB."""
    return build_model(directory, "qwen3_next", _qwen3_next, dtype=dtype, layers=layers, seed=seed)


def _hybrid_config(layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return the common part of both configurations, with the published head sizes.

    GatedDeltaNet's kernels are written for 128, and vllm-ascend 0.23.0 needs a page of recurrent
    state to be as large as the keys of a whole number of tokens, at every TP size.
    """
    return {
        **common_config(layers, heads, kv_heads),
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,  # two share a key, as in the published models
    }


EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
}


def _qwen3_5_moe(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    return _of_qwen3_5(
        Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, EXPERTS, layers, generator
    )


def _qwen3_5(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    return _of_qwen3_5(
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        {"intermediate_size": 256},
        layers,
        generator,
    )


def _of_qwen3_5(
    model_type: type[PreTrainedModel],
    config_type: Any,
    sizes: dict[str, Any],
    layers: int,
    generator: torch.Generator,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    rope = {**ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = {
        **_hybrid_config(layers, heads=8, kv_heads=4),
        **sizes,
        "rope_parameters": rope,
        "mamba_ssm_dtype": "float32",
    }
    config = config_type(
        text_config=text,
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
    model = model_type(config)
    # transformers 5.5.4 undoes the renaming of the text model (conversion_mapping.py:152) for the
    # vision tower, too. Without renamings the names are as in the published checkpoints.
    model._weight_conversions = []
    _draw(model, model.model.language_model, generator)
    return model, {}


def _qwen3_next(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    # Half of Qwen3.5's heads: states are bfloat16, and a page of them is as large as 128 tokens'
    # keys.
    config = Qwen3NextConfig(
        **_hybrid_config(layers, heads=4, kv_heads=2),
        **EXPERTS,
        intermediate_size=256,
        rope_parameters=ROPE,
    )
    model = Qwen3NextForCausalLM(config)
    _draw(model, model.model, generator)
    return model, {}


def _draw(model: PreTrainedModel, decoder: Any, generator: torch.Generator) -> None:
    draw_weights(model, generator)
    _draw_hybrid_parameters(decoder, generator)
    _widen_routing_margins(decoder, generator)


@torch.no_grad()
def _draw_hybrid_parameters(decoder: Any, generator: torch.Generator) -> None:
    """Draw the parameters that a decoder (embedding, layers, norm) has beyond ordinary attention.

    Norms multiply by 1 + weight. A state of GatedDeltaNet halves in 20 to 300 tokens, so a row
    depends on near and far tokens; the convolution weighs the taps equally.
    """
    norms = [decoder.norm]
    for layer in decoder.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if hasattr(layer, "self_attn"):
            norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
            continue
        linear = layer.linear_attn
        heads = linear.A_log.shape[0]
        half_lives = torch.logspace(1.3, 2.5, heads)[torch.randperm(heads, generator=generator)]
        linear.A_log.copy_((0.693 / half_lives).log())
        linear.dt_bias.copy_(
            0.5 + 0.1 * torch.randn(heads, generator=generator)
        )  # softplus(0.5) is about 1
        linear.conv1d.weight.copy_(
            0.7 * torch.randn(linear.conv1d.weight.shape, generator=generator)
        )
    for norm in norms:
        norm.weight.sub_(1.0)


@torch.no_grad()
def _widen_routing_margins(decoder: Any, generator: torch.Generator) -> None:
    """As in demo/tiny_models.py; here a shared expert writes, too."""
    choose_experts(decoder.embed_tokens.weight, generator)
    for layer in decoder.layers:
        mixer = (
            layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
        )
        mixer.weight[ROUTING] *= 0.1
        if not hasattr(layer.mlp, "experts"):
            continue
        layer.mlp.experts.down_proj[:, ROUTING] *= 0.1
        layer.mlp.shared_expert.down_proj.weight[ROUTING] *= 0.1
        follow_choice(layer.mlp.gate.weight, 0.1, generator)


def regret(model: Path, run: Run, request_id: str) -> float:
    """Return the maximum gap between a generated token's logit and the best logit."""
    prompt, generated = run.requests[request_id]["prompt"], run.requests[request_id]["tokens"]
    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(model)
            .float()(torch.tensor([prompt + generated]))
            .logits[0]
        )
    logits = logits[len(prompt) - 1 : -1]
    return float(
        (logits.amax(-1) - logits.gather(1, torch.tensor(generated).unsqueeze(1)).squeeze(1)).max()
    )
