"""Detect servers on other machines whose locks may not reach this machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import again_if_stale
from vllm_ascend_hsx.protocol.heartbeat import RECENT_S, Beat, may_live_elsewhere, unheld_beat
from vllm_ascend_hsx.protocol.names import MAX_DEPTH, token_of_workspace


class OtherMachines:
    """Servers on other machines whose own locks look free here.

    Each of these servers has died, or locks do not reach this machine. The lock file of a request
    does not name a server. So while one of these servers may live, a free lock does not show that
    the request's server died. A changing heartbeat shows that a server lives. Clocks of two
    machines are not compared.

    Args:
        path: a request's file. The hidden directory of the server is in the same directory, or in a
            directory above.
    """

    def __init__(self, path: Path) -> None:
        self._workspaces = _workspaces(path)
        self._beats: list[Beat] = []
        self._since = 0.0

    def living(self) -> str | None:
        """Return a machine whose server may live, or None if no heartbeat changed for RECENT_S.

        The first call assumes that all servers live.
        """
        beats = [beat for each in self._workspaces if (beat := unheld_beat(each)) is not None]
        if beats != self._beats:
            self._beats, self._since = beats, time.monotonic()
        return beats[0].machine if beats and time.monotonic() - self._since < RECENT_S else None


def may_be_written_elsewhere(path: Path) -> bool:
    """Return whether a server on another machine may be writing a file whose lock is free here."""
    return any(map(may_live_elsewhere, _workspaces(path)))


def _workspaces(path: Path) -> list[str]:
    """Return the hidden directories of all servers that may write a file."""
    found = []
    for directory in Path(os.path.abspath(path)).parents[: MAX_DEPTH + 1]:
        with suppress(OSError), again_if_stale(os.scandir, directory) as entries:
            found += [each.path for each in entries if token_of_workspace(each.name)]
    return found
