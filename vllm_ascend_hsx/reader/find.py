"""Find the file of a response that does not name it, all files of a directory, orphaned locks.

vLLM 0.23.0 returns `kv_transfer_params` for only one prompt and one sample of a request, and not at
all in a stream or if a stop string ended the request. But the file is named after vLLM's internal
id, and the internal id contains the id of the response: see protocol/request_ids.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from vllm_ascend_hsx.protocol.arguments import require_path, require_text, require_whole
from vllm_ascend_hsx.protocol.files import again_if_stale
from vllm_ascend_hsx.protocol.names import (
    DATA_SUFFIX,
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    file_name,
    sanitize,
)
from vllm_ascend_hsx.protocol.request_ids import possible_ids
from vllm_ascend_hsx.reader.load import RESPONSE_REMEDY, STORAGE_REMEDY, is_decided
from vllm_ascend_hsx.reader.lock_wait import is_left_over
from vllm_ascend_hsx.reader.members import paths_below, shards_of
from vllm_ascend_hsx.reader.other_machines import may_be_written_elsewhere

_SHOWN = 100  # most characters of an id to quote
_RANDOM = re.compile(r"-([0-9a-f]{8})(?:~[0-9a-f]{32})?$")
# Longest first: the name of a lock file ends with DATA_SUFFIX + LOCK_SUFFIX.
_SUFFIXES = (DATA_SUFFIX + LOCK_SUFFIX, DATA_SUFFIX + ERROR_SUFFIX, DATA_SUFFIX)


def find(
    directory: str | os.PathLike[str], response_id: str, *, prompt: int = 0, sample: int = 0
) -> Path:
    """Return the path, for `load`, of one prompt and sample of a response, complete or not.

    The path exists once the server has started the prompt, so always after text was returned.

    Args:
        directory: the server's storage directory.
        response_id: the `id` of the response or of any chunk of the stream, such as `cmpl-5f...`.
            With the header `X-Request-Id: NAME` it is `cmpl-NAME` for completions and
            `chatcmpl-NAME` for chat and /v1/messages. For /v1/responses it is `request_id` of the
            body, if set. For /inference/v1/generate give `generate-tokens-NAME`, because the
            response has another id. Do not choose an id that is another id plus `_` and a number:
            vLLM numbers conversations and turns like this.
        prompt: index of the prompt, scored item, conversation in a batch, or turn with tools.
        sample: index of the sample in a request with n > 1.

    Raises:
        FileNotFoundError: if there is no file, lock or error: the request has not started, was
            aborted or opted out, or the file was removed. Ids of more than about 170 characters
            are not found.
        LookupError: if several requests had this id.
        ValueError: if an argument is invalid.
        OSError: if the directory, or an index that may list the request, cannot be read.
    """
    directory = require_path("directory", directory, STORAGE_REMEDY)
    require_text("response_id", response_id, RESPONSE_REMEDY)
    for name, value in (("prompt", prompt), ("sample", sample)):
        require_whole(name, value, 0, "give a whole number, counted from 0")
    forms = possible_ids(response_id, prompt, sample)
    common = sanitize(response_id)
    found: list[set[str]] = [set() for _ in forms]
    unreadable: list[OSError] = []
    for name in _names(directory, unreadable.append):
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
        if suffix is None or common not in name or name.startswith("."):
            continue
        stem = name.removesuffix(suffix)
        random = _RANDOM.search(stem)
        for bases, matches in zip(forms, found, strict=True):
            ids = [*bases, *(f"{base}-{random[1]}" for base in bases if random)]
            if stem + DATA_SUFFIX in map(file_name, ids):
                matches.add(stem + DATA_SUFFIX)
    best = next(filter(None, found), set())
    if len(best) > 1:
        several = ", ".join(sorted(best))
        raise LookupError(
            f"{_short(response_id)} is the id of several requests: {several}. Give each request "
            "its own id."
        )
    if not best:
        if unreadable:
            raise unreadable[0]
        problem = (
            f"{directory} has no hidden states of prompt {prompt}, sample {sample} of "
            f"{_short(response_id)}"
        )
        if _is_hashed(forms[0][0]):
            problem += (
                f", an id of {len(response_id)} characters: its file name ends with a hash, so "
                "the id does not lead to it; use kv_transfer_params of the response, or a "
                "shorter X-Request-Id"
            )
        raise FileNotFoundError(problem)
    return Path(directory, best.pop())


def _is_hashed(base: str) -> bool:
    """Return whether an id is too long for a file name with the random digits after it."""
    return _RANDOM.search(file_name(f"{base}-00000000").removesuffix(DATA_SUFFIX)) is None


def _short(response_id: str) -> str:
    return repr(response_id) if len(response_id) <= _SHOWN else f"{response_id[:_SHOWN]!r}..."


def _names(
    directory: str | os.PathLike[str], on_unreadable: Callable[[OSError], None]
) -> Iterator[str]:
    with again_if_stale(os.scandir, directory) as entries:
        yield from (entry.name for entry in entries)
    yield from shards_of(directory).members(on_unreadable)


def orphaned_locks(directory: str | Path) -> list[Path]:
    """Return the free locks below a directory that have neither data nor an error, sorted.

    Locks that a living server on another machine may hold are left out, and folders that cannot be
    read.
    """
    found: list[Path] = []
    for folder, inside, files in os.walk(directory):
        inside[:] = [name for name in inside if name[0] != "."]
        names = set(files)
        free: list[Path] = []
        for name in files:
            data = name.removesuffix(LOCK_SUFFIX)
            is_lock = name.endswith(DATA_SUFFIX + LOCK_SUFFIX) and name[0] != "."
            if is_lock and data not in names and data + ERROR_SUFFIX not in names:
                with suppress(OSError):  # a lock that cannot be opened may be held
                    if is_left_over(Path(folder, name), partial(is_decided, Path(folder, data))):
                        free.append(Path(folder, name))
        if free and not may_be_written_elsewhere(free[0]):
            found += free
    return sorted(found)


def files_in(
    directory: str | Path, on_error: Callable[[OSError], None] | None = None
) -> list[Path]:
    """Return the data and error files below a directory and the members of shards there, sorted.

    Hidden names are left out. A folder or index that cannot be read is skipped, and the error is
    passed to `on_error`. Raises OSError if `directory` is no directory, and without `on_error` for
    a folder or index that cannot be read.
    """
    return paths_below(directory, (DATA_SUFFIX, DATA_SUFFIX + ERROR_SUFFIX), on_error)
