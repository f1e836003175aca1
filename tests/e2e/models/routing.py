"""Tiny models with experts whose routing does not depend on rounding."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from vllm_ascend_hsx.demo.tiny_models import ROUTING, choose_experts, follow_choice


@torch.no_grad()
def widen_routing_margins(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Let the embedding decide on experts, as demo/tiny_models.py does."""
    choose_experts(model.get_input_embeddings().weight, generator)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            follow_choice(parameter, 0.3, generator)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[ROUTING] *= 0.1
        elif name.endswith("experts.down_proj"):
            parameter[:, ROUTING] *= 0.1
