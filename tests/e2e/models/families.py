"""One factory for the tiny checkpoints of all families, from configurations of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quantised.modelslim import DESCRIPTION, FLOAT, INDEX, WEIGHTS
from routing import widen_routing_margins
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from vllm_ascend_hsx.demo.tiny_models import (
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    build_model,
    common_config,
    draw_weights,
)

LAYERS = 4
WIDE = {"intermediate_size": 256}
HEADS = {"head_dim": HEAD_DIM}
EXPERTS = {
    **WIDE,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": 64,
}
ROUTED = {
    **WIDE,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": 64,
}
SHARED = {
    **ROUTED,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# The published head sizes: the fused attention kernel accepts no others for latent keys.
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}
ROPE = {"rope_type": "default", "rope_theta": 5_000_000.0}
DEEPSTACK = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
GEMMA4 = {"global_head_dim": HEAD_DIM, "sliding_window": 4096, "hidden_size_per_layer_input": 0}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN_SIZE,
    **DEEPSTACK,
}
EAR = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "downsample_hidden_size": 8,
}


@dataclass(frozen=True)
class Outer:
    """A served model that contains the language model, like published checkpoints.

    Attributes:
        model_type: model type in config.json.
        key: key of the part's configuration in config.json.
        prefix: prefix of the part's weights.
        part: keys of the part's configuration that differ from the configuration of the part alone.
        config: other keys of config.json.
        files: other files of the checkpoint, by name.
        engine: required engine arguments.
    """

    model_type: str
    key: str
    prefix: str
    part: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


# vLLM 0.30.0 has a built-in processor. 0.23.0 takes the checkpoint's processor.
_KIMI_PROCESSOR = """
from transformers import BaseImageProcessor


class TextOnly(BaseImageProcessor):
    def __init__(self, media_proc_cfg, **options):
        super().__init__(**options)
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    def media_tokens_calculator(self, media):
        raise NotImplementedError("prompts of the tests have no images")
"""
_KIMI_MEDIA = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "image_mean": 3 * [0.5],
    "image_std": 3 * [0.5],
}
KIMI_K25 = Outer(
    "kimi_k25",
    "text_config",
    "language_model.",
    part={"model_type": "kimi_k2"},
    config={
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
        },
        "media_placeholder_token_id": 3,
    },
    files={
        "text_only.py": _KIMI_PROCESSOR,
        "preprocessor_config.json": json.dumps(
            {
                "auto_map": {"AutoImageProcessor": "text_only.TextOnly"},
                "media_proc_cfg": _KIMI_MEDIA,
            }
        ),
    },
    engine={"trust_remote_code": True},
)


@dataclass(frozen=True)
class Family:
    """A family of targets.

    Attributes:
        model_type: of transformers.
        architecture: of vLLM's registry.
        config: keys that differ from common_config.
        extra: keys of config.json that vLLM reads and transformers does not write.
        versions: releases of vllm-ascend on which the tests serve it.
        experts: True if tokens are routed to experts.
        towers: configurations of the parts for images and sound, by key. With them the checkpoint
            is served with `language_model_only`. Empty for a text model.
        dtype: of the weights.
        outer: the served model that contains this model. It is also served with
            `language_model_only`. None if this model is served.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=lambda: WIDE)
    extra: Mapping[str, Any] = field(default_factory=dict)
    versions: str = ">=0.23"
    experts: bool = False
    dtype: str = "float32"
    towers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outer: Outer | None = None

    @property
    def engine(self) -> dict[str, Any]:
        """Return the engine arguments that the family needs."""
        text_only = {"language_model_only": True} if self.towers or self.outer else {}
        return {"dtype": self.dtype, **text_only, **(self.outer.engine if self.outer else {})}


def _moe(model_type: str, architecture: str, config: Mapping[str, Any], **options: Any) -> Family:
    return Family(model_type, architecture, config, experts=True, **options)


