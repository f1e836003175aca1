"""Build the `vllm serve` command of `hsx serve`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.compat.scheduling import refuse_balance_scheduling
from vllm_ascend_hsx.compat.targets import is_registered, refuse_architecture
from vllm_ascend_hsx.config import PLUGIN_NAME, HsxConfig
from vllm_ascend_hsx.protocol.api import PATH_OPTION
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.serve.model import Model, read_model
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.target import ONE_ONLY, layer_ids

PLUGINS = "VLLM_PLUGINS"
# Options of vllm serve that hsx serve sets.
_SET_BY_US = (
    "--speculative-config",
    "-sc",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--kv-transfer-config",
    "--model",
)
# Suffixes of vllm serve's options that take a JSON object.
_TAKE_JSON = ("-config", "-overrides", "-kwargs")
_SHORT = {
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dpl": "--data-parallel-size-local",
}


@dataclass(frozen=True)
class Command:
    """A `vllm serve` command.

    Attributes:
        arguments: all words of the command line, starting with `vllm`.
        environ: environment variables to set.
        notes: sentences for the user.
        config: the connector's options.
        given: the user's options of vllm serve, with values.
    """

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    notes: tuple[str, ...]
    config: HsxConfig
    given: Mapping[str, str]

    def __str__(self) -> str:
        """Return the command line, quoted for a shell."""
        return " ".join(
            [
                *(f"{name}={shlex.quote(value)}" for name, value in self.environ.items()),
                shlex.join(self.arguments),
            ]
        )


def build(
    model: str | os.PathLike[str],
    layers: str,
    storage: str | os.PathLike[str],
    options: Mapping[str, Any],
    vllm_arguments: Sequence[str],
    environ: Mapping[str, str],
) -> Command:
    """Build the command.

    Args:
        model: a directory or the name of a repository.
        layers: comma-separated ids, or a kind of drafter; see `layer_ids`.
        storage: directory of the files, absolute or relative to the current directory.
        options: further keys of `kv_connector_extra_config`.
        vllm_arguments: further arguments of vllm serve.
        environ: the server's environment.

    Raises:
        UserError: an argument is invalid, or the model cannot be served.
    """
    _refuse_what_cannot_be(vllm_arguments)
    refuse_balance_scheduling(_additional_config(vllm_arguments), "kv_producer", environ)
    model, storage = os.fspath(model), Path(storage).expanduser().absolute()
    if options.get("sink") != "mooncake":  # `hsx generate` chooses the name of each file
        options = {PATH_OPTION: True, **options}
    config = HsxConfig.parse({"shared_storage_path": str(storage), **options})
    given = _values(vllm_arguments)
    target = read_model(
        model,
        trust_remote_code="--trust-remote-code" in given,
        revision=given.get("--revision"),
        hf_overrides=given.get("--hf-overrides", ""),
    )
    ids = layer_ids(layers, target.num_layers)
    try:
        refuse_architecture(target.architecture, ids, target.language_model)
    except UserError as error:
        option, value = ("MODEL", model) if error.option == "model" else ("--layers", layers)
        raise UserError(
            option, value, f"({target.architecture}) {error.problem}", error.remedy
        ) from None
    settings = (
        *("--speculative-config", json.dumps(speculative_config(ids))),
        *(
            "--kv-transfer-config",
            json.dumps(
                kv_transfer_config(None if config.sink == "mooncake" else storage, **options)
            ),
        ),
    )
    return Command(
        ("vllm", "serve", model, *vllm_arguments, *settings),
        _environ(environ),
        _notes(target),
        config,
        given,
    )


def _arguments(vllm_arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options and values as vLLM parses them: `_` equals `-`, and `=` may precede a value."""
    for index, argument in enumerate(vllm_arguments):
        if not argument.startswith("-") or argument.lstrip("-").partition(".")[0].isdecimal():
            continue
        option, equals, value = argument.partition("=")
        name, dot, field = option.partition(".")
        following = vllm_arguments[index + 1] if index + 1 < len(vllm_arguments) else ""
        yield _SHORT.get(name, name).replace("_", "-") + dot + field, value if equals else following


def _values(vllm_arguments: Sequence[str]) -> dict[str, str]:
    return dict(_arguments(vllm_arguments))


def _refuse_what_cannot_be(vllm_arguments: Sequence[str]) -> None:
    for option, value in _arguments(vllm_arguments):
        name = option.partition(".")[0]
        if name in _SET_BY_US:
            raise UserError(
                option,
                value,
                "is set by hsx serve",
                "Leave it out, or start vllm serve with the options that --dry-run prints.",
            )
        if name.endswith(_TAKE_JSON) and value.startswith("{"):
            _require_json(option, value)
        field = name.removeprefix("--").replace("-", "_")
        if field in ONE_ONLY and value != "1":
            raise UserError(
                option,
                value,
                ONE_ONLY[field],
                "Use 1; scale with tensor, data and expert parallelism.",
            )


def _require_json(option: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        remedy = "Correct it, and put it into single quotes for the shell."
        raise UserError(option, text, f"is not JSON: {error}", remedy) from None


def _additional_config(vllm_arguments: Sequence[str]) -> dict[str, Any]:
    """Return the value of --additional-config, including keys of --additional-config.KEY."""
    config: dict[str, Any] = {}
    for option, text in _arguments(vllm_arguments):
        name, *keys = option.split(".")
        if name != "--additional-config":
            continue
        try:
            value = json.loads(text)
        except ValueError:
            continue  # vLLM refuses it with a message
        for key in reversed(keys):
            value = {key: value}
        if isinstance(value, dict):
            config |= value
    return config


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a server to load this plugin where VLLM_PLUGINS excludes it."""
    if PLUGINS not in environ or PLUGIN_NAME in environ[PLUGINS].split(","):
        return {}
    return {PLUGINS: ",".join(filter(None, (environ[PLUGINS], PLUGIN_NAME)))}


def _notes(target: Model) -> tuple[str, ...]:
    caveats = tuple(map(str, target.caveats))
    if is_registered(target.architecture):
        return caveats
    return (
        f"{target.architecture or 'a model without a class'} is not a class of vLLM; if another "
        "plugin or vLLM's Transformers backend serves it, the server checks it before it loads "
        "weights",
        *caveats,
    )
