"""Parse a request's `kv_transfer_params`. A client may send anything."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.protocol.names import below, path_refusal
from vllm_ascend_hsx.protocol.request_ids import split_id

PATH_KEY = "hidden_states_path"
ERROR_KEY = "hidden_states_error"  # in responses only
REUSED_KEY = "reused_tokens"  # in responses only
VERSIONS_KEY = "weight_versions"  # in responses only
EXTRACT_KEY = "hidden_states"
OUTPUT_KEY = "include_output_tokens"
KEEP_KEY = "keep_aborted"
SAMPLE_KEY = "sample_key"  # has no effect unless the server samples
PATH_OPTION = "allow_custom_save_path"

_IMPLY_EXTRACTION = (PATH_KEY, OUTPUT_KEY, KEEP_KEY)
_OF_REQUESTS = (EXTRACT_KEY, SAMPLE_KEY, *_IMPLY_EXTRACTION)
_KNOWN = frozenset(_OF_REQUESTS)
_NEAR = 0.75  # similarity of a misspelt key; no key of vLLM's connectors is so similar
_REFUSED_PATH = f"kv_transfer_params.{PATH_KEY} is "
_PATH_IN_USE = ", which another request is writing; choose another name"
_SHOWN = 60  # most characters of a value that an error quotes


class ParamsError(ValueError):
    """The request cannot be extracted as asked. The message names key, value and remedy."""


@dataclass(frozen=True)
class ServerParams:
    """The server's settings.

    Attributes:
        directory: directory of the files; None if the sink writes no files.
        include_output: whether rows of generated tokens are extracted by default.
        allow_path: whether a request may choose the file.
        extract_all: whether requests are extracted by default.
        sample_rate: share of the requests that are extracted by default; None to follow
            `extract_all`.
        has_others: whether another connector reads the same parameters (MultiConnector).
    """

    directory: Path | None
    include_output: bool = False
    allow_path: bool = False
    extract_all: bool = True
    sample_rate: float | None = None
    has_others: bool = False


@dataclass(frozen=True)
class RequestParams:
    """The options of a request, with the server's defaults.

    Attributes:
        extract: whether the request is extracted.
        include_output: whether rows of generated tokens are extracted.
        path: the file that the request chose, in the storage directory, or None.
        keep_aborted: whether the rows that were computed are kept if the request is aborted.
    """

    extract: bool = True
    include_output: bool = False
    path: Path | None = None
    keep_aborted: bool = False


def read_params(params: object, server: ServerParams, request_id: str = "") -> RequestParams:
    """Parse a request's `kv_transfer_params`.

    Args:
        params: as sent by the client. vLLM checks that the API's field is an object, but also
            passes on a value of that name in `vllm_xargs`
            (entrypoints/openai/completion/protocol.py:313, 0.23.0).
        server: the server's settings.
        request_id: vLLM's internal id. A server that samples decides by it unless the client sends
            a key.

    Raises:
        ParamsError: if the parameters are invalid or not allowed.
    """
    if params is None:
        return RequestParams(
            extract=_by_default({}, server, request_id), include_output=server.include_output
        )
    if not isinstance(params, dict):
        raise ParamsError(f"kv_transfer_params is {shown(params)}; use an object")
    if params.get("do_remote_prefill"):
        # A proxy passes on the response of the prefill server. The path in it is a file of that
        # server, not a request to this server.
        params = {key: value for key, value in params.items() if key != PATH_KEY}
    else:
        _refuse_unknown(params.keys() - _KNOWN, server)
    by_default = _by_default(params, server, request_id) or not params.keys().isdisjoint(
        _IMPLY_EXTRACTION
    )
    if not _read_bool(params, EXTRACT_KEY, by_default):
        return RequestParams(extract=False)
    return RequestParams(
        include_output=_read_bool(params, OUTPUT_KEY, server.include_output),
        path=_read_path(params[PATH_KEY], server) if PATH_KEY in params else None,
        keep_aborted=_read_bool(params, KEEP_KEY, False),
    )


def _refuse_unknown(keys: set[object], server: ServerParams) -> None:
    """Refuse misspelt keys, and keys that no connector of this server reads."""
    for key in sorted(keys, key=str):
        near = _similar(key) if isinstance(key, str) else None
        if near is not None or not server.has_others:
            hint = f"did you mean {near!r}?" if near else f"the keys are: {', '.join(_OF_REQUESTS)}"
            raise ParamsError(f"kv_transfer_params has the unknown key {shown(key)}; {hint}")


@functools.lru_cache(maxsize=256)
def _similar(key: str) -> str | None:
    """Return the key of requests that a client may have meant."""
    near = difflib.get_close_matches(key[:_SHOWN], _OF_REQUESTS, n=1, cutoff=_NEAR)
    return near[0] if near else None


def _by_default(params: Mapping[str, object], server: ServerParams, request_id: str) -> bool:
    """Return whether a request without EXTRACT_KEY is extracted. All processes agree."""
    key = params.get(SAMPLE_KEY)
    if SAMPLE_KEY in params and not isinstance(key, str):
        raise ParamsError(
            f"kv_transfer_params.{SAMPLE_KEY} is {shown(key)}; use a string, the same for "
            "all requests that belong together"
        )
    if server.sample_rate is None:
        return server.extract_all
    text = split_id(request_id)[0] if key is None else str(key)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < server.sample_rate * 2**64


def _read_bool(params: Mapping[str, object], key: str, default: bool) -> bool:
    value = params.get(key, default)
    if not isinstance(value, bool):
        raise ParamsError(f"kv_transfer_params.{key} is {shown(value)}; use true or false")
    return value


def _read_path(value: object, server: ServerParams) -> Path:
    if isinstance(value, os.PathLike):  # from an LLM object in the engine's process
        value = os.fspath(value)
    refused = f"{_REFUSED_PATH}{shown(value)}"
    if server.directory is None:
        raise ParamsError(
            f"{refused}, but this server writes no files: it puts hidden states into a "
            "Mooncake store; omit the key"
        )
    if not server.allow_path:
        raise ParamsError(
            f"{refused}, but this server chooses file names itself; omit the key, or start the "
            f"server with kv_connector_extra_config.{PATH_OPTION}=true"
        )
    remedy = (
        f"use a path below {server.directory} that ends with .safetensors, absolute or relative "
        "to it"
    )
    if not isinstance(value, str):
        raise ParamsError(f"{refused}; {remedy}")
    relative = _below(server.directory, value) if value.startswith("/") else value
    if relative is None:
        raise ParamsError(f"{refused}, which is outside the storage directory; {remedy}")
    problem = path_refusal(relative)
    if problem is not None:
        raise ParamsError(f"{refused}, which cannot be used: {problem}; {remedy}")
    return server.directory / relative


def path_in_use(path: str) -> str:
    """Return the error for a request that names the file of another request."""
    return f"{_REFUSED_PATH}{shown(path)}{_PATH_IN_USE}"


def one_file_for_all(path: object) -> str:
    """Return the error for further prompts and samples of a request that chose a file."""
    problem = "which names one file, and the first prompt and sample of the request uses it"
    return f"{_REFUSED_PATH}{shown(path)}, {problem}; send each prompt in a request of its own, with n=1"


def refuses_path(error: str) -> bool:
    """Return whether an error in a response says that the server will never write to the path."""
    return error.startswith(_REFUSED_PATH) and not error.endswith(_PATH_IN_USE)


def _below(directory: Path, path: str) -> str | None:
    """Return the part of `path` after the directory, as configured or without `..`.

    Resolves no symbolic link.
    """
    written = os.fspath(directory)
    relative = below(path, written)
    return below(path, os.path.normpath(written)) if relative is None else relative


def shown(value: object) -> str:
    """Return a client's value as short, printable text."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN])
        return (
            text
            if len(value) <= _SHOWN and len(text) <= 2 * _SHOWN
            else f"{text[: 2 * _SHOWN]}... ({len(value)} characters)"
        )
    # Python does not print integers of thousands of digits
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
