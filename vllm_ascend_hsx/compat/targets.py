"""Targets that can be extracted, with the patches and checks for them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vllm_ascend_hsx.compat.canonical import NotCanonicalError
from vllm_ascend_hsx.compat.collector import Collection, make_collecting
from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_26, V0_23, release_to_patch
from vllm_ascend_hsx.config import LAYER_IDS_KEY
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import RESIDUAL_STREAM

DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
ASCEND_DEEPSEEK = "vllm_ascend.patch.worker.patch_deepseek_v2"  # replaces vLLM's forward
MODEL_CONFIGS = "vllm.transformers_utils.config"

_NEMOTRON_H = (
    "its Mamba-2 layers cannot generate: NPUModelRunner.initialize_kv_cache of "
    "vllm-ascend 0.23.0 and 0.26.0rc1 (worker/model_runner_v1.py) never initialises "
    "vLLM's state update, unlike vLLM's own runner, so the second token of a text stops "
    "the engine; and experts without a gate, which some of these models have, are for "
    "GPUs only (vllm/model_executor/layers/fused_moe)"
)
_MINIMAX_M3 = (
    "vllm-ascend 0.30.0rc2 makes the model return hidden states only to the method "
    "eagle3 (models/minimax_m3/minimax_m3.py:1243), so a server would stop after "
    "loading all weights"
)
_KIMI_K3 = (
    "a layer's output is the sum of two tensors or one of them, depending on the "
    "model's configuration (vllm_ascend/models/kimi_k3.py:865-948 in 0.30.0rc2), and no "
    "test has shown that rows are right"
)
# Targets that collect hidden states but cannot be served, or not with right rows.
# tests/ut/compat/test_targets.py compares the reasons with the sources.
UNSERVABLE = {
    "KimiK3ForConditionalGeneration": _KIMI_K3,
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": _NEMOTRON_H,
}

# Targets with several streams per token (hyper-connections). Their class returns the mean of the
# streams after a layer, and never the embedding output: vllm_ascend/models/deepseek_v4/model.py:960
# and deepseek_v41/model.py:1560, 0.30.0rc2.
OF_STREAMS = (
    "DeepseekV41ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
)
MEAN_OF_STREAMS = "mean over the residual streams of a token after i layers, before they are joined"

# Targets that our tests serve on the emulated NPU: the working rows in docs/compatibility.md. Some
# work only on some releases; see `shown`.
SHOWN = (
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "LlamaForCausalLM",
    "LlavaNextForConditionalGeneration",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SeedOssForCausalLM",
    "Starcoder2ForCausalLM",
)

_BOTH_ENDS = "the first and last layer of DeepSeek and Kimi-K2 can be extracted"
_LAYERS = "hsx serve can read a model's layers"

_SCALING = "original_max_position_embeddings scaling_beta positions"
uses(DEEPSEEK, "_get_llama_4_scaling", V0_23, takes=_SCALING, why=_BOTH_ENDS)


@patch(DEEPSEEK, "DeepseekV2Model.forward", V0_23, why=_BOTH_ENDS)
def collect_both_ends(
    original: Any,
    self: Any,
    input_ids: Any,
    positions: Any,
    intermediate_tensors: Any,
    inputs_embeds: Any = None,
) -> Any:
    """Return the embedding output and the last state of DeepSeek-V2, -V3 and Kimi-K2 on request.

    Reason: DeepseekV2Model.forward collects only before each layer (models/deepseek_v2.py:1328), so
    it never returns the last state, and before the first layer it adds a residual that is None. All
    other targets of vllm 0.23.0 use `_maybe_add_hidden_state` (interfaces.py:1289), which has
    neither defect.
    """
    wanted, last = self.aux_hidden_state_layers, len(self.layers)
    if 0 not in wanted and last not in wanted:
        return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
    # Extraction has one pipeline stage, from the embedding to the norm.
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
    original: Any,
    self: Any,
    input_ids: Any,
    positions: Any,
    intermediate_tensors: Any,
    inputs_embeds: Any = None,
) -> Any:
    """Return the embedding output of DeepSeek-V2, -V3 and Kimi-K2 on request.

    Reason: before the first layer vllm-ascend's forward adds a residual that is None
    (patch/worker/patch_deepseek_v2.py:330, 0.26). It collects the last state itself, and gathers
    states for a MoE with sequence parallelism, so it is called without id 0.
    """
    wanted = self.aux_hidden_state_layers
    if 0 not in wanted:
        return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
    # Extraction has one pipeline stage.
    embedding = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
    self.aux_hidden_state_layers = type(wanted)(each for each in wanted if each != 0)
    try:
        # The first layer may write into the tensor.
        output = original(self, input_ids, positions, intermediate_tensors, embedding.clone())
    finally:
        self.aux_hidden_state_layers = wanted
    last, collected = output if isinstance(output, tuple) else (output, [])
    return last, [embedding, *collected]


_KEYWORDS = "trust_remote_code revision"
uses(MODEL_CONFIGS, "get_config", SINCE_0_23, takes="model", keywords=_KEYWORDS, why=_LAYERS)
uses(MODEL_CONFIGS, "get_hf_text_config", SINCE_0_23, takes="config", why=_LAYERS)
_WRAPPERS = "the text config of a multimodal target names its language model"
uses(
    "vllm.config.vllm",
    "VllmConfig.with_hf_config",
    SINCE_0_23,
    takes="self hf_config",
    why=_WRAPPERS,
)


def published_config(
    model: str, *, trust_remote_code: bool, revision: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's config.json as vLLM reads it, from Hugging Face or ModelScope.

    Reason: vLLM decides on the source of a model, and on the part of the config that describes the
    language model (transformers_utils/config.py:689 and :1124, 0.23.0).

    Args:
        model: name of a repository, or a directory.
        trust_remote_code: True to run the repository's code.
        revision: branch, tag or commit; None for the default.

    Returns:
        The fields of the whole config, and the fields of the language model.

    Raises:
        OSError, ValueError: it is missing or cannot be read.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = get_config(model, trust_remote_code=trust_remote_code, revision=revision)
    return config.to_dict(), get_hf_text_config(config).to_dict()


@dataclass(frozen=True)
class Architectures:
    """Generating architectures that vLLM and vllm-ascend register in one release.

    `tools/record_architectures.py` derives them from the code of their classes.

    Attributes:
        collected: the collector of each supported architecture, by name.
        refused: reason for each refused architecture, by name.
    """

    collected: Mapping[str, Collection]
    refused: Mapping[str, str]


@functools.cache
def recorded_architectures() -> Architectures:
    """Return the architectures of the checked release that fits the installed one best."""
    releases = json.loads(resources.files(__package__).joinpath("architectures.json").read_text())
    release = releases[str(release_to_patch("vllm"))]
    collected = {
        name: Collection[group] for group, names in release["collected"].items() for name in names
    }
    return Architectures(collected, release["refused"])


def shown() -> tuple[str, ...]:
    """Return the targets of SHOWN that the installed release serves."""
    collected = recorded_architectures().collected
    return tuple(
        name for name in SHOWN if collected.get(name, Collection.BACKEND) is not Collection.BACKEND
    )


def is_registered(architecture: str) -> bool:
    """Return True if vLLM or vllm-ascend registers an architecture, supported or not."""
    known = recorded_architectures()
    return (
        architecture in UNSERVABLE
        or architecture in known.collected
        or architecture in known.refused
    )


def refuse_architecture(
    architecture: str, layer_ids: Sequence[int], named: Sequence[str] = ()
) -> None:
    """Refuse a target that cannot be extracted, by architecture.

    Reason: the runner refuses it too, but only after loading all weights (MR:3758). A server of an
    unservable target may become healthy and lose the engine in the first request: vLLM only warns
    when the warm-up of Mamba-2 kernels fails (model_executor/layers/mamba/mamba_mixer2.py:656).

    Args:
        architecture: name in config.json. An unregistered one passes.
        layer_ids: ids of the layers to extract.
        named: architectures of the text config. They decide on a target that wraps the named
            language model.

    Raises:
        UserError: the target cannot be extracted, or not with these ids.
    """
    known = recorded_architectures()
    if reason := UNSERVABLE.get(architecture):
        raise UserError(
            "model", architecture, f"cannot be served: {reason}", "Choose another target."
        )
    if reason := known.refused.get(architecture):
        raise _refusal(architecture, reason)
    collection = known.collected.get(architecture)
    if collection is Collection.LANGUAGE_MODEL and (
        language_model := next(filter(is_registered, named), None)
    ):
        refuse_architecture(language_model, ())
        if known.collected[language_model] not in (Collection.ITSELF, Collection.OURS):
            raise _refusal(
                architecture,
                (
                    f"its language model {language_model} is collected by "
                    f"{known.collected[language_model].value}"
                ),
            )
        try:
            shown_inside((language_model,))
        except NotCanonicalError as error:
            raise _refusal(architecture, str(error)) from None
    _check_embedding(architecture, layer_ids, collection)


def named_language_model(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures of the text config in a config.json; see refuse_architecture."""
    text = config.get("text_config")
    named = text.get("architectures") if isinstance(text, dict) else None
    return tuple(each for each in named if isinstance(each, str)) if isinstance(named, list) else ()


