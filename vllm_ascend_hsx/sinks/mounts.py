"""Detect mounts of a storage directory whose locks may not reach other machines."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ALONE = "locks do not reach other machines"
_LUSTRE = "Mount it with flock and without localflock on every machine that shares it."
_NFS = "Mount it with local_lock=none and without nolock on every machine that shares it."
_TRY = (
    "Test it: run `flock FILE sleep 60` on one machine and `flock -n FILE true; echo $?` on "
    "another, with one FILE in this directory. 1 means that locks reach the other machine, 0 that "
    "they do not."
)


class LocalLocks(NamedTuple):
    """Why locks of a mount may not reach other machines.

    Attributes:
        problem: the filesystem and the option.
        remedy: one or two sentences.
    """

    problem: str
    remedy: str


def local_locks(line: str) -> LocalLocks | None:
    """Return the reason why locks may not reach other machines, or None if no reason is known.

    Args:
        line: a line of mountinfo (proc_pid_mountinfo(5)).

    Raises IndexError if the line has fewer fields.
    """
    kind, options = kind_of(line), {*line.split()[5].split(","), *line.split()[-1].split(",")}
    local = " and ".join(sorted(options & {"nolock", "local_lock=flock", "local_lock=all"}))
    if kind == "lustre" and "localflock" in options:
        return LocalLocks(f"lustre is mounted with localflock: {_ALONE}", _LUSTRE)
    if kind == "lustre" and "flock" not in options:
        return LocalLocks(f"lustre is mounted without flock: {_ALONE}", _LUSTRE)
    if kind == "nfs" and local:  # version 3; nfs4 lacks these options
        return LocalLocks(f"nfs is mounted with {local}: {_ALONE}", _NFS)
    if kind in ("gpfs", "fuse") or kind.startswith("fuse."):
        return LocalLocks(f"{kind} may not pass locks on to other machines", _TRY)
    return None


def mounted_locks(directory: Path, root: Path = Path("/")) -> LocalLocks | None:
    """Apply `local_locks` to the mount of a directory. Return None if the mount is unknown."""
    with suppress(OSError, IndexError):
        return local_locks(mount_of(directory, root))
    return None


def kind_of(line: str) -> str:
    """Return the filesystem (for example "ext4") of a line of mountinfo. Raises IndexError."""
    return line.partition(" - ")[2].split()[0]


def mount_of(directory: Path, root: Path = Path("/")) -> str:
    """Return the line of mountinfo of a directory's mount, or "" if there is none.

    Args:
        directory: the directory; symbolic links in the path are followed.
        root: directory that contains /proc.

    Raises OSError, or IndexError for a line with fewer fields.
    """
    path = os.path.realpath(directory)
    best, found = -1, ""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")  # a space is written as \040
        if len(point) >= best and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, found = len(point), line  # a later mount at the same point is on top
    return found
