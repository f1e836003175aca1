"""Requirements on a tiny model that make a comparison with it meaningful."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from vllm_ascend_hsx.demo.compare import ROW_TOLERANCE
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import EXPERTS_PER_TOKEN, NUM_EXPERTS

TOLERANCE = ROW_TOLERANCE * torch.finfo(torch.bfloat16).eps


def assert_rows_lie_apart(model: Path, token_ids: Sequence[int]) -> None:
    """Check that rows of other tokens and neighbouring layers differ by more than the tolerance."""
    rows = reference_hidden_states(model, token_ids, [1, 2, 3, 4])
    norms = rows.norm(dim=-1)
    for layer in range(4):
        distances = torch.cdist(rows[:, layer], rows[:, layer]) / norms[:, layer]
        distances.fill_diagonal_(1.0)
        assert distances.min() > 2 * TOLERANCE
    assert ((rows[:, 1:] - rows[:, :-1]).norm(dim=-1) / norms[:, 1:]).min() > 5 * TOLERANCE


def assert_experts_are_chosen_evenly_and_alike(model: Path, token_ids: Sequence[int]) -> None:
    """Check that float32 and bfloat16 choose the same experts; rounding must not change them."""
    chosen = []
    for dtype in (torch.float32, torch.bfloat16):
        target = AutoModelForCausalLM.from_pretrained(model).to(dtype)
        choices: list[torch.Tensor] = []
        for layer in target.get_decoder().layers:
            layer.mlp.gate.register_forward_hook(
                lambda _module, _arguments, out, choices=choices: choices.append(
                    out[2].sort(-1).values
                )
            )
        with torch.no_grad():
            target(torch.tensor([token_ids]))
        chosen.append(torch.stack(choices))
    assert torch.equal(*chosen)
    assert chosen[0].shape[-1] == EXPERTS_PER_TOKEN
    share = torch.bincount(chosen[0].flatten(), minlength=NUM_EXPERTS) / chosen[0].numel()
    assert share.min() > 0.5 / NUM_EXPERTS