def require_collecting_target(model_config: Any, layer_ids: Sequence[int]) -> None:
    """Make the class of a target return hidden states, or refuse the target.

    Args:
        model_config: vllm.config.ModelConfig of the target.
        layer_ids: ids of the layers to extract.

    Raises:
        UserError: if the class cannot collect hidden states, or not the ids in `layer_ids`.
    """
    model_class, architecture = model_config.registry.resolve_model_cls(
        model_config.architectures, model_config=model_config
    )

    def resolve(architectures: Sequence[str]) -> type | None:
        named = shown_inside(architectures or language_architectures(model_config.hf_config))
        return (
            model_config.registry.resolve_model_cls(named, model_config=model_config)[0]
            if named
            else None
        )

    try:
        collection = make_collecting(model_class, resolve)
    except NotCanonicalError as error:
        raise _refusal(architecture, str(error)) from None
    _check_embedding(architecture, layer_ids, collection)


def shown_inside(architectures: Sequence[str]) -> list[str]:
    """Return the architectures of a language model if the rows can be right in a wrapper.

    Raises:
        NotCanonicalError: if not.
    """
    if refused := next(
        (each for each in architectures if each in UNSERVABLE or each in OF_STREAMS), None
    ):
        raise NotCanonicalError(
            f"its language model {refused} is not supported inside of it: "
            f"{UNSERVABLE.get(refused, MEAN_OF_STREAMS)}"
        )
    return list(architectures)