FAMILIES = {
    "Qwen2.5": Family("qwen2", "Qwen2ForCausalLM"),
    "Llama": Family("llama", "LlamaForCausalLM"),
    "Mistral": Family("mistral", "MistralForCausalLM", {**WIDE, "sliding_window": None}),
    "Phi-3": Family("phi3", "Phi3ForCausalLM", {**WIDE, "sliding_window": None}),
    "GLM-4 of the first generation": Family("glm", "GlmForCausalLM", {**WIDE, **HEADS}),
    "GLM-4-0414": Family("glm4", "Glm4ForCausalLM", {**WIDE, **HEADS}),
    "Ernie-4.5": Family("ernie4_5", "Ernie4_5ForCausalLM", {**WIDE, **HEADS}),
    "Gemma": Family("gemma", "GemmaForCausalLM", {**WIDE, **HEADS}),
    "Gemma-2": Family("gemma2", "Gemma2ForCausalLM", {**WIDE, **HEADS, "sliding_window": 4096}),
    "Gemma-3": Family(
        "gemma3_text", "Gemma3ForCausalLM", {**WIDE, **HEADS, "sliding_window": 4096}
    ),
    "Granite": Family(
        "granite",
        "GraniteForCausalLM",
        {**WIDE, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    ),
    "OLMo-2": Family("olmo2", "Olmo2ForCausalLM", versions="<0.26"),
    "StarCoder2": Family(
        "starcoder2", "Starcoder2ForCausalLM", {**WIDE, "sliding_window": None}, versions="<0.26"
    ),
    "Seed-OSS": Family("seed_oss", "SeedOssForCausalLM", {**WIDE, **HEADS}),
    "EXAONE-4": Family(
        "exaone4",
        "Exaone4ForCausalLM",
        {**WIDE, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "Qwen3-MoE": _moe(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**EXPERTS, **HEADS, "norm_topk_prob": True}
    ),
    "Qwen2-MoE": _moe(
        "qwen2_moe", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 64}
    ),
    "GLM-4.x": _moe("glm4_moe", "Glm4MoeForCausalLM", {**SHARED, **HEADS, "use_qk_norm": True}),
    "Mixtral": _moe(
        "mixtral",
        "MixtralForCausalLM",
        {**WIDE, "num_local_experts": NUM_EXPERTS, "sliding_window": None},
    ),
    "Ernie-4.5-MoE": _moe(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **WIDE,
            "moe_num_experts": NUM_EXPERTS,
            "moe_k": EXPERTS_PER_TOKEN,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_layer_end_index": LAYERS - 1,
        },
    ),
    "Qwen3-VL-MoE, text": _moe(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {
            **EXPERTS,
            **HEADS,
            "norm_topk_prob": True,
            "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]},
        },
        towers={"vision_config": TOWER},
    ),
    "Qwen3-Omni's thinker, text": _moe(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeForConditionalGeneration",
        # Only vLLM reads these keys of the published configuration: tie_word_embeddings, image_size
        # and apply_vit_abs_pos_embed.
        {
            **EXPERTS,
            **HEADS,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        towers={
            "vision_config": {**TOWER, "image_size": 64, "apply_vit_abs_pos_embed": True},
            "audio_config": EAR,
        },
        outer=Outer("qwen3_omni_moe", "thinker_config", "thinker."),
        versions=">=0.30",
    ),
    "Qwen2-VL, text": Family(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {**WIDE, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
        towers={
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": HIDDEN_SIZE,
                "num_heads": 2,
                "mlp_ratio": 1,
            }
        },
    ),
    "Gemma-3 with images, text": Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {**WIDE, **HEADS, "sliding_window": 4096},
        towers={"vision_config": {**ENCODER, "image_size": 56}},
    ),
    "LLaVA-Next, text": Family(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        towers={"vision_config": {**ENCODER, "image_size": 28}},
    ),
    "InternVL, text": Family(
        "internvl",
        "InternVLForConditionalGeneration",
        towers={"vision_config": {**ENCODER, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "Gemma-4, text": Family("gemma4_text", "Gemma4ForCausalLM", {**WIDE, **HEADS, **GEMMA4}),
    "OLMoE": _moe(
        "olmoe",
        "OlmoeForCausalLM",
        {"intermediate_size": 64, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    ),
    "dots.llm1": _moe(
        "dots1", "Dots1ForCausalLM", {**SHARED, **HEADS}, extra=SIGMOID, versions="<0.26"
    ),
    "Kimi-K2, DeepSeek-V3 with one group": _moe(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**SHARED, **LATENT},
        extra=SIGMOID,
        dtype="bfloat16",
    ),
    "Kimi-K2.5, text": _moe(
        "deepseek_v3",
        "KimiK25ForConditionalGeneration",
        {**SHARED, **LATENT},
        extra=SIGMOID,
        dtype="bfloat16",
        outer=KIMI_K25,
    ),
    "GLM-4.7-Flash": _moe(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", {**SHARED, **LATENT}, dtype="bfloat16"
    ),
    "Hunyuan, dense": Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**WIDE, **HEADS},
        {"use_qk_norm": True},
        "<0.30",
    ),
    "Hunyuan-A13B": _moe(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {**WIDE, **HEADS, "num_experts": NUM_EXPERTS, "moe_topk": EXPERTS_PER_TOKEN},
        extra={
            "use_qk_norm": True,
            "moe_intermediate_size": 256,
            "use_mixed_mlp_moe": 1,
            "num_shared_expert": 1,
        },
        versions="<0.30",
    ),
}


def build_family(directory: Path, family: Family) -> Path:
    """Build the tiny checkpoint of a family and return the directory; see build_model."""

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        heads = 4 if "kv_lora_rank" in family.config else 8
        sizes = common_config(layers, heads, heads if heads == 4 else 4)
        keys = {**sizes, **family.config}
        kind: Any = AutoModelForCausalLM
        if family.towers:
            keys, kind = (
                {"text_config": keys, **{key: dict(tower) for key, tower in family.towers.items()}},
                AutoModelForImageTextToText,
            )
        model = kind.from_config(
            AutoConfig.for_model(family.model_type, **keys), dtype=torch.float32
        )
        draw_weights(model, generator)
        if family.experts and family.dtype != "float32":
            widen_routing_margins(model, generator)
        if family.model_type == "qwen3_vl_moe":
            _turn_experts(model)
        elif family.towers and family.outer is None:
            # Keep the names of the published checkpoints: save_pretrained of transformers 5.5.4
            # renames the parameters of the text model twice.
            model._weight_conversions = []
        return model, {
            **({} if family.outer else {"architectures": [family.architecture]}),
            **family.extra,
        }

    built = build_model(
        directory, family.model_type, create, dtype=family.dtype, layers=LAYERS, seed=0
    )
    if family.model_type == "qwen2_vl":  # vLLM 0.30 reads it also with `language_model_only`
        images = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
        (built / "preprocessor_config.json").write_text(json.dumps(images))
    return built


def build_outer(part: Path, directory: Path, family: Family) -> Path:
    """Build the served checkpoint of a family: `part` itself, or a model around it."""
    if (outer := family.outer) is None:
        return part
    shutil.copytree(part, directory)
    _put_around(directory, "model.safetensors", family.architecture, outer)
    return directory


def _put_around(
    directory: Path, file: str, architecture: str, outer: Outer
) -> dict[str, torch.Tensor]:
    """Make the model in `directory` a part of another model. Return the weights of `file`."""
    weights = {outer.prefix + name: weight for name, weight in load_file(directory / file).items()}
    save_file(weights, directory / file, metadata={"format": "pt"})
    part = json.loads((directory / "config.json").read_text())
    whole = {
        "architectures": [architecture],
        "model_type": outer.model_type,
        "dtype": part["dtype"],
        outer.key: part | outer.part,
    }
    for name, content in {
        "config.json": json.dumps({**whole, **outer.config}),
        **outer.files,
    }.items():
        (directory / name).write_text(content)
    return weights


_KIMI_TOWER = (
    *(f"vision_tower.encoder.blocks.0.{layer}" for layer in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")),
    *(f"mm_projector.proj.{layer}" for layer in (0, 2)),
)


def dress_as_kimi_k25(text: Path, directory: Path) -> Path:
    """Write msmodelslim's checkpoint of a DeepSeek-V3 as the language model of a Kimi-K2.5.

    It has no vision tower: serve it `language_model_only`.
    """
    shutil.copytree(text, directory)
    weights = _put_around(directory, WEIGHTS, "KimiK25ForConditionalGeneration", KIMI_K25)
    described = {
        f"{layer}.weight": FLOAT for layer in _KIMI_TOWER
    }  # vllm-ascend reads it, although it loads none
    for name, kind in json.loads((text / DESCRIPTION).read_text()).items():
        described[KIMI_K25.prefix + name if KIMI_K25.prefix + name in weights else name] = kind
    (directory / DESCRIPTION).write_text(json.dumps(described))
    (directory / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)})
    )
    return directory


def _turn_experts(model: PreTrainedModel) -> None:
    """Turn experts as in published checkpoints. Transformers turns them back when it loads them."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parameter.data = parameter.data.transpose(1, 2).contiguous()
