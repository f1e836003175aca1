"""The option directory_budget_bytes: limit the total size of files in the storage directory.

The scheduler side reserves space for each request, and each rank counts the files that it has
published. A reservation has the largest size that the file can have. It ends when the rank counts
the file. So published and unfinished files together never exceed the budget. Only consumers remove
files. When an engine has no space left, the ranks check which files are gone.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vllm_ascend_hsx.compat.engine import Share
from vllm_ascend_hsx.connector.metadata import RankState
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, TAR
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import Adapter, RowFormat

DIRECTORY = "kv_connector_extra_config.shared_storage_path"
OPTION = "kv_connector_extra_config.directory_budget_bytes"
DIRECTORY_FULL = "directory_full"  # a kind of failure

StoredFile: TypeAlias = "tuple[str, tuple[int]]"  # path and bytes

_GONE = (errno.ENOENT, errno.ENOTDIR)
_CHECK_IS_RECENT_S = 1.0
_LONGEST_CHECK_S = 5.0  # longest time that a request waits for a check
_LONGEST_FINGERPRINT = "f" * 128
_REMEDY = "consumers must remove files, or acknowledge them for `hsx clean --keep-bytes`"


@dataclass(eq=False)
class Reservation:
    """The space that a request needs or has reserved.

    Attributes:
        layout: layout of the file.
        most_rows: most rows that the file can have.
        asked_at: when the request first found no space; None before that.
        reserved: bytes that are reserved.
    """

    layout: FileLayout
    most_rows: int
    asked_at: float | None = None
    reserved: int = 0

    @property
    def num_bytes(self) -> int:
        """Most bytes of the file."""
        return self.layout.file_size(self.most_rows)


class DirectoryBudget:
    """Reserve space for the files of one data-parallel rank. For the scheduler's thread only.

    Args:
        num_bytes: value of the option.
        num_engines: data-parallel ranks. Each may use an equal share.
        row_format: format of the rows.
        clock: monotonic clock in seconds.

    Attributes:
        check: number of the last requested check for removed files. Before the first check, the
            files of earlier servers are not counted.
    """

    def __init__(
        self,
        num_bytes: int,
        num_engines: int,
        row_format: RowFormat,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_bytes = num_bytes
        self._share = num_bytes // num_engines
        self._row_format = row_format
        self._clock = clock
        self._reserved = 0
        self._requested_at = float("-inf")  # time of the last request for a check
        self.check = 1

    def reservation(
        self, request: Any, placeholders: Sequence[Placeholder], most_rows: int
    ) -> Reservation:
        """Return the reservation that a new request needs. It reserves nothing yet."""
        row_format, lora = self._row_format, request.lora_request
        if lora is not None:
            row_format = replace(row_format, adapter=Adapter(lora.lora_name, _LONGEST_FINGERPRINT))
        return Reservation(
            FileLayout(row_format, request.request_id, None, placeholders), most_rows
        )

    def admits(self, reservation: Reservation, ranks: Sequence[RankState]) -> bool | None:
        """Reserve space for a file. Return False if there is no space.

        Return None while the ranks check whether consumers have removed files.
        """
        if reservation.num_bytes > self._share:
            return False
        now = self._clock()
        is_known = all(state.checked for state in ranks)
        if is_known and self._stored(ranks) + self._reserved + reservation.num_bytes <= self._share:
            self.reserve(reservation)
            return True
        has_checked = all(state.checked >= self.check for state in ranks)
        if has_checked and now - self._requested_at <= _CHECK_IS_RECENT_S:
            return False
        reservation.asked_at = now if reservation.asked_at is None else reservation.asked_at
        if now - reservation.asked_at > _LONGEST_CHECK_S:
            return False
        if has_checked:
            self.check, self._requested_at = self.check + 1, now
        return None

    def reserve(self, reservation: Reservation) -> None:
        """Reserve space unconditionally."""
        reservation.reserved = reservation.num_bytes
        self._reserved += reservation.reserved

    def limit(self, reservation: Reservation, num_rows: int) -> None:
        """Reduce a reservation, because a request has ended with `num_rows` rows."""
        self.end(reservation)
        reservation.most_rows = min(num_rows, reservation.most_rows)
        self.reserve(reservation)

    def end(self, reservation: Reservation) -> None:
        """End a reservation, because a rank counts the file or there is no file."""
        self._reserved -= reservation.reserved
        reservation.reserved = 0

    def refusal(self, reservation: Reservation, ranks: Sequence[RankState]) -> str:
        """Return the reason for a request without space."""
        size, used = reservation.num_bytes, self._stored(ranks) + self._reserved
        whose = "" if self._share == self._num_bytes else ", the share of this data-parallel rank,"
        problem = (
            f"the storage directory has no room for a file of up to {size} bytes: {used} of "
            f"{self._share} bytes{whose} are used"
        )
        if size > self._share:
            return (
                f"{problem}; raise {OPTION}, which is {self._num_bytes}, or send a shorter "
                "prompt or a smaller max_tokens"
            )
        if any(state.checked < self.check for state in ranks):
            return f"{problem}, and the storage does not answer the check for removed files"
        return f"{problem} ({OPTION} is {self._num_bytes}); {_REMEDY}"

    def _stored(self, ranks: Sequence[RankState]) -> int:
        return sum(state.stored for state in ranks)


class StoredFiles:
    """The files of one rank in the storage directory. Not thread-safe, except for `missing`.

    Attributes:
        num_bytes: bytes of the files. Removed files count until a check.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        # Bytes by path. `forget` compares the identity of tuples, so each file has a new tuple.
        self._files: dict[str, tuple[int]] = {}

    @classmethod
    def found_in(cls, directory: str, share: Share) -> StoredFiles:
        """Count this rank's share of the files that earlier servers have left.

        All ranks of a server find the same files. Each file is checked by one rank. The ranks count
        equal parts of the bytes, because one large file must not take all the space of a rank.

        Raises UserError if a folder cannot be read.
        """
        found, parts = cls(), [0] * share.of
        try:
            for path, size in sorted(_files_below(directory)):
                owner = parts.index(min(parts))
                parts[owner] += size
                if owner == share.number:
                    found._files[path] = (size,)
        except OSError as error:
            problem = (
                "has files that cannot be counted for directory_budget_bytes: "
                f"{describe(str(error.filename), error)}"
            )
            raise UserError(
                DIRECTORY,
                directory,
                problem,
                "Let the server read its folders, or leave directory_budget_bytes out.",
            ) from error
        found.num_bytes = -(-sum(parts) // share.of)
        return found

    def add(self, path: str, num_bytes: int) -> None:
        """Count a published file. An earlier file of this name is gone."""
        before = self._files.get(path, (0,))
        self._files[path] = (num_bytes,)
        self.num_bytes += num_bytes - before[0]

    def all(self) -> list[StoredFile]:
        """Return the files, oldest first, for `missing`."""
        return list(self._files.items())

    @staticmethod
    def missing(files: Sequence[StoredFile]) -> list[StoredFile]:
        """Return the files whose name is gone. Blocks on storage."""
        return [each for each in files if _is_gone(each[0])]

    def forget(self, files: Sequence[StoredFile]) -> None:
        """Stop counting files, unless their name has a later file."""
        for path, size in files:
            if self._files.get(path) is size:
                del self._files[path]
                self.num_bytes -= size[0]


def _is_gone(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError as error:  # other errors do not show that the file is gone
        return error.errno in _GONE
    return False


def _files_below(directory: str) -> Iterator[tuple[str, int]]:
    """Yield path and bytes of each visible file of hidden states or shard. Raises OSError."""
    folders = [directory]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:  # removed meanwhile
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith((DATA_SUFFIX, TAR)) and entry.is_file(
                    follow_symlinks=False
                ):
                    with suppress(FileNotFoundError):
                        yield entry.path, entry.stat(follow_symlinks=False).st_size
