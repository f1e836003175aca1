"""The rows' files in the output directory: local and server paths, checks, renaming, removal."""

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

SETTLE_S = 10.0  # time for servers to commit or abort their files
_STOP_S = 1.0  # interval at which a waiting thread looks at `stopped`
# The request id that `client` sent, in the id that vLLM made of it (protocol/request_ids.py).
_REQUEST_ID = re.compile(r"(?:[0-9]+_)?(?:chatcmpl|cmpl)-([0-9a-f]{32}-[0-9a-f]{12})(?:-.*)?")
_MOVED = re.compile(r"moved_([0-9]+)" + re.escape(DATA_SUFFIX))


class RowFiles:
    """The files of one run. Methods block and may be called from several threads.

    Args:
        options: options of the run.
        ledger: ledger of the run. It has, or receives, model, layers and weights of the rows.

    Attributes:
        stopped: set when the run ends. Then methods stop waiting for servers.
    """

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self._options = options
        self._output = options.output
        self._server_output = options.server_path(options.output)
        self._ledger = ledger
        self._mutex = threading.Lock()
        self.stopped = threading.Event()

    def path(self, row: int) -> Path:
        """Return the path of a row's file on this machine."""
        return self._output / row_file(row)

    def server_path(self, row: int) -> str:
        """Return the path of a row's file on the servers' machines."""
        return os.path.join(self._server_output, row_file(row))

    def check(self, row: int, identity: str, expected: Expected, is_asked: bool) -> Examination:
        """Check a row's file, and remove a wrong file. Wait for a server that is writing it.

        Args:
            row: index of the row.
            identity: identity of the row.
            expected: known tokens of the row.
            is_asked: True if this run has requested the row.

        Raises:
            RequestError: the row has no file, or a wrong one.
            InputError: the file of a finished row has another model, other layers or weights than
                the other files.
            RunError: the file cannot be read, so it may be valid.
            StoppedError: a server is still writing the file, and the run is ending.
        """
        try:
            found = self._examine(row, identity, expected, is_asked)
        except RequestError as error:
            if error.failure not in MAY_HAVE_FILE:
                self.discard(row, error)
            raise
        if is_asked:
            # The row is valid. `remove_companions` tries again and reports errors.
            with suppress(OSError):
                remove(self.path(row), keep_data=True)
        return found

    def _examine(self, row: int, identity: str, expected: Expected, is_asked: bool) -> Examination:
        path = self.path(row)
        try:
            found = self._wait_and_check(path, expected)
        except FileNotFoundError as error:
            problem = f"the server wrote {self.server_path(row)}, but {path} does not exist"
            remedy = (
                "mount the server's storage directory here, at the same path or with "
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
            raise RequestError("the file belongs to another row or another request")
        if found.problem is not None:
            raise RequestError(found.problem)
        self._compare_server(row, identity, found, is_asked)
        return found

    def _wait_and_check(self, path: Path, expected: Expected) -> Examination:
        """Wait for the server, then check the file. Raises StoppedError, and like reader.check."""
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
        if not self._ledger.is_done(row, identity):  # a server finished it after the refusal
            raise RequestError(f"the file is from another server: {changes}")
        remedy = "nothing was changed; give the right --output, or remove the wrong files"
        raise InputError(
            f"{found.path} is from another server than the ledger records: {changes}; {remedy}"
        )

    def discard(self, row: int, wrong: RequestError) -> None:
        """Remove a wrong file once no server writes it, because servers refuse existing names.

        A failure is added to the reason of `wrong`. Raises RunError if the output directory was
        replaced, because the file belongs to another run then.
        """
        self._ledger.require_in_place()
        try:
            with suppress(NotAFileError):  # the lock's name may be something else
                wait_until_released(self._lock(row), SETTLE_S)
            remove(self.path(row))
        except OSError as error:
            wrong.reason += describe("; the file cannot be removed", error)

    def set_aside(self, places: Mapping[int, int]) -> None:
        """Give temporary names to the files of rows that have moved in the dataset.

        Call `put_in_place` once the ledger no longer has the rows at the old indices. A run may be
        killed at any point: the next run continues, and no row is lost.

        Args:
            places: new index of each moved row. Members of shards are not renamed.

        Raises:
            OSError: a file cannot be renamed.
        """
        for old, new in places.items():
            with suppress(FileNotFoundError):
                os.rename(self.path(old), self._output / f"moved_{new}{DATA_SUFFIX}")

    def put_in_place(self) -> int:
        """Rename the files that were set aside, and return their number. Raises OSError."""
        aside = [match for name in os.listdir(self._output) if (match := _MOVED.fullmatch(name))]
        for match in aside:
            os.rename(self._output / match[0], self.path(int(match[1])))
        return len(aside)

    def remove_foreign(self, rows: Iterable[int]) -> None:
        """Remove files of another server that this run has requested.

        Args:
            rows: requested rows that were not done when the run was stopped.

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
        """Remove locks and error files of this run's rows, once servers have released them.

        Wait for SETTLE_S at most in total.

        Returns:
            Files that servers are still writing.

        Raises:
            OSError: the directory cannot be read, or a file cannot be removed.
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
    """Return the identity of a file's row; "" if the file is not from `hsx generate`."""
    return request_in(metadata)[:32]


def request_in(metadata: Mapping[str, str]) -> str:
    """Return the id of a file's request as `client` sent it; "" if another client sent it."""
    match = _REQUEST_ID.fullmatch(metadata.get("request_id", ""))
    return match[1] if match else ""


def server_of(found: Examination) -> dict[str, Any]:
    """Return model, layers and weights of a file as JSON types. Unknown weights are None."""
    kind = {**found.kind._asdict(), "layer_ids": list(found.kind.layer_ids)}
    return {"model": found.metadata.get("model"), **kind, WEIGHTS: found.weights}
