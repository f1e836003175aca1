"""Fields of the presets' config.json that vLLM's planner needs and `hsx plan` does not know.

Names are as in config.json; each preset names the source of the values.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_hsx.plan.presets import PRESETS

_GATED_DELTA_NET = {
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}

_MORE: dict[str, dict[str, Any]] = {
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196608,
        "vocab_size": 200064,
        "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        **_GATED_DELTA_NET,
    },
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text",
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "intermediate_size": 17408,
        "vocab_size": 248320,
        **_GATED_DELTA_NET,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
        **_GATED_DELTA_NET,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    },
}

# Weights in W8A8 have the same shape, and so the same KV cache, as the original weights.
CONFIGS: dict[str, dict[str, Any]] = {
    name: PRESETS[name].config | more for name, more in _MORE.items()
}
