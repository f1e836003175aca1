"""What a plan needs to know of a model, read from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.plan.errors import PlanError
from vllm_ascend_hsx.plan.presets import PRESETS

MODEL = "MODEL"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KNOWN = "hsx plan knows full, sliding-window and latent attention (MLA) and GatedDeltaNet"
# Fields of models whose KV cache is made of something else; what it is.
_UNKNOWN_CACHES = {
    "index_topk": "sparse attention with an indexer",
    "compress_ratios": "compressed attention",
    "linear_attn_config": "Kimi's delta attention",
    "hybrid_override_pattern": "Mamba layers",
    "layers_block_type": "Mamba layers",
    "attn_layer_period": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "state_size": "Mamba layers",
    "num_kv_shared_layers": "layers that share a KV cache",
    "global_head_dim": "layers with heads of different sizes",
    "block_configs": "layers of different kinds",
}


class LayerKind(Enum):
    """What a layer keeps in the KV cache."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LATENT = "latent_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of GatedDeltaNet's state. `ssm_dtype` is that of the recurrent state, or "auto" for the model's."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    ssm_dtype: str


@dataclass(frozen=True)
class ModelShape:
    """A target model.

    Attributes:
        name: what it is called in what is shown.
        architecture, model_type: from config.json.
        dtype: "bfloat16", "float16" or "float32", in which it is served.
        hidden_size: elements of a hidden state.
        layers: what each decoder layer keeps.
        num_heads, num_kv_heads, head_dim: of attention; for latent attention one head of `kv_lora_rank + qk_rope_head_dim`.
        sliding_window: tokens, if a layer is SLIDING.
        delta_net: if a layer is LINEAR.
        config: the fields of config.json, those of its text part on top.
    """

    name: str
    architecture: str
    model_type: str
    dtype: str
    hidden_size: int
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    delta_net: DeltaNet | None
    config: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_hybrid(self) -> bool:
        """vLLM's word for a model that has state besides a KV cache."""
        return self.delta_net is not None

    @property
    def is_latent(self) -> bool:
        return LayerKind.LATENT in self.layers

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def read_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a preset, or of the model whose directory or config.json is given.

    Raises:
        PlanError: no such preset or file, not a config.json, or a model whose KV cache is not known here.
    """
    name, content = read_config(model)
    return _shape(name, model, {**content, **(content.get("text_config") or {})}, dtype)


def read_config(model: str) -> tuple[str, dict[str, Any]]:
    """The name and the config.json of a preset, or of the model whose directory or config.json is given.

    Raises:
        PlanError: no such preset or file, or not a config.json.
    """
    if model in PRESETS:
        preset = PRESETS[model]
        return preset.repository, preset.config
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        problem = "the directory has no config.json" if path.is_dir() else "neither a preset nor a file"
        raise PlanError(MODEL, model, problem, f"give a model's directory, its config.json, or one of: {', '.join(PRESETS)}")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise PlanError(MODEL, model, f"not JSON ({error})", "give the config.json of a model") from None
    if not isinstance(content, dict):
        raise PlanError(MODEL, model, "not a JSON object", "give the config.json of a model")
    return file.absolute().parent.name, content


def _shape(name: str, model: str, config: dict[str, Any], dtype: str) -> ModelShape:
    for field, what in _UNKNOWN_CACHES.items():
        if config.get(field):
            raise PlanError(MODEL, model, f"has {what} ({field})", KNOWN)
    layers = _layers(model, config)
    heads = _integer(model, config, "num_attention_heads")
    hidden = _integer(model, config, "hidden_size")
    if LayerKind.LATENT in layers:
        kv_heads, head_dim = 1, _integer(model, config, "kv_lora_rank") + _integer(model, config, "qk_rope_head_dim")
    else:
        kv_heads = _integer(model, config, "num_key_value_heads", heads)
        head_dim = _integer(model, config, "head_dim", hidden // heads)
        if config.get("v_head_dim", head_dim) != head_dim:
            raise PlanError(MODEL, model, "has values of another size than keys (v_head_dim)", KNOWN)
    delta_net = None
    if LayerKind.LINEAR in layers:
        delta_net = DeltaNet(
            num_key_heads=_integer(model, config, "linear_num_key_heads"),
            num_value_heads=_integer(model, config, "linear_num_value_heads"),
            key_head_dim=_integer(model, config, "linear_key_head_dim"),
            value_head_dim=_integer(model, config, "linear_value_head_dim"),
            conv_kernel=_integer(model, config, "linear_conv_kernel_dim"),
            ssm_dtype=config.get("mamba_ssm_dtype") or "auto",
        )
    return ModelShape(
        name=name,
        architecture=(config.get("architectures") or [""])[0],
        model_type=config.get("model_type", ""),
        dtype=_dtype(model, config, dtype),
        hidden_size=hidden,
        layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=_integer(model, config, "sliding_window") if LayerKind.SLIDING in layers else None,
        delta_net=delta_net,
        config=config,
    )


def _layers(model: str, config: dict[str, Any]) -> tuple[LayerKind, ...]:
    count = _integer(model, config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        return (LayerKind.LATENT,) * count
    names = config.get("layer_types")
    if names is None and (interval := config.get("full_attention_interval")):
        names = ["full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(count)]
    if names is None:
        # A model without layer_types has one kind of attention (vllm/model_executor/layers/attention/attention.py, 0.23.0).
        sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
        names = ["sliding_attention" if sliding else "full_attention"] * count
    known = {kind.value for kind in LayerKind} - {LayerKind.LATENT.value}
    strange = sorted(set(map(str, names)) - known)
    if strange or 0 in (config.get("attn_type_list") or []):
        raise PlanError(MODEL, model, f"has layers of another kind ({', '.join(strange) or 'attn_type_list'})", KNOWN)
    if len(names) != count:
        raise PlanError(MODEL, model, f"has {count} layers and {len(names)} layer_types", "give the config.json as it was published")
    return tuple(LayerKind(name) for name in names)


def _dtype(model: str, config: dict[str, Any], dtype: str) -> str:
    """As vllm/config/model.py:1996 (_resolve_auto_dtype) of 0.23.0: float32 is served as bfloat16 unless it was asked for."""
    if dtype != "auto":
        return dtype
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if found not in DTYPE_BYTES:
        raise PlanError(MODEL, model, f"is of dtype {found!r}", "give --dtype bfloat16, float16 or float32")
    return "bfloat16" if found == "float32" else found


def _integer(model: str, config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problem = "says nothing of" if value is None else f"has {value!r} for"
        raise PlanError(MODEL, model, f"{problem} {field}", "give the config.json of a decoder model, as it was published")
    return value
