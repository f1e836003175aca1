"""What a request says in its `kv_transfer_params`: read from what a client sent, which can be anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.protocol.names import below, path_refusal

PATH_KEY = "hidden_states_path"
ERROR_KEY = "hidden_states_error"  # of a response only
EXTRACT_KEY = "hidden_states"
OUTPUT_KEY = "include_output_tokens"
PATH_OPTION = "allow_custom_save_path"

_SHOWN = 60  # characters of a value that an error repeats


class ParamsError(ValueError):
    """The request cannot be extracted as its client wants; the message names key, value and remedy."""


@dataclass(frozen=True)
class ServerParams:
    """What the server says.

    Attributes:
        directory: where files go; None if rows go to no files.
        include_output: rows of generated tokens are wanted of requests that do not say so themselves.
        allow_path: whether a request may say which file receives its rows.
        extract_all: requests that say nothing of hidden states are extracted too.
    """

    directory: Path | None
    include_output: bool = False
    allow_path: bool = False
    extract_all: bool = True


@dataclass(frozen=True)
class RequestParams:
    """What a request says, or the server for it.

    Attributes:
        extract: the request is to be extracted.
        include_output: rows of generated tokens are wanted.
        path: the file that it chose, inside the storage directory, or None.
    """

    extract: bool = True
    include_output: bool = False
    path: Path | None = None


def read_params(params: object, server: ServerParams) -> RequestParams:
    """Read a request's `kv_transfer_params`.

    Args:
        params: whatever the client sent. vLLM sees to it that the field of the API is an object, but passes on what `vllm_xargs` holds
            under the same name, too (entrypoints/openai/completion/protocol.py:313, 0.23.0).
        server: what the server says.

    Raises:
        ParamsError: they cannot be understood, or are not allowed.
    """
    if params is None:
        return RequestParams(extract=server.extract_all, include_output=server.include_output)
    if not isinstance(params, dict):
        raise ParamsError(f"kv_transfer_params is {shown(params)}; use an object")
    if params.get("do_remote_prefill"):
        # A proxy passes the prefilling server's answer on; the path in it is that server's file, and asks for nothing here.
        params = {key: value for key, value in params.items() if key != PATH_KEY}
    extract = params.get(EXTRACT_KEY, server.extract_all or PATH_KEY in params or OUTPUT_KEY in params)
    include_output = params.get(OUTPUT_KEY, server.include_output)
    if extract is False:
        return RequestParams(extract=False)
    if extract is not True:
        raise ParamsError(f"kv_transfer_params.{EXTRACT_KEY} is {shown(extract)}; use true or false")
    if not isinstance(include_output, bool):
        raise ParamsError(f"kv_transfer_params.{OUTPUT_KEY} is {shown(include_output)}; use true or false")
    return RequestParams(include_output=include_output, path=_read_path(params[PATH_KEY], server) if PATH_KEY in params else None)


def _read_path(value: object, server: ServerParams) -> Path:
    if isinstance(value, os.PathLike):  # of an LLM in the engine's own process
        value = os.fspath(value)
    said = f"kv_transfer_params.{PATH_KEY} is {shown(value)}"
    if server.directory is None:
        raise ParamsError(f"{said}, but this server makes no files: it puts hidden states into a Mooncake store; leave it out")
    if not server.allow_path:
        raise ParamsError(
            f"{said}, but this server names its files itself; leave it out, or have the server started with "
            f"kv_connector_extra_config.{PATH_OPTION}=true"
        )
    remedy = f"use a path below {server.directory} that ends with .safetensors, absolute or relative to it"
    if not isinstance(value, str):
        raise ParamsError(f"{said}; {remedy}")
    relative = _below(server.directory, value) if value.startswith("/") else value
    if relative is None:
        raise ParamsError(f"{said}, which is not inside the storage directory; {remedy}")
    problem = path_refusal(relative)
    if problem is not None:
        raise ParamsError(f"{said}, which cannot be used: {problem}; {remedy}")
    return server.directory / relative


def _below(directory: Path, path: str) -> str | None:
    """What stands behind the directory, as the administrator wrote it or without its `..`; no symbolic link is resolved."""
    written = os.fspath(directory)
    relative = below(path, written)
    return below(path, os.path.normpath(written)) if relative is None else relative


def shown(value: object) -> str:
    """A value that a client sent, in words that can be printed and are never long."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN])
        return text if len(value) <= _SHOWN and len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}... ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write down a number of some thousand digits
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
