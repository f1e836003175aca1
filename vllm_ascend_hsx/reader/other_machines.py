"""Servers of other machines, whose locks may not reach the machine of a reader."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.protocol.heartbeat import RECENT_S, Beat, beat_elsewhere
from vllm_ascend_hsx.protocol.lock import flock_now, unlock_and_close
from vllm_ascend_hsx.protocol.names import MAX_DEPTH, SERVER_LOCK, token_of_workspace


class OtherMachines:
    """Servers of other machines whose own locks are free here, so that they died or are not seen.

    A lock file does not say which server made it. So while one of these servers may live, a lock
    that is free does not say that its server died. The clocks of two machines are not compared: a
    server lives if its heartbeat changes.

    Args:
        path: a request's file. Its server's hidden directory is beside it, or in a directory above.
    """

    def __init__(self, path: Path) -> None:
        directories = Path(os.path.abspath(path)).parents[: MAX_DEPTH + 1]
        self._locks = [lock for directory in directories for lock in _server_locks(directory)]
        self._beats: list[Beat] = []
        self._since = 0.0

    def living(self) -> str | None:
        """Return a machine whose server may live, or None if there was no heartbeat for RECENT_S.

        The first call takes them all for alive.
        """
        beats = [beat for lock in self._locks if (beat := _beat(lock)) is not None]
        if beats != self._beats:
            self._beats, self._since = beats, time.monotonic()
        return beats[0].machine if beats and time.monotonic() - self._since < RECENT_S else None


def _server_locks(directory: Path) -> list[Path]:
    with suppress(OSError), os.scandir(directory) as entries:
        return [Path(each.path, SERVER_LOCK) for each in entries if token_of_workspace(each.name)]
    return []


def _beat(lock: Path) -> Beat | None:
    """Return the heartbeat in a server's lock file, or None if it is held or is of this machine."""
    with suppress(OSError):
        # Opened anew each time: NFS then asks its server for the modification time.
        fd = open_regular(lock)
        try:
            beat = beat_elsewhere(fd)
            return beat if beat is not None and flock_now(fd, fcntl.LOCK_SH) else None
        finally:
            unlock_and_close(fd)
    return None
