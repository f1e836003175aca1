"""Build a tiny DeepSeek-V3: MLA, a dense layer, experts in groups beside a shared one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from vllm_ascend_hsx.demo.tiny_models import (
    HIDDEN_SIZE,
    MAX_POSITIONS,
    VOCAB_SIZE,
    build_model,
    common_config,
    draw_weights,
)

NUM_HEADS = 4  # with TP 2, two heads a rank
# The published model's head sizes: the fused attention kernel accepts no others for latent keys.
KV_LORA_RANK, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
Q_LORA_RANK = 96
NUM_EXPERTS, EXPERT_GROUPS = 16, 4  # the router's kernel requires more than two experts in a group
GROUPS_PER_TOKEN, EXPERTS_PER_TOKEN = 2, 4
LEVELS = ((4.0, 1.5), (4.0, 1.5), (2.75,))  # see widen_routing_margins
DENSE_LAYERS = 1
YARN_FACTOR = 32.0
# Keys that vllm 0.23.0 reads (models/deepseek_v2.py) and transformers does not write.
FURTHER_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def build_deepseek_v3(
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    layers: int = 4,
    seed: int = 0,
    q_lora_rank: int | None = Q_LORA_RANK,
) -> Path:
    """Build a DeepSeek-V3 of 15 MB, and return the directory; see build_model.

    q_lora_rank: None for the variant without a latent query (DeepSeek-V2-Lite).
    """

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        return _deepseek_v3(layers, generator, q_lora_rank)

    model_type = "deepseek_v3" if q_lora_rank is not None else "deepseek_v3 without q_lora_rank"
    return build_model(directory, model_type, create, dtype=dtype, layers=layers, seed=seed)


def add_mtp_layer(model: Path) -> Path:
    """Add the layer that predicts a second token (MTP), as in published checkpoints.

    The decoder must not load it: the weights are the last layer's, times 10.
    """
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    last, added = (
        f"model.layers.{config['num_hidden_layers'] - 1}.",
        f"model.layers.{config['num_hidden_layers']}.",
    )
    weights |= {
        name.replace(last, added): 10 * weight
        for name, weight in weights.items()
        if name.startswith(last)
    }
    norm, embedding = weights["model.norm.weight"], weights["model.embed_tokens.weight"]
    own = {
        "enorm.weight": norm,
        "hnorm.weight": norm,
        "shared_head.norm.weight": norm,
        "embed_tokens.weight": embedding,
    }
    own |= {
        "shared_head.head.weight": weights["lm_head.weight"],
        "eh_proj.weight": torch.cat(2 * [torch.eye(HIDDEN_SIZE)], dim=1),
    }
    weights |= {added + name: 10 * weight.to(norm.dtype) for name, weight in own.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model


def _deepseek_v3(
    layers: int, generator: torch.Generator, q_lora_rank: int | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    model = DeepseekV3ForCausalLM(deepseek_v3_config(layers, q_lora_rank=q_lora_rank))
    draw_weights(model, generator)
    sharpen_attention(model)
    widen_routing_margins(model, generator)
    return model, dict(FURTHER_KEYS)


def deepseek_v3_config(layers: int, **changes: Any) -> DeepseekV3Config:
    """Return the configuration with these keys changed or added."""
    keys = {
        **common_config(layers, NUM_HEADS, NUM_HEADS),
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "n_routed_experts": NUM_EXPERTS,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": KV_LORA_RANK,
        "q_lora_rank": Q_LORA_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "qk_nope_head_dim": NOPE_DIM,
        "n_group": EXPERT_GROUPS,
        "topk_group": GROUPS_PER_TOKEN,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "first_k_dense_replace": DENSE_LAYERS,
        "norm_topk_prob": True,
        # Prompts of the tests are longer than the original length, to make the scaling visible.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": int(MAX_POSITIONS / YARN_FACTOR),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    return DeepseekV3Config(**keys | changes)


@torch.no_grad()
def sharpen_attention(model: PreTrainedModel) -> None:
    """Sharpen attention: an average over the whole prompt would hide a wrong row."""
    for layer in model.model.layers:
        attention = layer.self_attn
        query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        query.weight.mul_(1.2)
        attention.o_proj.weight.mul_(1.8)


@torch.no_grad()
def widen_routing_margins(
    model: PreTrainedModel, generator: torch.Generator, levels: Sequence[Sequence[float]] = LEVELS
) -> None:
    """Let the embedding decide on experts, and not rounding, as demo/tiny_models.py does.

    Args:
        levels: the experts of a token that stand out, for each of three groups. By default two in
            each of two groups, and one in a third group that scores higher than some of the four: a
            router that ignored the groups would choose it.
    """
    size = NUM_EXPERTS // EXPERT_GROUPS
    routing = slice(HIDDEN_SIZE - NUM_EXPERTS, HIDDEN_SIZE)
    code = torch.full((VOCAB_SIZE, EXPERT_GROUPS, size), -3.0)
    for token in range(VOCAB_SIZE):
        groups = torch.randperm(EXPERT_GROUPS, generator=generator)[: len(levels)].tolist()
        for group, values in zip(groups, levels, strict=True):
            experts = torch.randperm(size, generator=generator)[: len(values)]
            code[token, group, experts] = torch.tensor(values)
    model.get_input_embeddings().weight[:, routing] = code.flatten(1)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[routing] *= 0.1
        if not hasattr(layer.mlp, "gate"):
            layer.mlp.down_proj.weight[routing] *= 0.1
            continue
        layer.mlp.experts.down_proj[:, routing] *= 0.1
        layer.mlp.shared_experts.down_proj.weight[routing] *= 0.1
        # Another position in every layer for each group, and for each expert in the group.
        places = torch.arange(NUM_EXPERTS).view(EXPERT_GROUPS, size)[
            torch.randperm(EXPERT_GROUPS, generator=generator)
        ]
        places = torch.stack([group[torch.randperm(size, generator=generator)] for group in places])
        layer.mlp.gate.weight *= 0.1
        layer.mlp.gate.weight[:, routing] = torch.eye(NUM_EXPERTS)[places.flatten()]
        layer.mlp.gate.e_score_correction_bias.copy_(
            0.02 * torch.randn(NUM_EXPERTS, generator=generator)
        )
