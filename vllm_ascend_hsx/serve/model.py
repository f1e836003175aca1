"""Read the number of layers and the class of a model before the server starts."""

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
        num_layers: number of decoder layers.
        architecture: class of the model in config.json; "" if there is none.
        caveats: see caveats_of.
        language_model: architectures in the text config.
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
        name: a directory, or the name of a repository, resolved by vLLM.
        trust_remote_code, revision, hf_overrides: as for vllm serve.

    Raises:
        UserError: there is no such model, or the config lacks a required field.
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
            "Give the directory of a model, or the name of a repository.",
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
    """Parse the value of an option. Return None for invalid JSON, because vLLM refuses it."""
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
        remedy = "See the log above. Give a directory, or a name that vllm serve accepts."
        raise UserError(
            MODEL, name, f"has no config.json that vLLM can read: {first_line}", remedy
        ) from None
