"""What targets have to do so that they can be extracted."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ascend_hsx.compat.targets import ARCHITECTURES, UNSERVABLE
from vllm_ascend_hsx.compat.versions import require
from vllm_ascend_hsx.config import HsxConfigError

DEEPSEEK_MODULE = "vllm.model_executor.models.deepseek_v2"


def collect_ends_of_deepseek(deepseek: Any) -> None:
    """Have DeepSeek-V2, -V3 and Kimi-K2 return the embedding output (id 0) and the state after the last layer, if they are wanted.

    Reason: DeepseekV2Model.forward collects before each layer only (models/deepseek_v2.py:1328), so the last id is never in what it
    returns, and before the first layer it adds a residual that is None. Every other target of vllm 0.23.0 that can be extracted uses
    `_maybe_add_hidden_state` (interfaces.py:1289), which does neither.

    Args:
        deepseek: that module.

    Raises:
        IncompatibleVersionError: no DeepseekV2Model there.
    """
    model_class, original = require(deepseek, DEEPSEEK_MODULE, "DeepseekV2Model", "forward")

    @functools.wraps(original)
    def forward(self: Any, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
        wanted, last = self.aux_hidden_state_layers, len(self.layers)
        if 0 not in wanted and last not in wanted:
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
        # One pipeline stage, which is what extraction is allowed with: from the embedding to the norm.
        stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        options = getattr(self.config, "llama_4_scaling", None)
        scaling = options and deepseek._get_llama_4_scaling(options["original_max_position_embeddings"], options["beta"], positions)
        collected = []
        for index, layer in enumerate(self.layers):
            if index in wanted:
                collected.append(stream if residual is None else stream + residual)
            stream, residual = layer(positions, stream, residual, scaling)
        if last in wanted:
            collected.append(stream + residual)
        stream, _ = self.norm(stream, residual)
        return stream, collected

    model_class.forward = forward


def published_config(model: str, *, trust_remote_code: bool, revision: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of a model as vLLM reads it, from Hugging Face or, with VLLM_USE_MODELSCOPE, from ModelScope.

    Reason: where a model comes from, and which of the parts of its config is the language model's, is for vLLM to say
    (transformers_utils/config.py:689 and :1124, 0.23.0).

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


def require_collecting_target(model_config: Any) -> None:
    """Refuse a target whose class does not collect hidden states.

    Reason: the runner refuses it too, but only when all weights are loaded, and does not say what would do (MR:3758).

    Args:
        model_config: vllm.config.ModelConfig of the target.

    Raises:
        HsxConfigError: it does not; the message lists what does.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, architecture = model_config.registry.resolve_model_cls(model_config.architectures, model_config=model_config)
    if not supports_eagle3(model_class):
        raise HsxConfigError(
            "model",
            architecture,
            "collects no hidden states: its class in vLLM lacks the interface SupportsEagle3",
            f"Targets that can be extracted are {', '.join(ARCHITECTURES)}.",
        )


def refuse_unservable_target(model_config: Any) -> None:
    """Refuse a target that collects hidden states but that vllm-ascend cannot serve.

    Reason: a server of one may become healthy and lose its engine in the first request; vLLM only warns when its warm-up of Mamba-2
    kernels fails (model_executor/layers/mamba/mamba_mixer2.py:656).

    Args:
        model_config: vllm.config.ModelConfig of the target.

    Raises:
        HsxConfigError: it is one of UNSERVABLE.
    """
    if reason := UNSERVABLE.get(model_config.architecture):
        raise HsxConfigError("model", model_config.architecture, f"cannot be served: {reason}", "Choose another target.")
