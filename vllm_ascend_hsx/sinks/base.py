"""The contract of a sink: a place that takes the rows of a request, in any order, and publishes all of them or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from vllm_ascend_hsx.protocol.rows import Rows, TokenIds

# The reason in place of every file that is not complete when its server stops.
SERVER_STOPPED = "the server stopped before all rows were written"


class SinkError(Exception):
    """The rows of one request could not be stored; other requests are not affected.

    Attributes:
        request_id: the request.
        path: the file it was to become.
        reason: one sentence for the request's owner.
        kind: kind of the failure for statistics, one word; None if an OSError caused it.
    """

    def __init__(self, request_id: str, path: Path, reason: str, kind: str | None = None) -> None:
        super().__init__(request_id, path, reason, kind)
        self.request_id = request_id
        self.path = path
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"request {self.request_id!r}, {self.path}: {self.reason}"


class SinkFile(ABC):
    """The rows of one request on their way to `path`.

    A file does as it is told and keeps no account of its life. The caller guarantees
    (`connector/extraction.py`):
    * Writes that are in flight at the same time are of different positions. Several threads may write.
    * One call ends the file: `commit`, `fail` or `discard`.
    * No write is in flight when the file ends, unless `fail` is told so: storage may hang in one.
    * Each position of the tokens has been written when `commit` is called.
    """

    request_id: str
    path: Path

    @abstractmethod
    def write(self, first: int, rows: Rows) -> None:
        """Store rows at their final place. Blocks until the operating system has them; copies nothing that is not quantised.

        Args:
            first: token position of the first row.
            rows: the bytes of `count` rows in the model's dtype, C-contiguous, [count, layers, hidden]; stored for positions
                [first, first + count).

        Raises:
            SinkError: they could not be stored, or `fail` has come first.
            ValueError: not contiguous, not a whole number of rows, or a negative position.
        """

    @abstractmethod
    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Publish the file, and free descriptors and memory.

        Rows at positions beyond the tokens are dropped.

        Args:
            token_ids: int64 [tokens], prompt first, then output.
            num_prompt_tokens: how many of them are the prompt's.

        Raises:
            SinkError: it could not be published. The reason is in its place, and the file has ended.
        """

    @abstractmethod
    def fail(self, reason: str, close: bool = True) -> None:
        """Publish the reason in place of the data. Raises nothing; logs what goes wrong.

        Args:
            reason: one sentence for the request's owner.
            close: free descriptors and memory. False: writes are in flight, and the caller calls `close`
                once they have returned.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove every trace, and free descriptors and memory: the request was aborted.

        Raises nothing; logs what goes wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """Free descriptors and memory that `fail` left open. Raises nothing; logs what goes wrong."""


class Sink(ABC):
    """Takes the rows of requests. `open` and `close` belong to one thread; the files' methods to any.

    Attributes:
        writes_side_by_side: whether it is of use to write several parts of one file at the same time.
    """

    writes_side_by_side: bool

    @abstractmethod
    def open(self, request_id: str, path: Path, expected_tokens: int = 0, may_grow: bool = True) -> SinkFile:
        """Announce a request. Cheap: no data is moved. Readers of `path` wait from now on.

        Args:
            request_id: the request.
            path: the file that is to appear.
            expected_tokens: rows that it will have at least; room is made for them with the first ones.
            may_grow: there may be more; otherwise room for the expected ones is all that is needed.

        Raises:
            SinkError: the path cannot be used, or somebody is writing it now.
        """

    @abstractmethod
    def close(self) -> None:
        """Open no more files, fail those that have not ended with `SERVER_STOPPED`, free everything.

        No call of a file may be in flight, except writes of one that has failed: what these need is
        freed by its `close`. A second call does nothing.
        """

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
