"""Rows that stay where servers put them: the servers give each file its row's name, and write into the output directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.generate.collect import Collector
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.examine import CheckError, Examined, Expected, examine
from vllm_ascend_hsx.generate.names import row_file, row_of_file
from vllm_ascend_hsx.protocol.lock import wait_until_released
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStatesError, open_stored, remove
from vllm_ascend_hsx.reader.shards import Place


class InPlaceCollector(Collector):
    """Looks at files, and leaves them where they are. How durable they are is the servers' part."""

    def check_place(self, path: Path, row: int | None) -> None:
        """Raises InputError: the file of a row, which the server names, is not where it has to stay."""
        assert row is not None  # there is no trial
        target = self._output / row_file(row)
        if path.name != target.name or not _is_same_directory(path.parent, self._output):
            raise InputError(
                f"--in-place: the server stores a row as {path}, and it has to be {target.absolute()}; name the servers' "
                "shared_storage_path with --output, and if it is called otherwise on their machines, say so with --map-path SERVER=HERE"
            )

    def _take(self, path: Path, target: Path, partial: Path, expected: Expected) -> Examined:
        place = self._open_own(target)
        try:
            return examine(place, expected, validate=self._validate)
        finally:
            os.close(place.fd)

    def _open_own(self, path: Path) -> Place:
        try:
            return open_stored(path, self._timeout)
        except HiddenStatesError as error:
            raise CheckError(error.reason) from error

    def _tidy(self, path: Path) -> None:
        remove(path, keep_data=True)


def _is_same_directory(one: Path, other: Path) -> bool:
    """Whether two names lead to one directory, through whatever links and mounts."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def remove_companions(directory: Path, is_ours: Callable[[int], bool], timeout: float) -> list[Path]:
    """Remove locks and errors of rows, each as soon as the server has let go of it.

    Args:
        directory: the output.
        is_ours: whether a row is one of this run's.
        timeout: seconds to wait for the server at most, for each.

    Returns:
        The files that the server still writes; the next run finds them.

    Raises:
        OSError: the directory cannot be read, or a file not be removed.
    """
    rows = {row_of_file(name.removesuffix(LOCK_SUFFIX).removesuffix(ERROR_SUFFIX)) for name in os.listdir(directory) if _is_companion(name)}
    busy = []
    for row in sorted(row for row in rows if row is not None and is_ours(row)):
        path = directory / row_file(row)
        with suppress(FileNotFoundError):
            try:
                wait_until_released(path.with_name(path.name + LOCK_SUFFIX), timeout)
            except TimeoutError:
                busy.append(path)
                continue
            remove(path, keep_data=True)
    return busy


def _is_companion(name: str) -> bool:
    return name.endswith((LOCK_SUFFIX, ERROR_SUFFIX))
