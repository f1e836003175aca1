"""Read number of layers and class of a model before the server starts."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from vllm_ascend_hsx.caveats import Caveat, caveats_of
from vllm_ascend_hsx.compat.targets import named_language_model
from vllm_ascend_hsx.plan.shape import MODEL, read_config, text_config, whole_number
from vllm_ascend_hsx.protocol.errors import UserError


class Model(NamedTuple):
    """A target.

    Attributes:
        num_layers: decoder layers.
        architecture: its class, from config.json; empty if there is none.
        caveats: see caveats_of.
        language_model: architectures that its text config names.
    """

    num_layers: int
    architecture: str
    caveats: tuple[Caveat, ...] = ()
    language_model: tuple[str, ...] = ()


def read_model(
    name: str,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    hf_overrides: str = "",
) -> Model:
    """Read a model's config.json.

    Args:
        name: a directory, or a repository's name, which vLLM resolves.
        trust_remote_code, revision, hf_overrides: as for vllm serve.

    Raises:
        UserError: if there is no such model, or its config lacks a needed field.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        _, whole = read_config(os.path.abspath(path))
        text = text_config(whole)
    elif name.startswith((".", "/", "~")):
        raise UserError(
            MODEL,
            name,
            "is not a directory",
            "Give the directory of a model, or a repository's name.",
        )
    else:
        whole, text = _ask_vllm(name, trust_remote_code, revision)
    names = whole.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else ""
    return Model(
        whole_number(name, text, "num_hidden_layers"),
        architecture if isinstance(architecture, str) else "",
        caveats_of(whole, text, _parsed(hf_overrides)),
        named_language_model(whole),
    )


def _parsed(hf_overrides: str) -> object:
    """Return the value of an option; None if it is not JSON, which vLLM refuses."""
    try:
        return json.loads(hf_overrides)
    except ValueError:
        return None


def _ask_vllm(
    name: str, trust_remote_code: bool, revision: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        from vllm_ascend_hsx.compat.targets import published_config

        return published_config(name, trust_remote_code=trust_remote_code, revision=revision)
    except ModuleNotFoundError as error:
        raise UserError(
            MODEL,
            name,
            f"can only be fetched by vLLM, and {error.name} is not installed",
            "Give a directory.",
        ) from None
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        remedy = "The log above may tell more. Give a directory, or a name that vllm serve takes."
        raise UserError(
            MODEL, name, f"has no config.json that vLLM can read: {first_line}", remedy
        ) from None
