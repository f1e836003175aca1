"""Compute expected hidden states with transformers on the CPU."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_hsx.demo.compare import Comparison, compare

__all__ = ["Comparison", "compare", "hidden_states_of", "reference_hidden_states"]


def reference_hidden_states(
    model_dir: str | Path,
    token_ids: Sequence[int],
    layer_ids: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return expected rows, [tokens, layers, hidden], on the CPU, in dtype (default: float32).

    Layers are in the order of layer_ids. Id i is the residual stream after i layers: 0 is the
    output of the embedding, num_hidden_layers is after the last layer and before the final norm. In
    float32 the reference has negligible rounding errors, so any difference is the server's. Raises
    ValueError for an id out of range and for an empty prompt.
    """
    return hidden_states_of(_load(str(model_dir), dtype or torch.float32), token_ids, layer_ids)


def hidden_states_of(
    model: Any, token_ids: Sequence[int], layer_ids: Sequence[int], **images: torch.Tensor
) -> torch.Tensor:
    """Return the rows of a model of transformers. Otherwise like reference_hidden_states.

    `images` is the output of the model's processor for images. Row i is the input of layer i, or of
    the final norm: Qwen3-VL adds visual features between the first layers.
    """
    decoder = model.get_decoder()
    layers = decoder.layers
    wrong = [i for i in layer_ids if not 0 <= i <= len(layers)]
    if wrong:
        raise ValueError(
            f"layer ids {wrong}: {model.config.name_or_path} has {len(layers)} layers; choose "
            f"from 0 to {len(layers)}"
        )
    if not token_ids:
        raise ValueError("token_ids is empty; a prompt has at least one token")
    stream: dict[int, torch.Tensor] = {}

    # Use hooks: output_hidden_states returns the last layer after the final norm.
    def keep_input(index: int) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream[index] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    handles = [
        reader.register_forward_pre_hook(keep_input(index), with_kwargs=True)
        for index, reader in enumerate([*layers, decoder.norm])
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **images)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([stream[i] for i in layer_ids], dim=1)


@lru_cache(maxsize=1)
def _load(model_dir: str, dtype: torch.dtype) -> Any:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    kind: Any = (
        AutoModelForCausalLM
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForImageTextToText
    )
    model = kind.from_pretrained(model_dir, dtype=dtype, local_files_only=True).eval()
    # For a model with a text part (Qwen3.5) transformers 5.5.4 keeps the checkpoint's dtype
    # (models/auto/auto_factory.py:386).
    return model if model.dtype == dtype else model.to(dtype)
