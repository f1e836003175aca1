"""Write checkpoints of Qwen3, MiniMax-M2 and DeepSeek-V3 as msmodelslim does.

They are quantised, rotated, or both. vllm-ascend reads them with `--quantization ascend`.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from .rotation import (
    EMBEDDING,
    is_linear,
    is_writer,
    random_rotation,
    rotate,
)

STATIC, DYNAMIC, INT4, FLOAT = "W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC", "FLOAT"
CACHE = "C8"  # kind of an int8 KV cache
DESCRIPTION = "quant_model_description.json"
WEIGHTS = "quant_model_weights-00001-of-00001.safetensors"
INDEX = "quant_model_weights.safetensors.index.json"
ROTATION, ROTATION_KEY = "optional/quarot.safetensors", "global_rotation"
CALIBRATION_TOKENS = 512
_LOWEST, _HIGHEST = -128, 127
_LOWEST_INT4, _HIGHEST_INT4 = -8, 7
_SHARES = 16  # partial sums per row; a tensor parallel rank adds the shares of the local columns

Choose = Callable[[str], str]
# Loads a transformers model from a directory, with `dtype`, like from_pretrained.
Load = Callable[..., Any]
Weights = dict[str, torch.Tensor]


def mixed(weight: str) -> str:
    """Quantise attention with static scales, and the rest of a layer with dynamic scales."""
    return STATIC if ".self_attn." in weight else DYNAMIC


def int4_experts(weight: str) -> str:
    """Quantise experts to int4 and the rest like `mixed`. Kimi-K2.5 and -K2.6 have this form."""
    return INT4 if ".experts." in weight else mixed(weight)


def dynamic(weight: str) -> str:
    """Quantise all linear layers with dynamic scales."""
    return DYNAMIC


def plain(weight: str) -> str:
    """Quantise nothing."""
    return FLOAT


class Range(NamedTuple):
    """The smallest and the largest input of a linear layer. The range includes 0."""

    low: float
    high: float


def write_modelslim(
    source: str | Path,
    directory: str | Path,
    choose: Choose = mixed,
    *,
    rotated: bool = False,
    int8_cache: bool = False,
    seed: int = 0,
    load: Load | None = None,
) -> Path:
    """Write a checkpoint like msmodelslim, and return the directory.

    The same arguments give the same bytes. Embedding, norms, router and head are not quantised.

    Args:
        source: directory of a Qwen3, MiniMax-M2 or DeepSeek-V3 in safetensors. It must be in
            bfloat16 unless `choose` is `plain`.
        directory: a new or empty directory.
        choose: returns STATIC, DYNAMIC, INT4 or FLOAT for the name of a linear layer's weight.
            Experts cannot be STATIC, and only experts can be INT4. Layers that vLLM fuses need
            the same kind.
        rotated: True to rotate the residual stream and write the file of the rotation.
        int8_cache: True to add scales for an int8 KV cache (C8), one per channel of keys and
            values.
        seed: seed of the rotation and of the tokens that calibrate static scales.
        load: loads the model for calibration; default AutoModelForCausalLM.

    Raises:
        ValueError: if the directory is not empty, or for an invalid result of `choose`.
    """
    here, target = Path(source), Path(directory)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; give an empty or new directory")
    weights = _read(here)
    rotation = random_rotation(weights[EMBEDDING].shape[1], seed) if rotated else None
    if rotation is not None:
        weights = rotate(weights, rotation)
    kinds = {name: choose(name) if is_linear(name) else FLOAT for name in weights}
    _check(kinds, weights)
    target.mkdir(parents=True, exist_ok=True)
    _copy_descriptions(here, target, untie=rotated)
    ranges = _calibrate(
        target, weights, [name for name, kind in kinds.items() if kind == STATIC], seed, load
    )
    tensors: Weights = {}
    description: dict[str, Any] = {
        "model_quant_type": _kind_of_model(kinds.values()),
        "version": "1.0.0",
        "group_size": 0,
    }
    description |= {"metadata": {}, "optional": {}}
    for name, weight in weights.items():
        made = _quantise(name, weight, kinds[name], ranges)
        tensors |= made
        description |= dict.fromkeys(made, kinds[name])
    if int8_cache:
        scales = _scales_of_cache(target, weights, seed)
        tensors |= scales
        description |= {"kv_cache_type": CACHE, **dict.fromkeys(scales, CACHE)}
    _write_weights(target, tensors)
    if rotation is not None:
        (target / ROTATION).parent.mkdir()
        save_file({ROTATION_KEY: rotation.float()}, target / ROTATION)
        description["optional"] = {"quarot": {"rotation_map": {ROTATION_KEY: ROTATION}}}
    _write_json(target / DESCRIPTION, description)
    return target


def _write_weights(target: Path, tensors: Weights) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in sorted(tensors.items())},
        target / WEIGHTS,
        metadata={"format": "pt"},
    )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        target / INDEX,
        {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), WEIGHTS)},
    )


def _check(kinds: Mapping[str, str], weights: Weights) -> None:
    for name, kind in kinds.items():
        if kind not in (STATIC, DYNAMIC, INT4, FLOAT):
            raise ValueError(f"{name}: {kind!r} is not one of {STATIC}, {DYNAMIC}, {INT4}, {FLOAT}")
        if kind == STATIC and ".experts." in name:
            raise ValueError(f"{name}: an expert cannot be {STATIC}; choose {DYNAMIC}")
        if kind == INT4 and ".experts." not in name:
            raise ValueError(f"{name}: only an expert can be {INT4}; choose {DYNAMIC}")
        if kind != FLOAT and weights[name].dtype != torch.bfloat16:
            raise ValueError(
                f"{name}: {kind} needs a checkpoint in bfloat16, not {weights[name].dtype}"
            )


def _kind_of_model(kinds: Iterable[str]) -> str:
    found = set(kinds)
    return next(kind for kind in (STATIC, DYNAMIC, FLOAT) if kind in found)


def _read(directory: Path) -> Weights:
    weights: Weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    if not weights:
        raise ValueError(f"{directory} holds no safetensors")
    return weights


def _copy_descriptions(source: Path, target: Path, untie: bool) -> None:
    """Copy configuration and tokenizer."""
    for path in (*source.glob("*.json"), *source.glob("*.jinja")):
        if not path.name.endswith(".index.json") and path.name != "hsx_tiny_model.json":
            shutil.copyfile(path, target / path.name)
    if untie:
        config = json.loads((target / "config.json").read_text())
        _write_json(target / "config.json", config | {"tie_word_embeddings": False})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _calibrate(
    directory: Path, weights: Weights, names: list[str], seed: int, load: Load | None
) -> dict[str, Range]:
    """Return the range of each layer's inputs over random tokens, by the name of the weight."""
    if not names:
        return {}
    model = _load(directory, weights, load)
    ranges: dict[str, Range] = {}

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            ranges[name] = Range(min(0.0, inputs[0].min().item()), max(0.0, inputs[0].max().item()))

        return hook

    for name in names:
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(watch(name))
    _run(model, seed)
    return ranges