def language_architectures(hf_config: Any) -> Sequence[str]:
    """Return the architectures of a model's text config, like VllmConfig.with_hf_config.

    Args:
        hf_config: transformers.PretrainedConfig of the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = getattr(hf_config, "text_config", None)
    by_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", None))
    return getattr(text, "architectures", None) or ((by_type,) if isinstance(by_type, str) else ())


def returns_embedding(architecture: str, collection: Collection | None) -> bool:
    """Return True if a class can return the embedding output (layer id 0).

    The Transformers backend records only outputs of layers (transformers/base.py:714, 0.23.0).
    """
    return collection is not Collection.BACKEND and architecture not in OF_STREAMS


def layer_id_meaning(architecture: str) -> str:
    """Return a sentence on the meaning of layer id i of a target."""
    return MEAN_OF_STREAMS if architecture in OF_STREAMS else RESIDUAL_STREAM


def _refusal(architecture: str, reason: str) -> UserError:
    problem = (
        f"collects no hidden states: its class lacks the interface SupportsEagle3, and {reason}"
    )
    return UserError(
        "model",
        architecture,
        problem,
        f"Our tests have served these targets: {', '.join(shown())}.",
    )


def _check_embedding(
    architecture: str, layer_ids: Sequence[int], collection: Collection | None
) -> None:
    """Refuse layer id 0 of a class that does not return the embedding output."""
    if 0 in layer_ids and not returns_embedding(architecture, collection):
        option = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"
        problem = f"has id 0, the embedding output, but the class {architecture} does not return it"
        raise UserError(option, list(layer_ids), problem, "Remove id 0.")
