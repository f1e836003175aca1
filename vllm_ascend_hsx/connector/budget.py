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
_LOOK_IS_NEW_S = 1.0
_LONGEST_LOOK_S = 5.0  # after that, storage is not asked whether there is room
_LONGEST_FINGERPRINT = "f" * 128
_REMEDY = "consumers must remove files, or acknowledge them for `hsx clean --keep-bytes`"


@dataclass(eq=False)
class Room:
    """The room that a request needs or has.

    Attributes:
        layout: layout of the file.
        most_rows: most rows that the file can have.
        asked_at: when the request was first asked about; None before that.
        promised: bytes that are promised to it.
    """

    layout: FileLayout
    most_rows: int
    asked_at: float | None = None
    promised: int = 0

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
        look: number of the last look that the ranks have been asked for. Ranks that have not
            looked once may have files of earlier servers.
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
        self._promised = 0
        self._looked_at = float("-inf")  # when the last look was asked for
        self.look = 1

    def room(self, request: Any, placeholders: Sequence[Placeholder], most_rows: int) -> Room:
        """Return the room that a new request needs, before it is asked about."""
        row_format, lora = self._row_format, request.lora_request
        if lora is not None:
            row_format = replace(row_format, adapter=Adapter(lora.lora_name, _LONGEST_FINGERPRINT))
        return Room(FileLayout(row_format, request.request_id, None, placeholders), most_rows)

    def admits(self, room: Room, ranks: Sequence[RankState]) -> bool | None:
        """Promise room for a file. Return False if there is none.

        Return None while the ranks look whether consumers have removed files.
        """
        if room.num_bytes > self._share:
            return False
        now = self._clock()
        is_known = all(state.looked for state in ranks)
        if is_known and self._stored(ranks) + self._promised + room.num_bytes <= self._share:
            self.promise(room)
            return True
        has_looked = all(state.looked >= self.look for state in ranks)
        if has_looked and now - self._looked_at <= _LOOK_IS_NEW_S:
            return False
        room.asked_at = now if room.asked_at is None else room.asked_at
        if now - room.asked_at > _LONGEST_LOOK_S:
            return False
        if has_looked:
            self.look, self._looked_at = self.look + 1, now
        return None

    def promise(self, room: Room) -> None:
        """Promise room in any case."""
        room.promised = room.num_bytes
        self._promised += room.promised

    def limit(self, room: Room, num_rows: int) -> None:
        """Promise less, because a request has ended with so many rows."""
        self.end(room)
        room.most_rows = min(num_rows, room.most_rows)
        self.promise(room)

    def end(self, room: Room) -> None:
        """Release a promise: the file is counted by its rank, or there is none."""
        self._promised -= room.promised
        room.promised = 0

    def refusal(self, room: Room, ranks: Sequence[RankState]) -> str:
        """Return the reason for a request that has no room."""
        size, used = room.num_bytes, self._stored(ranks) + self._promised
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
        if any(state.looked < self.look for state in ranks):
            return f"{problem}, and the storage does not answer the check for removed files"
        return f"{problem} ({OPTION} is {self._num_bytes}); {_REMEDY}"

    def _stored(self, ranks: Sequence[RankState]) -> int:
        return sum(state.stored for state in ranks)


class StoredFiles:
    """The files of one rank in the storage directory. Not thread-safe, except for `missing`.

    Attributes:
        num_bytes: bytes of the files. Removed files count until a look.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._files: dict[str, tuple[int]] = {}  # bytes by path; a tuple of its own for each file

    @classmethod
    def found_in(cls, directory: str, share: Share) -> StoredFiles:
        """Count this rank's share of the files that earlier servers have left.

        All ranks of a server find the same files. Each file is one rank's to look for. The ranks
        count equal parts of the bytes, so that none has less room because of a large file.

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