@torch.no_grad()
def _scales_of_cache(directory: Path, weights: Weights, seed: int) -> Weights:
    """Return scales and offsets [kv_heads * head_dim] of keys and values, by name.

    The largest magnitude of a channel over random tokens becomes 127. Offsets are 0, because
    vllm-ascend subtracts none when reading the cache (attention/attention_v1.py:1731 in 0.23.0).
    """
    scales: Weights = {}
    for index, layer in enumerate(_run(_load(directory, weights), seed).past_key_values.layers):
        for name, cached in (
            ("k_proj", layer.keys),
            ("v_proj", layer.values),
        ):  # [1, kv_heads, tokens, head_dim]
            prefix = f"model.layers.{index}.self_attn.{name}.kv_cache_"
            scale = (cached[0].abs().amax(1).flatten() / _HIGHEST).to(torch.bfloat16)
            scales |= {f"{prefix}scale": scale, f"{prefix}offset": torch.zeros_like(scale)}
    return scales


def _load(directory: Path, weights: Weights, load: Load | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(directory / "config.json", Path(scratch) / "config.json")
        save_file(weights, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        return (load or AutoModelForCausalLM.from_pretrained)(
            scratch, dtype=torch.float32, local_files_only=True
        ).eval()


def _run(model: Any, seed: int) -> Any:
    """Run a model over random tokens, and return the output with keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return model(
        torch.randint(0, model.config.vocab_size, (1, CALIBRATION_TOKENS), generator=generator),
        use_cache=True,
    )


def _quantise(name: str, weight: torch.Tensor, kind: str, ranges: Mapping[str, Range]) -> Weights:
    """Return the tensors of a weight, by name.

    Each row of an int8 weight has a scale: the largest magnitude becomes 127. For STATIC layers
    `deq_scale` is the product of the scales of weight and input, and `quant_bias` subtracts the
    contribution of the input's offset from the sums.
    """
    if kind == FLOAT:
        return {name: weight}
    layer = name.removesuffix("weight")
    exact = weight.float()
    if kind == INT4:
        return _quantise_to_int4(layer, exact)
    scale = exact.abs().amax(1, keepdim=True) / _HIGHEST
    if kind == DYNAMIC:
        kept = scale.to(weight.dtype)
        return {
            name: _int8(exact / kept.float()),
            f"{layer}weight_scale": kept,
            f"{layer}weight_offset": torch.zeros_like(kept),
        }
    low, high = ranges[name]
    input_scale = torch.tensor([(high - low) / (_HIGHEST - _LOWEST)]).to(weight.dtype)
    offset = _int8(_LOWEST - low / input_scale.float())
    quantised = _int8(exact / scale)
    return {
        name: quantised,
        f"{layer}input_scale": input_scale,
        f"{layer}input_offset": offset,
        f"{layer}deq_scale": (input_scale.float() * scale).squeeze(1),
        f"{layer}quant_bias": -(quantised.int().sum(1, dtype=torch.int32) * offset.int()),
    }


def _quantise_to_int4(layer: str, exact: torch.Tensor) -> Weights:
    """Return the tensors of an expert's weight [N, K], by name.

    An int8 holds the numbers of two neighbouring rows, the first in the low half. `scale_bias` is 8
    times the sum of each row's scaled numbers, because vllm-ascend's kernels subtract 8 from each
    input. For layers that write to the residual stream, it has sixteen sums over equal shares.
    """
    scale = exact.abs().amax(1, keepdim=True) / _HIGHEST_INT4
    numbers = (exact / scale).round().clamp(_LOWEST_INT4, _HIGHEST_INT4)
    shares = _SHARES if is_writer(f"{layer}weight") else 1
    low, high = numbers.to(torch.int8).unflatten(0, (-1, 2)).unbind(1)
    return {
        f"{layer}weight": low & 15 | high << 4,
        f"{layer}weight_scale": scale,
        f"{layer}weight_offset": torch.zeros_like(scale),
        f"{layer}scale_bias": 8 * (numbers * scale).unflatten(1, (shares, -1)).sum(2),
    }


def _int8(exact: torch.Tensor) -> torch.Tensor:
    return exact.round().clamp(_LOWEST, _HIGHEST).to(torch.int8)
