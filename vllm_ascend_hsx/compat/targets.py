"""The targets that can be extracted: their classes have vLLM's interface SupportsEagle3."""

from __future__ import annotations

_NEMOTRON_H = (
    "its Mamba-2 layers cannot generate: the runner of vllm-ascend 0.23.0 never initialises vLLM's state update "
    "(worker/model_runner_v1.py:3841; vllm/v1/worker/gpu_model_runner.py:7301 does), so that the second token of a text stops the engine; "
    "and experts without a gate, which some of these models have, are for CUDA and XPU only in vllm 0.23.0 "
    "(model_executor/layers/fused_moe/layer.py:367)"
)
# Targets that collect hidden states but that vllm-ascend 0.23.0 cannot serve.
# tests/ut/test_targets.py compares the reasons with the sources.
UNSERVABLE = {"NemotronHForCausalLM": _NEMOTRON_H, "NemotronHPuzzleForCausalLM": _NEMOTRON_H}

# Targets that our tests serve on the emulated NPU: the rows that work in docs/compatibility.md.
SHOWN = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)

# The generating models of vllm 0.23.0 that collect hidden states, by themselves or with our
# patches, and are not UNSERVABLE. tests/ut/test_targets.py compares them with vLLM's sources.
ARCHITECTURES = (
    "AfmoeForCausalLM", "ApertusForCausalLM", "AquilaForCausalLM", "AquilaModel",
    "ArceeForCausalLM", "Cosmos3ForConditionalGeneration", "CwmForCausalLM", "DeepseekForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM", "Exaone4_5_ForConditionalGeneration", "Fairseq2LlamaForCausalLM",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "GritLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "HunYuanVLForConditionalGeneration",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternLMForCausalLM",
    "InternS1ProForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "LLaMAForCausalLM", "LagunaForCausalLM",
    "LightOnOCRForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    "LlamaForCausalLM", "LlavaForConditionalGeneration", "MantisForConditionalGeneration",
    "MellumForCausalLM", "MiMoForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "MistralLarge3ForCausalLM", "OpenCUAForConditionalGeneration",
    "Phi3ForCausalLM", "PixtralForConditionalGeneration", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Step1ForCausalLM",
    "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "TeleChatForCausalLM", "TeleFLMForCausalLM",
    "XverseForCausalLM",
)  # fmt: skip
