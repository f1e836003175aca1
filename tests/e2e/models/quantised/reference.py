"""Compute the rows of an msmodelslim checkpoint with transformers and integers.

The code is independent of vllm-ascend. Activations are bfloat16, because rounding changes the int8
number of an element: a float32 reference differs from a correct server as much as a reference
without quantisation. For the same reason, a step that a kernel of vllm-ascend fuses is rounded once
here. transformers would also round in between.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from vllm_ascend_hsx.demo.reference import hidden_states_of

from .modelslim import (
    DESCRIPTION,
    FLOAT,
    INT4,
    ROTATION,
    ROTATION_KEY,
    WEIGHTS,
    Load,
)

BFLOAT = torch.bfloat16
Tensors = dict[str, torch.Tensor]
_ROTARIES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # names of an expert's layers


def rotation_of(directory: Path) -> torch.Tensor:
    """Return Q of a rotated checkpoint. The rows are X Q."""
    return load_file(directory / ROTATION)[ROTATION_KEY]


def quantised_hidden_states(
    directory: Path,
    token_ids: Sequence[int],
    layer_ids: Sequence[int],
    cached_from: int | None = None,
    load: Load | None = None,
) -> torch.Tensor:
    """Return the rows of a checkpoint of write_modelslim, in the form of reference_hidden_states.

    Args:
        cached_from: with an int8 KV cache, the first position that attends to dequantised keys and
            values of the cache. Earlier tokens attend to the exact ones. None: all tokens do.
        load: the argument of write_modelslim.
    """
    model = _load(directory, load)
    for layer in model.model.layers:
        layer.self_attn.cached_from = cached_from
    module = vars(sys.modules[type(model.model).__module__])
    rotaries = {name: _rotary_in_float32(module[name]) for name in _ROTARIES if name in module}
    with patch.dict(module, rotaries):
        return hidden_states_of(model, token_ids, layer_ids)


def rows_in_the_models_basis(
    directory: Path, token_ids: Sequence[int], layer_ids: Sequence[int]
) -> torch.Tensor:
    """Return the rows of a rotated checkpoint turned back, in float32, as in files by default."""
    return (
        quantised_hidden_states(directory, token_ids, layer_ids).float()
        @ rotation_of(directory).t()
    )


def _rotary_in_float32(rotary: Callable[..., Any]) -> Callable[..., Any]:
    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
    ) -> Any:
        return tuple(
            each.to(BFLOAT)
            for each in rotary(q.float(), k.float(), cos.float(), sin.float(), **options)
        )

    return apply


def _attention_in_float32(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    def attend(pair: Sequence[torch.Tensor]) -> torch.Tensor:
        keys, values = (
            each.float().repeat_interleave(module.num_key_value_groups, 1) for each in pair
        )
        causal = mask is None  # Sparse attention passes a mask.
        seen = None if mask is None else mask.float()
        return torch.nn.functional.scaled_dot_product_attention(
            query.float(), keys, values, seen, is_causal=causal, scale=scaling
        )

    output = attend((key, value))
    if module.cached_from is not None:
        cached = attend(
            [
                _as_cached(each, scale)
                for each, scale in zip((key, value), module.cache_scales, strict=True)
            ]
        )
        output = torch.cat(
            (output[:, :, : module.cached_from], cached[:, :, module.cached_from :]), 2
        )
    return output.transpose(1, 2).to(BFLOAT).contiguous(), None


def _as_cached(exact: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return keys or values [1, heads, tokens, D] after a round trip through an int8 cache.

    vllm-ascend divides in bfloat16 (attention/attention_v1.py:1751 in 0.23.0).
    """
    of_channel = scale.view(exact.shape[1], 1, -1)
    return (exact * (1 / of_channel)).round().clamp(-128, 127).float() * of_channel.float()


AttentionInterface.register("float32", _attention_in_float32)


