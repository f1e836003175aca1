"""Servers of other machines, whose locks may not reach the machine of a reader."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import again_if_stale, open_regular
from vllm_ascend_hsx.protocol.heartbeat import RECENT_S, Beat, beat_elsewhere
from vllm_ascend_hsx.protocol.lock import flock_now, unlock_and_close
from vllm_ascend_hsx.protocol.names import MAX_DEPTH, SERVER_LOCK, token_of_workspace


class OtherMachines:
    """Servers on other machines whose own locks look free here.

    Each of them has died, or its locks do not reach this machine. The lock file of a request does
    not name its server. While one of these servers may live, a free lock does not show that the
    request's server died. A server lives if its heartbeat changes. Clocks of two machines are not
    compared.

    Args:
        path: a request's file. Its server's hidden directory is beside it, or in a directory above.
    """

    def __init__(self, path: Path) -> None:
        directories = Path(os.path.abspath(path)).parents[: MAX_DEPTH + 1]
        self._locks = [lock for directory in directories for lock in _server_locks(directory)]
        self._beats: list[Beat] = []
        self._since = 0.0

    def living(self) -> str | None:
        """Return a machine whose server may live, or None if no heartbeat changed for RECENT_S.

        The first call assumes that all of them live.
        """
        beats = [beat for lock in self._locks if (beat := _beat(lock)) is not None]
        if beats != self._beats:
            self._beats, self._since = beats, time.monotonic()
        return beats[0].machine if beats and time.monotonic() - self._since < RECENT_S else None


def _server_locks(directory: Path) -> list[Path]:
    with suppress(OSError), again_if_stale(os.scandir, directory) as entries:
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
