"""What the tiny Qwen3.5-MoE and Qwen3-Next have in common: the parameters of GatedDeltaNet, norms around 0, routers with wide margins."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ascend_hsx.demo.tiny_models import EXPERTS_PER_TOKEN, HIDDEN_SIZE, NUM_EXPERTS, VOCAB_SIZE


@torch.no_grad()
def draw_what_a_hybrid_adds(decoder: Any, generator: torch.Generator) -> None:
    """Draws what a decoder (embedding, layers, norm) has beyond ordinary attention.

    Its norms multiply by 1 + weight. A state of GatedDeltaNet forgets half of itself in about 20 to 300 tokens, so that a row tells
    the tokens before it, near and far, and the convolution weighs all of its taps alike.
    """
    norms = [decoder.norm]
    for layer in decoder.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if layer.layer_type == "full_attention":
            norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
            continue
        linear = layer.linear_attn
        heads = linear.A_log.shape[0]
        half_lives = torch.logspace(1.3, 2.5, heads)[torch.randperm(heads, generator=generator)]
        linear.A_log.copy_((0.693 / half_lives).log())
        linear.dt_bias.copy_(0.5 + 0.1 * torch.randn(heads, generator=generator))  # softplus(0.5) is about 1
        linear.conv1d.weight.copy_(0.7 * torch.randn(linear.conv1d.weight.shape, generator=generator))
    for norm in norms:
        norm.weight.sub_(1.0)


@torch.no_grad()
def widen_routing_margins(decoder: Any, generator: torch.Generator) -> None:
    """Makes the choice of experts robust to rounding, as that of the tiny MiniMax-M2 (vllm_ascend_hsx.demo.tiny_models).

    A token's embedding carries, in NUM_EXPERTS coordinates of its own, which experts it goes to, and the layers write little into
    them.
    """
    routing = slice(HIDDEN_SIZE - NUM_EXPERTS, HIDDEN_SIZE)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:EXPERTS_PER_TOKEN] for _ in range(VOCAB_SIZE)])
    code = torch.full((VOCAB_SIZE, NUM_EXPERTS), -1.5).scatter_(1, chosen, 3.0)
    decoder.embed_tokens.weight[:, routing] = code
    for layer in decoder.layers:
        mixer = layer.self_attn.o_proj if layer.layer_type == "full_attention" else layer.linear_attn.out_proj
        mixer.weight[routing] *= 0.1
        layer.mlp.experts.down_proj[:, routing] *= 0.1
        layer.mlp.shared_expert.down_proj.weight[routing] *= 0.1
        layer.mlp.gate.weight *= 0.1
        layer.mlp.gate.weight[:, routing] = torch.eye(NUM_EXPERTS)[torch.randperm(NUM_EXPERTS, generator=generator)]
