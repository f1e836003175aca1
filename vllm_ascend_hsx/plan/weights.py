"""How many weights a model has, from its config.json: what is left of an NPU's memory depends on it."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_ascend_hsx.plan.shape import LayerKind, ModelShape


class Parameters(NamedTuple):
    """Numbers of weights of the text model.

    Attributes:
        shared: those that each data-parallel replica holds, cut over its tensor-parallel ranks.
        experts: those of routed experts, cut over all NPUs of the server, with expert parallelism or without
            (vllm/model_executor/layers/fused_moe/config.py, FusedMoEParallelConfig.make, 0.23.0).
    """

    shared: int
    experts: int

    def per_npu(self, tensor_parallel: int, data_parallel: int) -> int:
        return -(-self.shared // tensor_parallel) + -(-self.experts // (tensor_parallel * data_parallel))


def count_parameters(shape: ModelShape) -> Parameters:
    """Counts matrices; norms, biases and scales are left out (under 0.1 %), and so are vision towers and MTP layers."""
    config, hidden = shape.config, shape.hidden_size
    vocabulary = int(config.get("vocab_size", 0)) * hidden
    shared = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    num_experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    expert = 3 * hidden * int(config.get("moe_intermediate_size") or config.get("intermediate_size", 0))
    beside = 3 * hidden * int(config.get("shared_expert_intermediate_size") or 0) + int(config.get("n_shared_experts") or 0) * expert
    dense = 3 * hidden * int(config.get("intermediate_size", 0))
    first_sparse = int(config.get("first_k_dense_replace") or 0) if num_experts else shape.num_layers
    experts = 0
    for index, kind in enumerate(shape.layers):
        shared += _mixer(shape, kind, config)
        if index < first_sparse:
            shared += dense
        else:
            shared += beside + num_experts * hidden
            experts += num_experts * expert
    return Parameters(shared, experts)


def _mixer(shape: ModelShape, kind: LayerKind, config: dict[str, Any]) -> int:
    """Weights of a layer's attention, or of what stands in its place."""
    hidden, heads = shape.hidden_size, shape.num_heads
    if kind is LayerKind.LINEAR:
        assert shape.delta_net is not None
        net = shape.delta_net
        keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
        inputs = hidden * (2 * keys + 2 * values + 2 * net.num_value_heads)
        return inputs + (2 * keys + values) * net.conv_kernel + values * hidden
    if kind is LayerKind.LATENT:
        sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank, rope, nope, value = (int(config.get(name, 0)) for name in sizes)
        query = int(config.get("q_lora_rank") or 0)
        queries = query * (hidden + heads * (nope + rope)) if query else hidden * heads * (nope + rope)
        return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    # Qwen3-Next says nothing of its gate: it always has one.
    gated = config.get("attn_output_gate") or shape.model_type == "qwen3_next"
    return hidden * shape.head_dim * (heads * (3 if gated else 2) + 2 * shape.num_kv_heads)
