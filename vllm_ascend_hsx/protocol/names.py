"""From a request id, or a path that a client chose, to file names: the one place where what a client sends becomes part of a path."""

from __future__ import annotations

import hashlib
import os
import re

from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, SHARDS_MARK, TAR

DATA_SUFFIX = ".safetensors"
LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"
PARTIAL_SUFFIX = ".partial"
# Of all that servers, consumers and `hsx generate` (its ledger is called *.jsonl) make in a storage directory, but for the mark of shards.
_FILE_SUFFIXES = (DATA_SUFFIX, LOCK_SUFFIX, ERROR_SUFFIX, PARTIAL_SUFFIX, TAR, INDEX, MANIFEST)

NAME_MAX = 255  # bytes of one path component on every Linux filesystem (NAME_MAX in linux/limits.h)
# What a companion adds to the name of the data: the longest is `.<name>.error.<8 hex digits>.partial`.
COMPANION_ROOM = 32
MAX_DEPTH = 8  # directories between the storage directory and a file

# '~' joins prefix and hash, and is in no id that is used unchanged: a changed id can never meet an unchanged one.
_UNCHANGED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_WORKSPACE = re.compile(r"\.hsx-([0-9a-f]{8})")
_HASH_DIGITS = 32
_ID_MAX = NAME_MAX - COMPANION_ROOM - len(DATA_SUFFIX)


def file_name(request_id: str) -> str:
    """The name of a request's data file.

    An id of letters, digits, '_', '-' and '.' that starts with none of the latter two is used as it is. Any other is made so, cut to
    length, and followed by '~' and 128 bits of its SHA-256: two ids never share a file. The result is one path component of at most
    `NAME_MAX - COMPANION_ROOM` ASCII characters that starts with no dot and ends with `DATA_SUFFIX`.

    Args:
        request_id: any string, of any length; lone surrogates are allowed.
    """
    if len(request_id) <= _ID_MAX and _UNCHANGED.fullmatch(request_id):
        return request_id + DATA_SUFFIX
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    return f"{sanitize(request_id[: _ID_MAX - _HASH_DIGITS - 1])}~{digest}{DATA_SUFFIX}"


def sanitize(request_id: str) -> str:
    """The id with every character replaced that a file name must not have: what stands before the '~', if the id is not too long."""
    return _UNSAFE.sub("_", request_id).lstrip(".-")


def partial_name(name: str, token: str = "") -> str:
    """The hidden name under which `name` is made before it is renamed; `token` tells several of them apart."""
    return f".{name}.{token}{PARTIAL_SUFFIX}" if token else f".{name}{PARTIAL_SUFFIX}"


def workspace_name(token: str, is_locked: bool = True) -> str:
    """The hidden directory that a server makes files in; nobody cleans up one without a lock."""
    return f".hsx-{token}" if is_locked else f".hsx-unlocked-{token}"


def token_of_workspace(name: str) -> str | None:
    """The token of a hidden directory with a lock, or None: `name` is none."""
    match = _WORKSPACE.fullmatch(name)
    return match and match[1]


def refusal(name: str) -> str | None:
    """Why `name` cannot be the data file's name, or None if it can; holds for names that do not come from `file_name` too."""
    problem = _component_refusal(name)
    if problem is None and not name.endswith(DATA_SUFFIX):
        return f"it does not end with {DATA_SUFFIX}"
    return problem


def path_refusal(path: str) -> str | None:
    """Why `path`, relative to the storage directory, cannot be that of a data file, or None if it can."""
    *folders, name = path.split("/", MAX_DEPTH + 1)
    if len(folders) > MAX_DEPTH:
        return f"it leads through more than {MAX_DEPTH} directories"
    for folder in folders:
        problem = _component_refusal(folder)
        if problem is None and (folder == SHARDS_MARK or folder.endswith(_FILE_SUFFIXES)):
            problem = "it is called like a file, and would be in that file's way"
        if problem is not None:
            return f"a directory's name in it cannot be used: {problem}"
    return refusal(name)


def printable(text: str) -> str:
    """The text with what a terminal would take for an instruction, or could not show, spelt out."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def below(path: str, directory: str) -> str | None:
    """What stands behind `directory` in `path`, both as they are written: nothing is resolved. None: it does not begin with it."""
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _component_refusal(name: str) -> str | None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        return "it is not a plain, printable name"
    if name.startswith("."):
        return "it starts with a dot, and hidden names are for files that are not complete yet"
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        return "the server's locale cannot write it"
    if length > NAME_MAX - COMPANION_ROOM:
        return f"it is longer than {NAME_MAX - COMPANION_ROOM} bytes"
    return None
