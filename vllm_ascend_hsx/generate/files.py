"""The rows' files in the output directory: their paths here and for servers, checks, removal."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.errors import (
    MAY_HAVE_FILE,
    Failure,
    InputError,
    RequestError,
    RunError,
    StoppedError,
)
from vllm_ascend_hsx.generate.ledger import Ledger, differences, row_file, row_of_file
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.protocol.files import NotAFileError, describe
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.protocol.weights import WEIGHTS
from vllm_ascend_hsx.reader.check import Examination, Expected, check
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

SETTLE_S = 10.0  # for servers to finish or abort their writes
_STOP_S = 1.0  # until a thread that waits for a server notices that the run is to end
# The id of a request of `client`, within the id that vLLM makes of it (protocol/request_ids.py).
_REQUEST_ID = re.compile(r"(?:[0-9]+_)?(?:chatcmpl|cmpl)-([0-9a-f]{32}-[0-9a-f]{12})(?:-.*)?")
_MOVED = re.compile(r"moved_([0-9]+)" + re.escape(DATA_SUFFIX))


class RowFiles:
    """The files of one run. Methods block and may be called from several threads.

    Args:
        options: of the run.
        ledger: has model, layers and weights of the rows, or receives them.

    Attributes:
        stopped: set when the run is to end: then no method waits for a server any longer.
    """

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self._options = options
        self._output = options.output
        self._server_output = options.server_path(options.output)
        self._ledger = ledger
        self._mutex = threading.Lock()
        self.stopped = threading.Event()

    def path(self, row: int) -> Path:
        """Return the path of a row's file here."""
        return self._output / row_file(row)

    def server_path(self, row: int) -> str:
        """Return the path of a row's file on the servers' machines."""
        return os.path.join(self._server_output, row_file(row))

    def check(self, row: int, identity: str, expected: Expected, is_asked: bool) -> Examination:
        """Check a row's file; wait for a server that is writing it. Remove a wrong one at once.

        Args:
            row: of the dataset.
            identity: of the row.
            expected: tokens, as far as they are known.
            is_asked: True if this run has asked for the row.

        Raises:
            RequestError: the row has no file, or not the right one.
            InputError: the file of a row that is done has another model, other layers or weights
                than the rest.
            RunError: the file cannot be read, so it may be valid.
            StoppedError: a server is still writing it, and the run is to end.
        """
        try:
            found = self._examine(row, identity, expected, is_asked)
        except RequestError as error:
            if error.failure not in MAY_HAVE_FILE:
                self.discard(row, error)
            raise
        if is_asked:
            with suppress(
                OSError
            ):  # the row is right; `remove_companions` tries again, and reports it
                remove(self.path(row), keep_data=True)
        return found

    def _examine(self, row: int, identity: str, expected: Expected, is_asked: bool) -> Examination:
        path = self.path(row)
        try:
            found = self._wait_and_check(path, expected)
        except FileNotFoundError as error:
            problem = f"the server wrote {self.server_path(row)}, and there is no {path}"
            remedy = (
                "mount its storage directory here, and name it as the server does or with "
                "--map-path SERVER=HERE"
            )
            raise RequestError(f"{problem}; {remedy}", Failure.ABSENT) from error
        except TimeoutError as error:
            seconds = self._options.request_timeout
            raise RequestError(
                f"the server has not finished {path} within {seconds:g} s", Failure.UNCLEAR
            ) from error
        except HiddenStatesError as error:
            raise RequestError(error.reason) from error
        except OSError as error:
            raise RunError(describe(f"{path} cannot be read", error)) from error
        if identity_in(found.metadata) != identity:
            raise RequestError("it is of another row, or of another request")
        if found.problem is not None:
            raise RequestError(found.problem)
        self._compare_server(row, identity, found, is_asked)
        return found

    def _wait_and_check(self, path: Path, expected: Expected) -> Examination:
        """Check a file when its server has finished it. Raises like reader.check; StoppedError."""
        deadline = time.monotonic() + self._options.request_timeout
        while True:
            try:
                return check(
                    path,
                    expected,
                    data=self._options.validate,
                    timeout=min(max(0.0, deadline - time.monotonic()), _STOP_S),
                )
            except TimeoutError:
                if self.stopped.is_set():
                    raise StoppedError from None
                if time.monotonic() >= deadline:
                    raise

    def _compare_server(self, row: int, identity: str, found: Examination, is_asked: bool) -> None:
        """Compare a file's model, layers and weights with those of the first row."""
        server = server_of(found)
        with self._mutex:
            if self._ledger.server is None:
                self._ledger.note_server(server)
            changes = differences(self._ledger.server, server)
        if not changes:
            return
        if is_asked:
            raise RequestError(
                f"{self._output} holds rows of another server: {changes}", Failure.FOREIGN
            )
        if not self._ledger.is_done(row, identity):  # a server finished it after it was refused
            raise RequestError(f"it is of another server: {changes}")
        remedy = "nothing was changed: name the right --output, or remove the wrong files"
        raise InputError(
            f"{found.path} is a row of another server than the ledger says: {changes}; {remedy}"
        )

    def discard(self, row: int, wrong: RequestError) -> None:
        """Remove a wrong file, once no server writes it: a server would refuse its name.

        `wrong` says if that fails. Raises RunError if the output directory is another one now,
        because the file is another run's.
        """
        self._ledger.require_in_place()
        try:
            with suppress(NotAFileError):  # of the lock
                wait_until_released(self._lock(row), SETTLE_S)
            remove(self.path(row))
        except OSError as error:
            wrong.reason += describe("; it cannot be removed", error)

    def set_aside(self, places: Mapping[int, int]) -> None:
        """Rename the files of rows that have another place in the dataset now, on their way there.

        Call `put_in_place` once the ledger no longer names the rows at their old places. A run that
        is killed before, in or between the two loses no row: the next one does the rest.

        Args:
            places: the new place of each row. Members of shards are left where they are.

        Raises:
            OSError: a file cannot be renamed.
        """
        for old, new in places.items():
            with suppress(FileNotFoundError):
                os.rename(self.path(old), self._output / f"moved_{new}{DATA_SUFFIX}")

    def put_in_place(self) -> int:
        """Give the files that were set aside their new names; return how many. Raises OSError."""
        aside = [match for name in os.listdir(self._output) if (match := _MOVED.fullmatch(name))]
        for match in aside:
            os.rename(self._output / match[0], self.path(int(match[1])))
        return len(aside)

    def remove_foreign(self, rows: Iterable[int]) -> None:
        """Remove files of another server that requests of this run have left behind.

        Args:
            rows: requested, and not done when the run was stopped.

        Raises:
            OSError: a file cannot be read or removed.
        """
        for row in rows:
            with suppress(HiddenStatesError, TimeoutError, FileNotFoundError):
                if (
                    self._ledger.server is not None
                    and server_of(check(self.path(row), data=False)) != self._ledger.server
                ):
                    remove(self.path(row))

    def remove_companions(self) -> list[Path]:
        """Remove locks and errors beside this run's rows, once servers have released them.

        Waits for SETTLE_S at most, over all rows.

        Returns:
            Files that servers are still writing.

        Raises:
            OSError: the directory cannot be read, or a file not be removed.
        """
        deadline = time.monotonic() + SETTLE_S
        names = [
            name for name in os.listdir(self._output) if name.endswith((LOCK_SUFFIX, ERROR_SUFFIX))
        ]
        rows = {
            row_of_file(name.removesuffix(LOCK_SUFFIX).removesuffix(ERROR_SUFFIX)) for name in names
        }
        busy = []
        for row in sorted(row for row in rows if row is not None and self._options.is_ours(row)):
            try:
                wait_until_released(self._lock(row), max(0.0, deadline - time.monotonic()))
                remove(self.path(row), keep_data=True)
            except TimeoutError:
                busy.append(self.path(row))
        return busy

    def _lock(self, row: int) -> Path:
        return self._output / f"{row_file(row)}{LOCK_SUFFIX}"


def identity_in(metadata: Mapping[str, str]) -> str:
    """Return the identity of the row that a file is of; "" if it is of no row of `hsx generate`."""
    return request_in(metadata)[:32]


def request_in(metadata: Mapping[str, str]) -> str:
    """Return the id of the request that a file is of, as `client` sent it; "" if it sent none."""
    match = _REQUEST_ID.fullmatch(metadata.get("request_id", ""))
    return match[1] if match else ""


def server_of(found: Examination) -> dict[str, Any]:
    """Return model, layers and weights of a file, as JSON's types. Weights may be unknown: None."""
    kind = {**found.kind._asdict(), "layer_ids": list(found.kind.layer_ids)}
    return {"model": found.metadata.get("model"), **kind, WEIGHTS: found.weights}
