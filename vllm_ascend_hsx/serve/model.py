"""Read number of layers and class of a model before the server starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.protocol.errors import UserError


class Model(NamedTuple):
    """A target.

    Attributes:
        num_layers: decoder layers.
        architecture: its class, from config.json; empty if there is none.
    """

    num_layers: int
    architecture: str


def read_model(name: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Model:
    """Read a model's config.json.

    Args:
        name: a directory, or a repository's name, which vLLM resolves.
        trust_remote_code, revision: as for vllm serve.

    Raises:
        UserError: if there is no such model, or its config lacks a needed field.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        whole = _read(name, directory / "config.json")
        text = {**whole, **(whole.get("text_config") or {})}
    elif name.startswith((".", "/", "~")):
        raise UserError(
            "MODEL",
            name,
            "is not a directory",
            "Give the directory of a model, or a repository's name.",
        )
    else:
        whole, text = _ask_vllm(name, trust_remote_code, revision)
    num_layers = text.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UserError(
            "MODEL", name, "has no num_hidden_layers in its config.json", "Give a language model."
        )
    return Model(num_layers, next(iter(whole.get("architectures") or ()), ""))


def _read(name: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(
            "MODEL", name, "has no config.json", "Give the directory of a model."
        ) from None
    except ValueError as error:
        raise UserError(
            "MODEL",
            name,
            f"has a config.json that is not JSON ({error})",
            "Give the directory of a model.",
        ) from None
    if not isinstance(content, dict):
        raise UserError(
            "MODEL",
            name,
            "has a config.json that is not an object",
            "Give the directory of a model.",
        )
    return content


def _ask_vllm(
    name: str, trust_remote_code: bool, revision: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        from vllm_ascend_hsx.compat.models import published_config

        return published_config(name, trust_remote_code=trust_remote_code, revision=revision)
    except ModuleNotFoundError as error:
        raise UserError(
            "MODEL",
            name,
            f"can only be fetched by vLLM, and {error.name} is not installed",
            "Give a directory.",
        ) from None
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        remedy = "Give a directory, or a name that vllm serve takes."
        raise UserError(
            "MODEL", name, f"has no config.json that vLLM can read: {first_line}", remedy
        ) from None