@lru_cache(maxsize=1)
def _load(directory: Path, load: Load | None) -> Any:
    tensors, kinds = (
        load_file(directory / WEIGHTS),
        json.loads((directory / DESCRIPTION).read_text()),
    )
    tensors |= {
        name: unpacked(weight)
        for name, weight in tensors.items()
        if name.endswith(".weight") and kinds[name] == INT4
    }
    quantised = [
        name.removesuffix("weight")
        for name in tensors
        if name.endswith(".weight") and kinds[name] != FLOAT
    ]
    # The model needs the weights of quantised layers only for the shapes.
    floats = {
        name: tensor.to(BFLOAT)
        for name, tensor in tensors.items()
        if kinds[name] == FLOAT or name.endswith(".weight")
    }
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(directory / "config.json", Path(scratch) / "config.json")
        save_file(floats, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        make = load or AutoModelForCausalLM.from_pretrained
        model = make(scratch, dtype=BFLOAT, attn_implementation="float32").eval()
    of = {
        layer: {
            name.removeprefix(layer): tensors[name] for name in tensors if name.startswith(layer)
        }
        for layer in quantised
    }
    products = {layer: Product(own) for layer, own in of.items()}
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}.self_attn."
        layer.self_attn.cache_scales = [
            tensors.get(f"{prefix}{name}.kv_cache_scale") for name in ("k_proj", "v_proj")
        ]
        _compute_as_ascend(layer.mlp, index, products)
    for layer, product in products.items():
        if ".experts." not in layer:
            model.get_submodule(layer.removesuffix(".")).forward = product
    return model


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of two rows for each row of int8, the first from the low half."""
    return torch.stack((weight << 4 >> 4, weight >> 4), 1).flatten(0, 1)


def _compute_as_ascend(mlp: Any, index: int, products: Mapping[str, Product]) -> None:
    """Replace gated layers and experts of a decoder layer: transformers rounds elsewhere."""
    if hasattr(mlp, "gate_proj"):
        mlp.forward = partial(swiglu_layer, mlp)
    if experts := [Expert(products, prefix) for prefix in _prefixes_of_experts(products, index)]:
        mlp.experts.forward = Experts(experts)
    if shared := getattr(mlp, "shared_experts", None):
        prefix = f"model.layers.{index}.mlp.shared_experts."
        shared.forward = (
            Expert(products, prefix)
            if f"{prefix}gate_proj." in products
            else partial(swiglu_layer, shared)
        )


class Product:
    """A quantised layer: scaled integer products of int8 rows and an int8 or int4 weight."""

    def __init__(self, tensors: Tensors) -> None:
        self._weight = tensors["weight"].double()
        self.tensors = tensors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.exact(x).to(BFLOAT)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result before rounding."""
        given = self.tensors
        if "input_scale" not in given:
            rows, scale = int8_rows(x)
            return rows @ self._weight.t() * given["weight_scale"].double().squeeze(1) * scale
        # in bfloat16, as in vllm-ascend (methods/w8a8_static.py:145)
        reciprocal = 1 / given["input_scale"]
        rows = (x.double() * reciprocal + given["input_offset"]).round().clamp(-128, 127)
        return (rows @ self._weight.t() + given["quant_bias"]) * given["deq_scale"].double()


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of integers with the largest magnitude 127, and the scales."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scale).round(), scale


def swiglu_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Round the activation once, like npu_swiglu; transformers rounds twice."""
    gate, up = layer.gate_proj(x).float(), layer.up_proj(x).float()
    result: torch.Tensor = layer.down_proj((torch.nn.functional.silu(gate) * up).to(BFLOAT))
    return result


class Expert:
    """A gated layer without rounding between the int8 product, the activation and quantisation."""

    def __init__(self, products: Mapping[str, Product], prefix: str) -> None:
        names = next(names for names in _GATED if f"{prefix}{names[0]}." in products)
        self._gate, self._up, self._down = (products[f"{prefix}{name}."] for name in names)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(torch.nn.functional.silu(self._gate.exact(x)) * self._up.exact(x))


class Experts:
    """Experts with rounded results, added with shares in bfloat16."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = experts

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros(hidden_states.shape)
        for token, (chosen, shares) in enumerate(
            zip(top_k_index.tolist(), top_k_weights.to(BFLOAT).float(), strict=True)
        ):
            for expert, share in zip(chosen, shares, strict=True):
                result[token] += share * self._experts[expert](hidden_states[token]).float()
        return result.to(BFLOAT)


def _prefixes_of_experts(layers: Iterable[str], index: int) -> list[str]:
    """Return the prefix of each expert of a decoder layer, in the order of expert numbers."""
    pattern = re.compile(rf"(model\.layers\.{index}\.\w+\.experts\.(\d+)\.)\w+\.")
    found = {int(match[2]): match[1] for match in map(pattern.fullmatch, layers) if match}
    return [found[number] for number in sorted(found)]
