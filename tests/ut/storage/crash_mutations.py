"""Mistakes in the sink, one function each; test_crash.py shows that killing servers finds them.

Each function patches its process permanently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from vllm_ascend_hsx.protocol import names
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.shard_index import Member
from vllm_ascend_hsx.protocol.tar import headers
from vllm_ascend_hsx.sinks import orphans, workspace
from vllm_ascend_hsx.sinks.data_file import DataFile, Spare
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.member_names import MemberNames
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard_file import SessionShards, Shard
from vllm_ascend_hsx.sinks.storage import Storage


def shown_before_it_is_complete() -> None:
    """Publish before token ids and header are written."""
    commit = RequestFile.commit

    def rename_and_commit(self: Any, *args: Any) -> None:
        if self._data is not None:
            self._data.publish(self.storage, self.name)
            self._data._place = self.storage, self.name
        commit(self, *args)

    RequestFile.commit = rename_and_commit  # type: ignore[method-assign]


def written_under_its_own_name() -> None:
    """Create data files outside of the workspace."""

    def make_data(self: Any, file: RequestFile) -> DataFile:
        layout = FileLayout(self.row_format, file.request_id)
        return DataFile(
            file.storage,
            file.name,
            -1,
            layout,
            self.options,
            file.expected_tokens,
            file.session.filesystem,
        )

    FileSink.make_data = make_data  # type: ignore[method-assign]


def without_a_lock() -> None:
    class NoLock:
        def remove(self) -> None: ...

        def release(self) -> None: ...

    HeldLock.acquire = lambda *args: NoLock()  # type: ignore[assignment,method-assign]


def without_a_look_for_rows_of_its_name() -> None:
    """Open a name that has rows, and replace them."""
    FileSink._require_unused = lambda *args: None  # type: ignore[method-assign]
    Storage.publish = Storage.move  # type: ignore[method-assign]


def without_the_checksum_of_rows_after_the_last_token() -> None:
    """Include rows after the last token in the checksum."""
    complete = DataFile.complete

    def with_all(self: Any, *args: Any) -> None:
        if self._checksum is not None:
            finish = self._checksum.finish
            self._checksum.finish = lambda fd, end, rest: finish(fd, self._end, rest)
        complete(self, *args)

    DataFile.complete = with_all  # type: ignore[method-assign]


def whose_data_is_not_cut() -> None:
    """Keep rows after the last token in the file."""
    complete = DataFile.complete

    def without_cut(self: Any, *args: Any) -> None:
        with patch("os.ftruncate"):
            complete(self, *args)

    DataFile.complete = without_cut  # type: ignore[method-assign]


def with_cleaning_that_ignores_the_locks_of_servers() -> None:
    def adopt(parent_fd: int, token: str, remove_empty: bool) -> workspace.Workspace:
        name = names.workspace_name(token)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent_fd)
        lock = HeldLock(
            fd, workspace.LOCK, os.open(workspace.LOCK, os.O_RDONLY | os.O_CREAT, dir_fd=fd)
        )
        return workspace.Workspace(parent_fd, name, token, fd, lock)

    workspace.Workspace.adopt = adopt  # type: ignore[method-assign,assignment]


def with_cleaning_that_ignores_locks() -> None:
    def remove(self: Any, dir_fd: int, folder: str, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)

    orphans.Cleaning._remove_lock = remove  # type: ignore[method-assign]


def without_the_lock_of_the_server() -> None:
    """Never treat a workspace as an orphan."""
    make = workspace.Workspace.make.__func__  # type: ignore[attr-defined]
    workspace.Workspace.make = classmethod(
        lambda cls, fd, use_lock, mode: make(cls, fd, False, mode)
    )  # type: ignore[method-assign,assignment]


# Of shards


def with_a_line_before_its_member_is_complete() -> None:
    append = Shard.append

    def publish_and_append(self: Any, data: Any, name: str, tokens: int, request_id: str) -> None:
        offset = self.end + len(headers(self.end, name, data.size, 0, 0))
        index_end = self._index_end
        self._add_line(Member(name, offset, data.size, tokens, request_id, data.checksum, 0))
        self._index_end = index_end
        append(self, data, name, tokens, request_id)

    Shard.append = publish_and_append  # type: ignore[method-assign]


def with_appends_side_by_side() -> None:
    start = SessionShards.__init__

    def without_a_lock(self: Any, *args: Any) -> None:
        start(self, *args)
        self._appending = nullcontext()

    SessionShards.__init__ = without_a_lock  # type: ignore[method-assign]


def without_a_look_for_members_of_its_name() -> None:
    MemberNames.has = lambda self, name: False  # type: ignore[method-assign]


def with_a_hidden_file_that_serves_two_requests_at_a_time() -> None:
    detach = DataFile.detach

    def keep(self: Any) -> Spare:
        spare = detach(self)
        kept.append(spare)
        return spare

    kept: list[Spare] = []
    DataFile.detach = keep  # type: ignore[method-assign]
    hidden_file = SessionShards.hidden_file
    SessionShards.hidden_file = lambda self: kept[0] if kept else hidden_file(self)  # type: ignore[method-assign]


def _all(*functions: Callable[[], None]) -> dict[str, Callable[[], None]]:
    return {function.__name__: function for function in functions}


ALONE: dict[str, Callable[[], None]] = _all(
    shown_before_it_is_complete,
    written_under_its_own_name,
    without_a_lock,
    without_a_look_for_rows_of_its_name,
    without_the_checksum_of_rows_after_the_last_token,
    whose_data_is_not_cut,
    without_the_lock_of_the_server,
)
TOGETHER: dict[str, Callable[[], None]] = _all(
    with_cleaning_that_ignores_the_locks_of_servers, with_cleaning_that_ignores_locks
)
MUTATIONS = ALONE | TOGETHER
OF_SHARDS: dict[str, Callable[[], None]] = _all(
    with_a_line_before_its_member_is_complete,
    with_appends_side_by_side,
    without_a_look_for_members_of_its_name,
    with_a_hidden_file_that_serves_two_requests_at_a_time,
)
# Shown by kills at each system call of a server with one request after the other.
IN_ORDER = {
    function.__name__
    for function in (
        shown_before_it_is_complete,
        written_under_its_own_name,
        without_a_lock,
        without_a_look_for_rows_of_its_name,
        without_the_lock_of_the_server,
        with_a_line_before_its_member_is_complete,
        without_a_look_for_members_of_its_name,
    )
}
