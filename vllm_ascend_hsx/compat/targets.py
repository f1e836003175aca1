"""The targets that can be extracted, and the patches and checks that this takes.

Their classes have vLLM's interface SupportsEagle3.
"""

from __future__ import annotations

from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_26, V0_23, release_to_patch
from vllm_ascend_hsx.protocol.errors import UserError

DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
ASCEND_DEEPSEEK = "vllm_ascend.patch.worker.patch_deepseek_v2"  # replaces vLLM's forward
MODEL_CONFIGS = "vllm.transformers_utils.config"

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
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
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

_BOTH_ENDS = "first and last layer of DeepSeek and Kimi-K2"
_LAYERS = "hsx serve reads a model's layers"

_SCALING = "original_max_position_embeddings scaling_beta positions"
uses(DEEPSEEK, "_get_llama_4_scaling", V0_23, takes=_SCALING, why=_BOTH_ENDS)


@patch(DEEPSEEK, "DeepseekV2Model.forward", V0_23, why=_BOTH_ENDS)
def collect_both_ends(
    original: Any, self: Any, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None
) -> Any:
    """Have DeepSeek-V2, -V3 and Kimi-K2 return the embedding output and the last state on request.

    Reason: DeepseekV2Model.forward collects before each layer only (models/deepseek_v2.py:1328), so
    it never returns the last state, and before the first layer it adds a residual that is None. All
    other targets of vllm 0.23.0 use `_maybe_add_hidden_state` (interfaces.py:1289), which does
    neither.
    """
    wanted, last = self.aux_hidden_state_layers, len(self.layers)
    if 0 not in wanted and last not in wanted:
        return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
    # One pipeline stage, which is what extraction is allowed with: from the embedding to the norm.
    stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
    residual = scaling = None
    if options := getattr(self.config, "llama_4_scaling", None):
        from vllm.model_executor.models.deepseek_v2 import _get_llama_4_scaling

        length = options["original_max_position_embeddings"]
        scaling = _get_llama_4_scaling(length, options["beta"], positions)
    collected = []
    for index, layer in enumerate(self.layers):
        if index in wanted:
            collected.append(stream if residual is None else stream + residual)
        stream, residual = layer(positions, stream, residual, scaling)
    if last in wanted:
        collected.append(stream + residual)
    stream, _ = self.norm(stream, residual)
    return stream, collected


@patch(ASCEND_DEEPSEEK, "DeepseekV2Model.forward", SINCE_0_26, why=_BOTH_ENDS)
def collect_embedding(
    original: Any, self: Any, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None
) -> Any:
    """Have DeepSeek-V2, -V3 and Kimi-K2 return the embedding output on request.

    Reason: before the first layer vllm-ascend's forward adds a residual that is None
    (patch/worker/patch_deepseek_v2.py:330, 0.26). It collects the last state itself, and gathers
    states for a MoE with sequence parallelism, so it is called without id 0.
    """
    wanted = self.aux_hidden_state_layers
    if 0 not in wanted:
        return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
    # One pipeline stage, which is what extraction is allowed with.
    embedding = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
    self.aux_hidden_state_layers = type(wanted)(each for each in wanted if each != 0)
    try:
        # The first layer may write into the tensor that it is given.
        output = original(self, input_ids, positions, intermediate_tensors, embedding.clone())
    finally:
        self.aux_hidden_state_layers = wanted
    last, collected = output if isinstance(output, tuple) else (output, [])
    return last, [embedding, *collected]


_KEYWORDS = "trust_remote_code revision"
uses(MODEL_CONFIGS, "get_config", SINCE_0_23, takes="model", keywords=_KEYWORDS, why=_LAYERS)
uses(MODEL_CONFIGS, "get_hf_text_config", SINCE_0_23, takes="config", why=_LAYERS)


def published_config(model: str, *, trust_remote_code: bool, revision: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's config.json as vLLM reads it, from Hugging Face or ModelScope.

    Reason: vLLM decides where a model comes from, and which part of its config is the language
    model's (transformers_utils/config.py:689 and :1124, 0.23.0).

    Args:
        model: a repository's name, or a directory.
        trust_remote_code: whether the repository's own code may read it.
        revision: branch, tag or commit; None for the default.

    Returns:
        The fields of the whole, and those of the language model.

    Raises:
        OSError, ValueError: there is none, or it cannot be read.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = get_config(model, trust_remote_code=trust_remote_code, revision=revision)
    return config.to_dict(), get_hf_text_config(config).to_dict()


_REFUSED = "unusable targets are refused at once"
uses("vllm.model_executor.models.interfaces", "supports_eagle3", SINCE_0_23, takes="model", why=_REFUSED)


def require_collecting_target(model_config: Any) -> None:
    """Refuse a target whose class does not collect hidden states.

    Reason: the runner refuses it too, but only when all weights are loaded, and without naming
    alternatives (MR:3758).

    Args:
        model_config: vllm.config.ModelConfig of the target.

    Raises:
        UserError: it does not; the message lists those that do.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, architecture = model_config.registry.resolve_model_cls(model_config.architectures, model_config=model_config)
    if not supports_eagle3(model_class):
        raise UserError(
            "model",
            architecture,
            "collects no hidden states: its class in vLLM lacks the interface SupportsEagle3",
            f"Targets that can be extracted are {', '.join(ARCHITECTURES)}.",
        )


def refuse_unservable_target(model_config: Any) -> None:
    """Refuse a target that collects hidden states but that vllm-ascend cannot serve.

    Reason: a server of one may become healthy and lose its engine in the first request; vLLM only
    warns when its warm-up of Mamba-2 kernels fails
    (model_executor/layers/mamba/mamba_mixer2.py:656).

    Args:
        model_config: vllm.config.ModelConfig of the target.

    Raises:
        UserError: it is one of UNSERVABLE.
    """
    if reason := UNSERVABLE.get(model_config.architecture):
        raise UserError("model", model_config.architecture, f"cannot be served: {reason}", "Choose another target.")
