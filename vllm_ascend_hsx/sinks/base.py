"""The contract of a sink: it takes a request's rows in any order, and publishes all or none."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, Rows, TokenIds
from vllm_ascend_hsx.protocol.weights import UNKNOWN, Origin
from vllm_ascend_hsx.sinks.data_file import RowSource

FilePath: TypeAlias = "str | os.PathLike[str]"
REFUSED = "refused"  # a kind of failure: the request asks for something unsupported or in use
NAME_USED = "this name already has rows: remove the file first, or choose another name"
# The reason for every file that is incomplete when the server stops.
SERVER_STOPPED = "the server stopped before all rows were written"


@dataclass(eq=False)
class SinkError(Exception):
    """The rows of one request could not be stored. Other requests are not affected.

    Attributes:
        reason: one sentence for the user who sent the request.
        kind: kind of the failure for statistics, one word; None if an OSError caused it.
    """

    request_id: str
    path: FilePath
    reason: str
    kind: str | None = None

    def __str__(self) -> str:
        return f"request {self.request_id!r}, {self.path}: {self.reason}"


class SinkFile(ABC):
    """The rows of one request on their way to `path`.

    A file does not track its state. The caller (`connector/extraction.py`) guarantees:
    * The first write or copy runs alone. Later concurrent writes are for different positions.
      Several threads may write.
    * One call ends the file: `commit`, `fail` or `discard`.
    * No write is in flight when the file ends, except for `fail` with close=False: storage may hang
      in a write.
    * Each position of the tokens has been written when `commit` is called.

    Attributes:
        placeholders: rows of the images in the prompt, for the metadata. Set before the first
            write.
        origin: the weights that computed the rows, and whether the request was aborted, for the
            metadata. Set before `commit`.
        keeps_source: whether `commit` sets `source`. Set before `commit`.
        source: the published rows, open for requests that begin with the same tokens. None if the
            sink does not support this. The caller of `commit` must release it.
        stored_bytes: bytes of the published file, set by `commit`; 0 if the rows have no file.
    """

    request_id: str
    path: FilePath
    placeholders: Sequence[Placeholder] = ()
    origin: Origin = UNKNOWN
    keeps_source: bool = False
    source: RowSource | None = None
    stored_bytes: int = 0

    @abstractmethod
    def write(self, first: int, rows: Rows) -> None:
        """Store rows at their final position. Return when the operating system has them.

        Rows are copied only if they are quantised.

        Args:
            first: token position of the first row.
            rows: bytes of `count` rows [count, layers, hidden] in the model's dtype, C-contiguous,
                for positions [first, first + count).

        Raises:
            SinkError: if the rows could not be stored.
            ValueError: if `rows` is not contiguous or not whole rows, or `first` is negative.
        """

    def copy(self, source: RowSource, num_rows: int) -> None:
        """Copy the rows of positions [0, num_rows) from another request's file, like `write`.

        Only for sinks whose files have a `source`.

        Raises:
            SinkError: if the rows could not be copied.
        """
        raise NotImplementedError

    @abstractmethod
    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Publish the file, and free its descriptors and memory.

        Rows at positions after the last token are dropped.

        Args:
            token_ids: int64 [tokens], prompt first, then output.
            num_prompt_tokens: number of prompt tokens among them.

        Raises:
            SinkError: if the file could not be published, or another writer has published rows
                under the name. These rows stay. The file has ended.
        """

    @abstractmethod
    def fail(self, reason: str, close: bool = True) -> None:
        """Publish the reason in place of the data, unless another request has rows there.

        Logs errors and raises none.

        Args:
            reason: one sentence for the user who sent the request.
            close: free descriptors and memory. If False, writes are in flight, and the caller calls
                `close` after they return.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove all traces of an aborted request, and free its descriptors and memory.

        Logs errors and raises none.
        """

    @abstractmethod
    def close(self) -> None:
        """Free descriptors and memory after `fail` with close=False. Logs errors, raises none."""


class Sink(ABC):
    """Stores the rows of requests.

    Rows are never replaced. A name may be used again after the rows were removed.

    One thread calls `open` and `close`; any thread may call the methods of the files.

    Attributes:
        writes_side_by_side: whether concurrent writes to one file are faster than one at a time.
    """

    writes_side_by_side: bool

    @abstractmethod
    def open(
        self,
        request_id: str,
        path: FilePath,
        expected_tokens: int = 0,
        arrived_ns: int | None = None,
        adapter: Adapter = NO_ADAPTER,
    ) -> SinkFile:
        """Announce a request: readers of `path` now wait. Cheap, because it moves no data.

        Removes the failure reason of an earlier request at the path.

        Args:
            request_id: the request.
            path: path of the future file.
            expected_tokens: number of rows, unless rows of generated tokens follow or the request
                is aborted; the first write reserves their space.
            arrived_ns: time at which the API server received the request, in nanoseconds since the
                epoch, for the metadata; None if unknown.
            adapter: the adapter that computes the rows, for the metadata.

        Raises:
            SinkError: if the path cannot be used, is being written, or has rows (`NAME_USED`).
        """

    @abstractmethod
    def close(self) -> None:
        """Fail all files that have not ended, with `SERVER_STOPPED`, and free everything.

        No call of a file may be in flight, except writes of a failed file: `SinkFile.close` frees
        the resources of these writes. A second call does nothing.
        """

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
