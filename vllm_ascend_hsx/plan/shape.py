"""Dimensions of a model, read from a config.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.protocol.errors import UserError

MODEL = "MODEL"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LARGEST = 10**9


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a target model.

    Attributes:
        name: displayed name.
        num_layers: decoder layers.
        hidden_size: elements of a hidden state.
        dtype: served dtype: "bfloat16", "float16" or "float32".
    """

    name: str
    num_layers: int
    hidden_size: int
    dtype: str

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token's hidden state after one layer."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]


def read_shape(model: str, dtype: str = "auto") -> ModelShape:
    """Return the dimensions of a model.

    Args:
        model: a preset, a directory with a config.json, or the path of a config.json.
        dtype: served dtype; "auto" for the dtype of the config.

    Raises:
        UserError: if there is no such preset or file, or the config.json is invalid or incomplete.
    """
    name, content = read_config(model)
    config = text_config(content)
    layers, hidden = (
        whole_number(model, config, field) for field in ("num_hidden_layers", "hidden_size")
    )
    return ModelShape(name, layers, hidden, _dtype(model, config, dtype))


def read_config(model: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the config.json of a model.

    Args:
        model: as for read_shape.

    Raises:
        UserError: if there is no such preset or file, or the config.json is invalid.
    """
    if model in PRESETS:
        preset = PRESETS[model]
        return preset.repository, preset.config
    path = Path(os.path.expanduser(model))  # Path.expanduser would raise for an unknown user
    directory = os.path.isdir(path)
    file = path / "config.json" if directory else path
    if not os.path.isfile(file):
        problem = "has no config.json" if directory else "is neither a preset nor a file"
        raise UserError(
            MODEL,
            model,
            problem,
            f"Give a model's directory, its config.json, or one of: {', '.join(PRESETS)}.",
        )
    try:
        # Not strict, because configs of Mamba models contain Infinity.
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(
            MODEL,
            model,
            f"cannot be read ({error.strerror or error})",
            "Give the config.json of a model.",
        ) from None
    except (ValueError, RecursionError) as error:
        problem = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise UserError(
            MODEL, model, f"is not JSON ({problem})", "Give the config.json of a model."
        ) from None
    if not isinstance(content, dict):
        raise UserError(MODEL, model, "is not a JSON object", "Give the config.json of a model.")
    return file.absolute().parent.name, content


def text_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json, overridden with the language model's fields of a multimodal model.

    Qwen3-Omni has these fields in `text_config` of `thinker_config`.
    """
    config = content
    for part in ("thinker_config", "text_config"):
        found = config.get(part)
        config = {**config, **(found if isinstance(found, dict) else {})}
    return config


def _dtype(model: str, config: dict[str, Any], dtype: str) -> str:
    """Resolve the dtype as vLLM does: float32 becomes bfloat16, unless float32 was requested.

    Source: vllm/config/model.py:1996 (_resolve_auto_dtype) in 0.23.0.
    """
    if dtype != "auto":
        return dtype
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )
    if found not in DTYPE_BYTES:
        raise UserError(
            MODEL, model, f"has dtype {found!r}", "Give --dtype bfloat16, float16 or float32."
        )
    return "bfloat16" if found == "float32" else found


def whole_number(model: str, config: dict[str, Any], field: str) -> int:
    """Return a field of a model's config. Raises UserError if it is missing or out of bounds."""
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        problem = "has no" if value is None else f"has {value!r:.40} for"
        raise UserError(
            MODEL,
            model,
            f"{problem} {field}",
            "Give the config.json of a decoder model, as it was published.",
        )
    return value
