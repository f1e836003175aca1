"""Build a tiny DeepSeek-V3.2 and GLM-5: a DeepSeek-V3 whose indexer selects 2048 tokens (DSA).

The reference is transformers' DeepSeek-V3 with a mask from an indexer defined here. transformers
5.5.4 has no DeepSeek-V3.2, and turns the rotary embeddings of GLM-5 by halves
(models/glm_moe_dsa/modeling_glm_moe_dsa.py:105), although the published weights are interleaved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from harness import tokens
from tiny_deepseek_v3 import (
    FURTHER_KEYS,
    KV_LORA_RANK,
    LEVELS,
    NUM_EXPERTS,
    ROPE_DIM,
    deepseek_v3_config,
    sharpen_attention,
    widen_routing_margins,
)
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from vllm_ascend_hsx.demo.tiny_models import HIDDEN_SIZE, build_model, draw_weights

# vllm-ascend 0.23.0 passes this number to the kernel, not index_topk (device/device_op.py:627).
SELECTED = 2048
INDEX_HEADS, INDEX_DIM = 8, 128  # the kernel accepts no other dimension
DEEPSEEK_V32, GLM_5, GLM_52 = "DeepSeek-V3.2", "GLM-5", "GLM-5.2"
MODEL_TYPES = {DEEPSEEK_V32: "deepseek_v32", GLM_5: "glm_moe_dsa", GLM_52: "glm_moe_dsa"}
ARCHITECTURES = {
    DEEPSEEK_V32: "DeepseekV32ForCausalLM",
    GLM_5: "GlmMoeDsaForCausalLM",
    GLM_52: "GlmMoeDsaForCausalLM",
}
# Tokens that the indexer selects last; see _separate_scores.
LOWEST, LOW_TOKENS = 600, 40
_ONE, _CLASS, _PULL = (
    HIDDEN_SIZE - NUM_EXPERTS - i for i in (1, 2, 3)
)  # elements of the residual stream that no layer changes
_LEVELS_WITHOUT_GROUPS = ((4.0,), (4.0,), (4.0,))
# GLM-5's own head sizes; the router has no groups.
_GLM_5 = {
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "indexer_rope_interleave": True,
}
# Every second layer uses the selection of the previous layer.
_SHARED = "shared"
_GLM_52 = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
_CONFIGS: dict[str, dict[str, Any]] = {
    DEEPSEEK_V32: {},
    GLM_5: _GLM_5,
    GLM_52: {**_GLM_5, **_GLM_52},
}


class Indexer(nn.Module):
    """Selects the SELECTED keys with the highest scores sum_h w_h relu(q_h k) for each query."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.interleaved = getattr(config, "indexer_rope_interleave", False)
        self.wq_b = nn.Linear(config.q_lora_rank, INDEX_HEADS * INDEX_DIM, bias=False)
        self.wk = nn.Linear(config.hidden_size, INDEX_DIM, bias=False)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, INDEX_HEADS, bias=False)

    def scores(
        self,
        hidden: torch.Tensor,
        latent_query: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return [queries, keys] in float32 for rows [tokens, ...] of one sequence."""
        cos, sin = (part[0].unsqueeze(1) for part in turns)  # [tokens, 1, ROPE_DIM]
        query = self._turned(self.wq_b(latent_query).view(-1, INDEX_HEADS, INDEX_DIM), cos, sin)
        key = self._turned(self.k_norm(self.wk(hidden)).unsqueeze(1), cos, sin)[:, 0]
        products = torch.relu(torch.einsum("qhd,kd->hqk", query.float(), key.float()))
        return torch.einsum("hqk,qh->qk", products, self.weights_proj(hidden).float())

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn the first ROPE_DIM elements: neighbours, or elements a half apart."""
        half = ROPE_DIM // 2
        first, second = (
            (x[..., :ROPE_DIM:2], x[..., 1:ROPE_DIM:2])
            if self.interleaved
            else (x[..., :half], x[..., half:ROPE_DIM])
        )
        cos, sin = cos[..., :half], sin[..., :half]
        turned = first * cos - second * sin, second * cos + first * sin
        pairs = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat((pairs, x[..., ROPE_DIM:]), -1)


class SparseAttention(DeepseekV3Attention):
    """Attention of DeepSeek-V3 to the keys that an indexer selects."""

    def __init__(
        self, config: DeepseekV3Config, layer_idx: int, chosen: list[torch.Tensor]
    ) -> None:
        super().__init__(config, layer_idx)
        kinds = getattr(config, "indexer_types", None)
        self.indexer = (
            None if kinds is not None and kinds[layer_idx] == _SHARED else Indexer(config)
        )
        self.chosen = chosen  # by the last layer with an indexer

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        tokens = hidden_states.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if self.indexer is not None:
            latent_query = self.q_a_layernorm(self.q_a_proj(hidden_states))
            scores = self.indexer.scores(hidden_states[0], latent_query[0], position_embeddings)
            self.chosen[:] = [
                scores.masked_fill(later, float("-inf")).topk(min(SELECTED, tokens)).indices
            ]
        hidden = later | torch.ones_like(later).scatter_(1, self.chosen[0], False)
        mask = torch.zeros(1, 1, tokens, tokens, dtype=hidden_states.dtype).masked_fill(
            hidden, float("-inf")
        )
        return super().forward(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=mask,
            **more,
        )


class SparseForCausalLM(DeepseekV3ForCausalLM):
    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = SparseAttention(config, index, chosen)
        self.post_init()


def build_sparse(directory: str | Path, family: str, *, layers: int = 2, seed: int = 0) -> Path:
    """Build a model of a family in bfloat16, and return the directory; see build_model."""

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        kinds = ["full" if index % 2 == 0 else _SHARED for index in range(layers)]
        shared = {"indexer_types": kinds} if family == GLM_52 else {}
        model = SparseForCausalLM(deepseek_v3_config(layers, **_CONFIGS[family], **shared))
        draw_weights(model, generator)
        sharpen_attention(model)
        widen_routing_margins(
            model, generator, LEVELS if family == DEEPSEEK_V32 else _LEVELS_WITHOUT_GROUPS
        )
        _separate_scores(model)
        keys = {"index_topk": SELECTED, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM}
        return model, {
            **FURTHER_KEYS,
            **keys,
            "model_type": MODEL_TYPES[family],
            "architectures": [ARCHITECTURES[family]],
        }

    return build_model(
        directory, MODEL_TYPES[family], create, dtype="bfloat16", layers=layers, seed=seed
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt whose part after SELECTED tokens alternates with low tokens."""
    ids = tokens(length, seed)
    ids[SELECTED::2] = [LOWEST + place % LOW_TOKENS for place in range(len(ids[SELECTED::2]))]
    return ids


@torch.no_grad()
def _separate_scores(model: PreTrainedModel) -> None:
    """Let the embedding decide on the selected tokens, and not rounding.

    There are three kinds of tokens. High tokens have the highest scores, and are always selected.
    Middle tokens come next: rounding decides which of them are selected, and attention gives them
    almost no weight. Low tokens come last, and attention would give them much weight. So rows are
    right only if no low token is selected; a query that is a low token does not even see itself.
    """
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(len(embedding))
    low, middle = ids >= LOWEST, (ids < LOWEST) & (ids % 8 == 0)
    embedding[:, _ONE] = 4.0
    embedding[:, _CLASS] = 6.0 - 3.0 * middle - 9.0 * low
    embedding[:, _PULL] = 0.75 * low - 3.0 * middle
    for layer in model.model.layers:
        mlp, attention, indexer = layer.mlp, layer.self_attn, layer.self_attn.indexer
        own = (_ONE, _CLASS, _PULL)
        for written in (
            attention.o_proj.weight,
            (mlp.shared_experts if hasattr(mlp, "gate") else mlp).down_proj.weight,
        ):
            written[own, :] = 0.0
        if hasattr(mlp, "gate"):
            mlp.experts.down_proj[:, own] = 0.0
        _read(
            attention.q_a_proj.weight, 0, _ONE, 1.0
        )  # element 0 of the latent query is then about the same everywhere
        if indexer is not None:
            for weight in (indexer.wq_b.weight, indexer.weights_proj.weight):
                weight *= 0.3
            indexer.weights_proj.weight[:, _ONE] += 1.0
            indexer.k_norm.bias.sub_(1.0)
            _read(indexer.wk.weight, INDEX_DIM - 1, _CLASS, 2.0)
            _read(indexer.wq_b.weight, slice(INDEX_DIM - 1, None, INDEX_DIM), 0, 4.0)
        # The pair of elements with the slowest turn, of a query and of a key.
        first, last = attention.qk_head_dim - 2, attention.qk_head_dim - 1
        _read(attention.q_b_proj.weight, slice(first, None, attention.qk_head_dim), 0, 12.0)
        _read(attention.q_b_proj.weight, slice(last, None, attention.qk_head_dim), 0, 0.0)
        _read(attention.kv_a_proj_with_mqa.weight, KV_LORA_RANK + ROPE_DIM - 2, _PULL, 3.0)
        _read(attention.kv_a_proj_with_mqa.weight, KV_LORA_RANK + ROPE_DIM - 1, _PULL, 0.0)


def _read(weight: torch.Tensor, rows: int | slice, column: int, factor: float) -> None:
    """Let rows of a weight read only one column."""
    weight[rows] = 0.0
    weight[rows, column] = factor


def load_sparse(
    directory: str | Path, dtype: torch.dtype = torch.float32, **options: Any
) -> SparseForCausalLM:
    """Return the reference."""
    keys = json.loads(Path(directory, "config.json").read_text()) | {"model_type": "deepseek_v3"}
    config = DeepseekV3Config(**keys)
    model: SparseForCausalLM = SparseForCausalLM.from_pretrained(
        directory, config=config, dtype=dtype, **options
    )
    return model.eval()
