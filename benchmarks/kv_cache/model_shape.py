"""Properties of a model that vLLM's planner needs, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class LayerKind(Enum):
    """Contents of the KV cache for a layer."""

    FULL = "full_attention"
    LATENT = "latent_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of GatedDeltaNet's state."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class ModelShape:
    """A target model.

    Attributes:
        architecture, model_type: from config.json.
        dtype: dtype in which it is served.
        hidden_size: elements of a hidden state.
        layers: kind of each decoder layer.
        num_kv_heads, head_dim: of attention; latent attention has one head of
            `kv_lora_rank + qk_rope_head_dim`.
        delta_net: None unless a layer is LINEAR.
        config: the fields of config.json, with fields of the text part at the top level.
    """

    architecture: str
    model_type: str
    dtype: str
    hidden_size: int
    layers: tuple[LayerKind, ...]
    num_kv_heads: int
    head_dim: int
    delta_net: DeltaNet | None
    config: dict[str, Any]

    @property
    def is_hybrid(self) -> bool:
        """vLLM's term for a model with state besides a KV cache."""
        return self.delta_net is not None

    @property
    def is_latent(self) -> bool:
        return LayerKind.LATENT in self.layers


def shape_of(content: Mapping[str, Any]) -> ModelShape:
    """Read the shape of a model with full or latent attention and GatedDeltaNet from config.json.

    Raises:
        ValueError, KeyError: layers of another kind, or a field is missing.
    """
    config = {**content, **(content.get("text_config") or {})}
    layers = _layers(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if LayerKind.LATENT in layers:
        kv_heads, head_dim = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        kv_heads, head_dim = (
            config.get("num_key_value_heads", heads),
            config.get("head_dim", hidden // heads),
        )
    delta_net = None
    if LayerKind.LINEAR in layers:
        delta_net = DeltaNet(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_kernel=config["linear_conv_kernel_dim"],
        )
    return ModelShape(
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        dtype=config.get("dtype") or config["torch_dtype"],
        hidden_size=hidden,
        layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        delta_net=delta_net,
        config=config,
    )


def _layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    count = config["num_hidden_layers"]
    if config.get("kv_lora_rank"):
        return (LayerKind.LATENT,) * count
    names = config.get("layer_types")
    if names is None and (interval := config.get("full_attention_interval")):
        names = [
            "full_attention" if (index + 1) % interval == 0 else "linear_attention"
            for index in range(count)
        ]
    return tuple(map(LayerKind, names or ["full_attention"] * count))
