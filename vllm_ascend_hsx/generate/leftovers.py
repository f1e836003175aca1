"""Files of our requests on the server's side that nobody has taken: of runs that were killed, and of answers that were lost."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.generate.names import server_file
from vllm_ascend_hsx.protocol.lock import wait_until_released
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import remove


def find_leftovers(directories: Iterable[Path], tokens: Collection[str]) -> dict[int | None, list[Path]]:
    """The data files of our requests, there or yet to come, by row; None stands for probes. All names of each directory are read.

    Args:
        directories: of servers; one that is not there has none.
        tokens: in the names of the requests that count.

    Raises:
        OSError: a directory cannot be read.
    """
    found: dict[int | None, set[Path]] = {}
    for directory in directories:
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                file = server_file(entry.name)
                if file is not None and file.token in tokens:
                    found.setdefault(file.row, set()).add(directory / file.data_name)
    return {row: sorted(paths) for row, paths in found.items()}


def remove_leftovers(paths: Iterable[Path], timeout: float) -> list[Path]:
    """Remove files with their companions, each as soon as the server has let go of it.

    Args:
        paths: as `find_leftovers` gives them.
        timeout: seconds to wait for the server at most, for each.

    Returns:
        Those that the server still writes; the next run finds them.

    Raises:
        OSError: a file cannot be removed.
    """
    busy = []
    for path in paths:
        try:
            wait_until_released(path.with_name(path.name + LOCK_SUFFIX), timeout)
        except TimeoutError:
            busy.append(path)
        else:
            remove(path)
    return busy
