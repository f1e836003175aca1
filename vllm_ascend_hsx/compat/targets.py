"""The targets that can be extracted: their classes have vLLM's interface SupportsEagle3."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.versions import release_to_patch

_NEMOTRON_H = (
    "its Mamba-2 layers cannot generate: NPUModelRunner.initialize_kv_cache of vllm-ascend 0.23.0 and 0.26.0rc1 "
    "(worker/model_runner_v1.py) never initialises vLLM's state update, as vLLM's own runner does, so that the second token of a text "
    "stops the engine; and experts without a gate, which some of these models have, are for GPUs only "
    "(vllm/model_executor/layers/fused_moe)"
)
# Targets that collect hidden states but that vllm-ascend cannot serve.
# tests/ut/compat/test_targets.py compares the reasons with the sources.
UNSERVABLE = {"NemotronHForCausalLM": _NEMOTRON_H, "NemotronHPuzzleForCausalLM": _NEMOTRON_H}

# Targets that our tests serve on the emulated NPU: the rows that work in docs/compatibility.md.
SHOWN = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)

_IN_ALL_RELEASES = (
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM",
    "Cosmos3ForConditionalGeneration", "CwmForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM", "Exaone4_5_ForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "HunYuanVLForConditionalGeneration",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM",
    "InternS1ProForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "LLaMAForCausalLM", "LagunaForCausalLM",
    "LightOnOCRForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    "LlamaForCausalLM", "LlavaForConditionalGeneration",
    "MellumForCausalLM", "MiMoForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "MistralLarge3ForCausalLM", "OpenCUAForConditionalGeneration",
    "Phi3ForCausalLM", "PixtralForConditionalGeneration", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Step1ForCausalLM",
    "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "TeleFLMForCausalLM",
)  # fmt: skip
# By releases of vllm.
_IN_SOME_RELEASES = {
    "<0.26": (
        "AquilaForCausalLM", "AquilaModel", "InternLMForCausalLM", "MantisForConditionalGeneration",
        "TeleChatForCausalLM", "XverseForCausalLM",
    ),
    "<0.30": ("Fairseq2LlamaForCausalLM", "GritLM"),
    ">=0.26": ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    ">=0.30": (
        "CohereCompassForConditionalGeneration", "InternS2MobiusForConditionalGeneration",
        "K2HorizonForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
        "Plamo3ForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM", "SarvamMLAForCausalLM",
    ),
}  # fmt: skip
# The generating models of the installed vllm that collect hidden states, by themselves or with our
# patches, and are not UNSERVABLE. tests/ut/compat/test_targets.py compares them with the sources.
_of_this_release = (
    name for versions, names in _IN_SOME_RELEASES.items() if release_to_patch("vllm") in SpecifierSet(versions) for name in names
)
ARCHITECTURES = tuple(sorted((*_IN_ALL_RELEASES, *_of_this_release)))
