"""The heartbeat of a server, for machines that the server's locks do not reach.

Lustre with localflock, NFS with nolock, and some other filesystems grant a flock on each machine
separately. Therefore a server writes the name of the machine into its lock file, and touches that
file while it lives.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.protocol.lock import flock_now, unlock_and_close
from vllm_ascend_hsx.protocol.names import SERVER_LOCK, printable

BEAT_S = 30.0  # seconds between two heartbeats
# A server with an older heartbeat is dead. Longer than the largest storage_timeout_s, because
# hanging storage stops the heartbeat, too.
RECENT_S = 300.0
_HOST = ".host="  # a folder below the storage directory cannot have this name
_LINE = 256  # most bytes of the line to write or read


class Beat(NamedTuple):
    """The last heartbeat of a server.

    Attributes:
        machine: name of the server's machine.
        at_ns: modification time of the lock file, by the clock of the filesystem.
    """

    machine: str
    at_ns: int


@cache
def boot_id() -> str:
    """Return an id of the running kernel. All containers on the kernel share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def host_line(fd: int) -> bytes:
    """Return the line that names the machine of a server in its lock file, open at `fd`."""
    return f"{_host(fd)} {socket.gethostname()}"[: _LINE - 1].encode() + b"\n"


def beat_elsewhere(fd: int) -> Beat | None:
    """Return the heartbeat of a server on another machine or mount, or None. Raises OSError.

    With None, the lock decides whether the server lives: the server locks the file through the same
    kernel and mount as this process, or the lock file names no machine.

    Args:
        fd: the server's lock file.
    """
    line = os.pread(fd, _LINE, 0).partition(b"\n")[0].decode(errors="replace")
    host, _, machine = line.partition(" ")
    if not host.startswith(_HOST) or host == _host(fd):
        return None
    return Beat(printable(machine), os.fstat(fd).st_mtime_ns)


def unheld_beat(workspace: str | Path, dir_fd: int | None = None) -> Beat | None:
    """Return the heartbeat of a server on another machine whose lock is free here, or None.

    Args:
        workspace: the server's hidden directory.
        dir_fd: directory of a relative path.
    """
    with suppress(OSError):
        # Open the file each time: NFS then asks the NFS server for the modification time.
        fd = open_regular(os.path.join(workspace, SERVER_LOCK), dir_fd=dir_fd)
        try:
            beat = beat_elsewhere(fd)
            return beat if beat is not None and flock_now(fd, fcntl.LOCK_SH) else None
        finally:
            unlock_and_close(fd)
    return None


def may_live_elsewhere(workspace: str | Path, dir_fd: int | None = None) -> bool:
    """Return whether a server on another machine may live although the lock is free here.

    Also True if this user may not read the clock of the filesystem, even if the last heartbeat is
    old. Takes the arguments of `unheld_beat`.
    """
    beat = unheld_beat(workspace, dir_fd)
    try:
        return beat is not None and is_recent(beat, workspace, dir_fd)
    except OSError:
        return True


def is_recent(beat: Beat, workspace: str | Path, dir_fd: int | None) -> bool:
    """Return whether a server was alive within the last RECENT_S seconds.

    Touches the server's hidden directory to read the clock of the filesystem. Raises OSError.
    """
    os.utime(workspace, dir_fd=dir_fd, follow_symlinks=False)
    now_ns = os.stat(workspace, dir_fd=dir_fd, follow_symlinks=False).st_mtime_ns
    return now_ns - beat.at_ns < RECENT_S * 1e9


def _host(fd: int) -> str:
    # Two mounts of one filesystem have two device numbers. Even on one machine, a flock through
    # one mount may not be seen through the other.
    return f"{_HOST}{boot_id()}:{os.fstat(fd).st_dev}"
