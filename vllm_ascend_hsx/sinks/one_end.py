"""What every sink's file has in common: rows come from several threads, and exactly one of commit, fail and discard ends it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import numpy as np

from vllm_ascend_hsx.protocol.rows import RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.base import SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import as_bytes
from vllm_ascend_hsx.sinks.encoder import encoder_for
from vllm_ascend_hsx.sinks.spans import SpanSet


class State(Enum):
    """Of a file, in words for its errors."""

    OPEN = "open"
    ENDING = "being ended"
    COMMITTED = "committed"
    FAILED = "failed"
    DISCARDED = "discarded"


class OneEndFile(SinkFile):
    """A file whose ends are decided here, and done by the methods that are left open.

    Args:
        request_id, path: of the request.
        row_format: what a row looks like.
    """

    def __init__(self, request_id: str, path: Path, row_format: RowFormat) -> None:
        self.request_id = request_id
        self.path = path
        self._row_bytes = row_format.row_bytes
        self._encoder = encoder_for(row_format)
        self._condition = threading.Condition()  # guards everything below
        self._state = State.OPEN
        self._writers = 0
        self._written = SpanSet()
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether nobody has begun to end it."""
        return self._state is State.OPEN

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        if token_ids.dtype != np.int64 or token_ids.ndim != 1:
            raise ValueError(f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, not int64 [tokens]")
        if not 0 <= num_prompt_tokens <= len(token_ids):
            raise ValueError(f"num_prompt_tokens={num_prompt_tokens} is not in [0, {len(token_ids)}]")
        if not self._claim_end():
            raise self._error(f"it cannot be committed, {self._how_it_ended()}")
        try:
            self._publish(token_ids, num_prompt_tokens)
        except SinkError as error:
            self._end_failed(error.reason)
            raise
        except OSError as error:
            reason = self._why_not_published(error)
            self._end_failed(reason)
            raise self._error(reason) from error
        except BaseException as error:
            self._end_failed(f"the file could not be published: {error!r}")
            raise
        self._end(State.COMMITTED)

    def fail(self, reason: str) -> None:
        if self._claim_end():
            self._end_failed(reason)

    def discard(self) -> None:
        if self._claim_end():
            try:
                self._drop_rows()
            finally:
                self._end(State.DISCARDED)

    # What a sink does

    @abstractmethod
    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Have readers see all rows. Raises SinkError or OSError: they do not, or will not for long."""

    @abstractmethod
    def _why_not_published(self, error: OSError) -> str:
        """A sentence for the request's owner."""

    @abstractmethod
    def _publish_reason(self, reason: str) -> None:
        """Have readers see why there are no rows; what goes wrong is logged."""

    @abstractmethod
    def _drop_rows(self) -> None:
        """Give back what rows have taken; writes in flight, which must not be waited for, do their part in the end."""

    @abstractmethod
    def _end(self, state: State) -> None:
        """What every end has in common, `_state` included; nothing can change the outcome any more, so problems are logged."""

    # What they share

    def _end_failed(self, reason: str) -> None:
        self._failure = reason
        try:
            self._drop_rows()  # first: others, or the reason itself, may need the space
            self._publish_reason(reason)
        finally:
            self._end(State.FAILED)

    def _rows(self, first: int, rows: Rows) -> tuple[memoryview, int]:
        """The bytes of rows that somebody wants to write at a position, and how many they are. Raises ValueError: they are none."""
        data = as_bytes(rows)
        count, rest = divmod(data.nbytes, self._row_bytes)
        if rest or first < 0:
            raise ValueError(f"{data.nbytes} bytes at position {first} are not rows of {self._row_bytes} bytes")
        return data, count

    def _claim_end(self) -> bool:
        """Whether the caller is the one who ends the file; if not, it has ended when this returns."""
        with self._condition:
            if self._state is State.OPEN:
                self._state = State.ENDING
                return True
            self._condition.wait_for(lambda: self._state is not State.ENDING)
            return False

    def _wait_for_writers(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._writers == 0)

    def _require_open(self) -> None:
        """Raises SinkError: no rows can be added any more."""
        if self._state is not State.OPEN:
            raise self._error(f"no rows can be added, {self._how_it_ended()}")

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)

    def _how_it_ended(self) -> str:
        because = f" ({self._failure})" if self._failure else ""
        return f"the file is {self._state.value} already{because}"


def fail_all(files: Iterable[OneEndFile], reason: str) -> None:
    """Fail the files that have not ended. One that is being published may take long, and the others are not to wait for it."""
    for file in sorted(files, key=lambda each: not each.is_open):
        file.fail(reason)
