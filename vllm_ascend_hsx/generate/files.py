"""The rows' files in the output directory: their paths here and for servers, checks, removal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from vllm_ascend_hsx.generate.errors import (
    ForeignRowError,
    InputError,
    LeftoverError,
    RequestError,
    RunError,
    StoppedError,
)
from vllm_ascend_hsx.generate.ledger import Status, files_of_rows, have_other_weights, row_file, row_of_file, server_differences
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.protocol.files import NotAFileError, describe
from vllm_ascend_hsx.protocol.format import WEIGHTS
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.protocol.request_ids import belongs_to
from vllm_ascend_hsx.reader.check import Examination, Expected, check
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

SETTLE_S = 10.0  # for servers to finish or abort their writes
_STOP_S = 1.0  # until a thread that waits for a server notices that the run is to end


class RowLog(Protocol):
    """What a run logs its rows to, and asks about earlier ones.

    Attributes:
        server: model, layers and weights of the rows, the latter if known; None if nobody knows.
    """

    server: dict[str, Any] | None

    def is_logged(self, row: int) -> bool: ...
    def is_done(self, row: int) -> bool: ...
    def knows(self, row: int, file: str) -> bool: ...
    def append(self, row: int, status: Status, **facts: Any) -> None: ...
    def note_server(self, server: dict[str, Any]) -> None: ...
    def require_in_place(self) -> None: ...


class RowFiles:
    """The files of one run. Methods block and may be called from several threads.

    Args:
        options: of the run.
        ledger: has model, layers and weights of the rows, or receives them.

    Attributes:
        stopped: set when the run is to end: then nothing waits for a server any longer.
        leftovers: number of files of another server, of rows that were not done, removed.
    """

    def __init__(self, options: Options, ledger: RowLog) -> None:
        self._options = options
        self._output = options.output
        self._server_output = options.server_path(options.output)
        self._ledger = ledger
        self._mutex = threading.Lock()
        self.stopped = threading.Event()
        self.leftovers = 0

    def path(self, row: int) -> Path:
        """Return the path of a row's file here."""
        return self._output / row_file(row)

    def server_path(self, row: int) -> str:
        """Return the path of a row's file on the servers' machines."""
        return os.path.join(self._server_output, row_file(row))

    def check(self, row: int, expected: Expected, asked: Sequence[str]) -> Examination:
        """Check a row's file; wait for a server that is writing it.

        A wrong file is removed at once: the next run knows less about the tokens of a text, and
        may accept it.

        Args:
            row: of the dataset.
            expected: tokens, as far as they are known.
            asked: ids of this run's requests for the row, as their responses have them.

        Raises:
            RequestError: the row has no file, or not the right one.
            InputError: an older file has another model, other layers or weights than the rest; of
                other weights, only if the ledger names the row as done.
            RunError: the file cannot be read, so it may be valid.
            StoppedError: a server is still writing it, and the run is to end.
        """
        try:
            found = self._examine(row, expected, asked)
        except RequestError as error:
            if not error.lost:
                self._remove(row, error)
            raise
        if asked:
            with suppress(OSError):  # the row is right; `remove_companions` tries again, and tells
                remove(self.path(row), keep_data=True)
        return found

    def _examine(self, row: int, expected: Expected, asked: Sequence[str]) -> Examination:
        path = self.path(row)
        try:
            found = self._wait_and_check(path, expected)
        except FileNotFoundError as error:
            problem = f"the server wrote {self.server_path(row)}, and there is no {path}"
            remedy = "mount its storage directory here, and name it as the server does or with --map-path SERVER=HERE"
            raise RequestError(f"{problem}; {remedy}", lost=True, missing=True) from error
        except TimeoutError as error:
            seconds = self._options.request_timeout
            raise RequestError(f"the server has not finished {path} within {seconds:g} s", lost=True) from error
        except HiddenStatesError as error:
            raise RequestError(error.reason) from error
        except OSError as error:
            raise RunError(describe(f"{path} cannot be read", error)) from error
        # Known tokens tell rows apart. Of a text whose request was not answered only its id does,
        # and later the ledger: the file may be another dataset's, copied here, left behind by a
        # folder of shards that was renamed, or published by a server that was still writing it.
        request_id = found.metadata.get("request_id", "")
        is_ours = (
            None not in (expected.prompt, expected.output)
            or any(belongs_to(request_id, each) for each in asked)
            or self._ledger.knows(row, identity_of(found))
        )
        self._compare(row, found, bool(asked), is_ours and found.problem is None)
        if found.problem is not None:
            raise RequestError(found.problem)
        if not is_ours:
            raise RequestError("it is of a request that is not this row's: the ledger does not name this file")
        return found

    def _wait_and_check(self, path: Path, expected: Expected) -> Examination:
        """Check a file when its server has finished it. Raises like reader.check; StoppedError."""
        left = self._options.request_timeout
        deadline = time.monotonic() + left
        while True:
            try:
                return check(path, expected, data=self._options.validate, timeout=min(left, _STOP_S))
            except TimeoutError:
                if self.stopped.is_set():
                    raise StoppedError from None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise

    def _compare(self, row: int, found: Examination, is_new: bool, counts: bool) -> None:
        """Compare a file's model, layers and weights with the other rows'. Raises like `check`.

        If the file `counts`, log what nothing was known of.
        """
        server = _server_of(found)
        with self._mutex:
            if counts:
                self._note(server, found.path, is_done=not is_new and self._ledger.is_done(row))
            before = self._ledger.server
            if before is None:
                return
            changes = server_differences(before, server)
            if not changes:
                return
        if is_new:
            raise ForeignRowError(f"{self._output} holds rows of another server: {changes}")
        if have_other_weights(before, server) and not self._ledger.is_done(row):
            raise LeftoverError(f"it is of another server: {changes}")  # which wrote it after it was refused
        remedy = "nothing was changed: name the right --output, or remove what is wrong"
        raise InputError(f"{found.path} is a row of another server than the ledger says: {changes}; {remedy}")

    def _note(self, server: dict[str, Any], path: Path, is_done: bool) -> None:
        """Log what nothing was known of, and `server`, of the file `path`, tells.

        Unless the ledger names the file's row as done, the other rows know better: the run that
        wrote them may have died before it logged this, or have been of an earlier version.
        """
        before = self._ledger.server
        if before is not None and not (server.keys() - before.keys() and not server_differences(before, server)):
            return
        known = before if is_done else self._server_of_rows(path, before, server)
        if known is None or not server_differences(known, server):
            known = server | (known or {})
        if known != before:
            self._ledger.note_server(known)

    def _server_of_rows(self, new: Path, known: dict[str, Any] | None, server: dict[str, Any]) -> dict[str, Any] | None:
        """Return what is known, with what the other rows' files tell beyond it.

        Rows that the ledger names come first. The first readable file tells model and layers; if
        `server` tells its weights, the first file of these that does, too, tells the weights.
        """
        rows = [(not self._ledger.is_done(row_of_file(path.name) or 0), path) for path in files_of_rows(self._output)]
        for _, path in sorted(rows):
            if known is not None and (WEIGHTS in known or WEIGHTS not in server):
                break
            if self.stopped.is_set():
                raise StoppedError
            if path != new:
                with suppress(HiddenStatesError, TimeoutError, FileNotFoundError):
                    each = _server_of(check(path, data=False))
                    if known is None or not server_differences(known, each):
                        known = each
        return known

    def _remove(self, row: int, wrong: RequestError) -> None:
        """Remove a wrong file, once no server writes it; `wrong` says if that fails.

        Raises RunError if the output directory is another one now: the file is another run's.
        """
        self._ledger.require_in_place()
        try:
            with suppress(NotAFileError):  # of the lock
                wait_until_released(self._lock(row), SETTLE_S)
            remove(self.path(row))
        except OSError as error:
            wrong.reason += describe("; it cannot be removed", error)
        else:
            if isinstance(wrong, LeftoverError):  # they are counted, not told one by one
                wrong.missing = True
                self._count_leftover()

    def _count_leftover(self) -> None:
        with self._mutex:
            self.leftovers += 1

    def remove_leftovers(self, rows: Iterable[int]) -> None:
        """Remove files of another server that requests of this run have left behind.

        Args:
            rows: requested, and not done when the run was stopped. What they had before the
                request was not valid, whatever the ledger says.

        Raises:
            OSError: a file cannot be read or removed.
        """
        for row in rows:
            with suppress(HiddenStatesError, TimeoutError, FileNotFoundError):
                found = check(self.path(row), data=False)
                if self._ledger.server is not None and server_differences(self._ledger.server, _server_of(found)):
                    remove(self.path(row))
                    self._count_leftover()

    def remove_companions(self) -> list[Path]:
        """Remove locks and errors beside this run's rows, once servers have released them.

        Waits for SETTLE_S at most, over all rows.

        Returns:
            Files that servers are still writing.

        Raises:
            OSError: the directory cannot be read, or a file not be removed.
        """
        deadline = time.monotonic() + SETTLE_S
        listed = os.listdir(self._output) if self._options.block is None else self._existing_companions(self._options.block)
        names = [name for name in listed if name.endswith((LOCK_SUFFIX, ERROR_SUFFIX))]
        rows = {row_of_file(name.removesuffix(LOCK_SUFFIX).removesuffix(ERROR_SUFFIX)) for name in names}
        busy = []
        for row in sorted(row for row in rows if row is not None and self._options.is_ours(row)):
            try:
                wait_until_released(self._lock(row), max(0.0, deadline - time.monotonic()))
                remove(self.path(row), keep_data=True)
            except TimeoutError:
                busy.append(self.path(row))
        return busy

    def _existing_companions(self, rows: Iterable[int]) -> list[str]:
        """Return names of locks and errors. A directory of millions of files is not listed."""
        names = [row_file(row) + suffix for row in rows for suffix in (LOCK_SUFFIX, ERROR_SUFFIX)]
        return [name for name in names if os.path.lexists(self._output / name)]

    def _lock(self, row: int) -> Path:
        return self._output / f"{row_file(row)}{LOCK_SUFFIX}"


def identity_of(found: Examination) -> str:
    """Return what tells a file from all others: its checksum, or without one its request."""
    return found.metadata.get("checksum") or found.metadata.get("request_id", "")


def _server_of(found: Examination) -> dict[str, Any]:
    kind = {**found.kind._asdict(), "layer_ids": list(found.kind.layer_ids)}
    return {"model": found.metadata.get("model"), **kind, **({} if found.weights is None else {WEIGHTS: found.weights})}
