"""A sink that appends requests to large tar files, each with an index, for millions of requests."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions
from vllm_ascend_hsx.sinks.directory import Session
from vllm_ascend_hsx.sinks.file import DirectorySink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard_file import SessionShards

_DEFAULTS = FileOptions()
_SPARES = 16  # per session
_LARGEST_SPARE = 64 << 20  # bytes


class ShardSink(DirectorySink):
    """Publishes requests as members of shards: each complete hidden file is appended.

    Arguments and errors are the same as in DirectorySink. `shard_bytes` is the size at which a
    shard is sealed and the next one begins. `options.io` has no effect: rows go through the page
    cache.
    """

    keeps_locks = False

    def __init__(
        self,
        directory: Path,
        row_format: RowFormat,
        options: FileOptions = _DEFAULTS,
        memory: memoryview | None = None,
        *,
        shard_bytes: int,
        random_ids: bool = True,
    ) -> None:
        self._shard_bytes = shard_bytes
        self._shards: dict[Session, SessionShards] = {}
        # With direct I/O, rows would be written to disk, read back, and written again.
        super().__init__(
            directory, row_format, replace(options, io="buffered"), memory, random_ids=random_ids
        )
        self._file_options = replace(self.options, durability="none")  # the shard is synced instead

    def make_data(self, file: RequestFile) -> DataFile:
        session, hidden = file.session, self._shards[file.session].hidden_file()
        return DataFile(
            session.workspace,
            hidden,
            -1,
            file.layout,
            self._file_options,
            file.expected_tokens,
            session.filesystem,
        )

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        shards = self._shards[file.session]
        is_spare = data.size <= _LARGEST_SPARE and len(shards.spares) < _SPARES
        if not is_spare:
            data.withdraw()  # the descriptor keeps the bytes; nothing may fail after the index line
        with shards.current(file.relative) as shard:
            shard.append(data, file.relative, tokens, file.request_id)
            with suppress(OSError):  # no descriptors left: later requests compute these rows again
                file.source = shard.source(data) if file.keeps_source else None
        if is_spare:
            shards.spares.append(data.detach())

    def end_session(self, session: Session) -> None:
        self._shards.pop(session).close(
            session.workspace if session.has_workspace else self._session.workspace
        )

    def _new_session(self) -> Session:
        session = super()._new_session()
        self._shards[session] = SessionShards(session, self._shard_bytes, self.options.durable)
        return session
