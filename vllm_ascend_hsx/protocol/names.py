"""File names: the only place where request ids and client-chosen paths become paths."""

from __future__ import annotations

import hashlib
import os
import re

DATA_SUFFIX = ".safetensors"
LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"
ACKNOWLEDGED_SUFFIX = ".acknowledged"  # consumers no longer need the file
PARTIAL_SUFFIX = ".partial"
SERVER_LOCK = "lock"  # in a server's hidden directory
TAR, INDEX, MANIFEST = ".tar", ".jsonl", ".json"  # a shard and the files beside it
# A directory with shards has a file of this name. Without it, a reader that misses a file need not
# list the directory.
SHARDS_MARK = "hsx-shards"
REMOVED = f"hsx-removed{INDEX}"  # an index without a shard: consumers add the members to hide
# Suffixes of all files that servers, consumers and `hsx generate` (ledger: *.jsonl) create in a
# storage directory, except for SHARDS_MARK.
_FILE_SUFFIXES = (
    DATA_SUFFIX,
    LOCK_SUFFIX,
    ERROR_SUFFIX,
    ACKNOWLEDGED_SUFFIX,
    PARTIAL_SUFFIX,
    TAR,
    INDEX,
    MANIFEST,
)

NAME_MAX = 255  # most bytes of a path component on Linux (NAME_MAX in linux/limits.h)
# Bytes that a companion adds to the name of the data. The longest is `.<name>.acknowledged.<8 hex
# digits>.partial`.
COMPANION_ROOM = 32
MAX_DEPTH = 8  # most directories between the storage directory and a file

# '~' joins prefix and hash. No unchanged id contains it, so a changed id never equals an unchanged
# one.
_UNCHANGED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_WORKSPACE = re.compile(r"\.hsx-([0-9a-f]{8})")
_SHARD = re.compile(r"(hsx-([0-9a-f]{8})-[0-9]{6,9})(\.tar|\.jsonl|\.json)")
_HASH_DIGITS = 32
_ID_MAX = NAME_MAX - COMPANION_ROOM - len(DATA_SUFFIX)


def file_name(request_id: str) -> str:
    """Return the name of a request's data file.

    An id of at most `_ID_MAX` letters, digits, '_', '-' and '.' that starts with neither '-' nor
    '.' is used unchanged. Any other id is sanitised, truncated, and followed by '~' and 128 bits of
    its SHA-256, so two ids never share a file. The result is one path component of at most
    `NAME_MAX - COMPANION_ROOM` ASCII characters that starts with no dot and ends with
    `DATA_SUFFIX`.

    Args:
        request_id: any string of any length. Lone surrogates are allowed.
    """
    if len(request_id) <= _ID_MAX and _UNCHANGED.fullmatch(request_id):
        return request_id + DATA_SUFFIX
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    return f"{sanitize(request_id[: _ID_MAX - _HASH_DIGITS - 1])}~{digest}{DATA_SUFFIX}"


def sanitize(request_id: str) -> str:
    """Replace characters that file names must not have. The result is the part before the '~'."""
    return _UNSAFE.sub("_", request_id).lstrip(".-")


def partial_name(name: str, token: str = "") -> str:
    """Return the hidden name under which `name` is written before it is renamed.

    `token` distinguishes servers.
    """
    return f".{name}.{token}{PARTIAL_SUFFIX}" if token else f".{name}{PARTIAL_SUFFIX}"


def workspace_name(token: str, is_locked: bool = True) -> str:
    """Return the name of a server's hidden directory.

    Nobody cleans up a directory without a lock.
    """
    return f".hsx-{token}" if is_locked else f".hsx-unlocked-{token}"


def token_of_workspace(name: str) -> str | None:
    """Return the token of a hidden directory with a lock, or None if `name` is not one."""
    match = _WORKSPACE.fullmatch(name)
    return match and match[1]


def shard_stem(token: str, number: int) -> str:
    """Return the common part of the names of a shard's three files."""
    return f"hsx-{token}-{number:06d}"


def parse_shard_name(name: str) -> tuple[str, str, str] | None:
    """Return stem, token and suffix of one of a shard's files, or None if `name` is not one."""
    match = _SHARD.fullmatch(name)
    return match and (match[1], match[2], match[3])


def refusal(name: str) -> str | None:
    """Return why `name` cannot be a data file's name, or None if it can.

    `name` may come from a client instead of `file_name`.
    """
    problem = _component_refusal(name)
    if problem is None and not name.endswith(DATA_SUFFIX):
        return f"it does not end with {DATA_SUFFIX}"
    return problem


def path_refusal(path: str) -> str | None:
    """Return why `path`, relative to the storage directory, cannot name a data file, or None."""
    *folders, name = path.split("/", MAX_DEPTH + 1)
    if len(folders) > MAX_DEPTH:
        return f"it has more than {MAX_DEPTH} directories"
    for folder in folders:
        problem = _component_refusal(folder)
        if problem is None and (folder == SHARDS_MARK or folder.endswith(_FILE_SUFFIXES)):
            problem = "its name is reserved for files"
        if problem is not None:
            return f"one of its directories cannot be used: {problem}"
    return refusal(name)


def printable(text: str) -> str:
    """Return the text with control and other unprintable characters escaped."""
    return (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    )


def below(path: str, directory: str) -> str | None:
    """Return the part of `path` after `directory`, or None if `path` is not below it.

    Both paths are taken literally; nothing is resolved.
    """
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
