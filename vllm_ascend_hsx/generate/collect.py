"""From a server's directory to the output directory: wait for a request's file, check it, give it its row's name."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.generate.errors import Fault, RequestError, RunError
from vllm_ascend_hsx.generate.examine import CheckError, Examined, Expected, ServerFacts, examine, facts_of
from vllm_ascend_hsx.generate.ledger import sync_directory
from vllm_ascend_hsx.generate.names import ServerFile, hidden_file, row_file, server_file
from vllm_ascend_hsx.protocol.files import describe, open_regular
from vllm_ascend_hsx.reader.load import HiddenStatesError, open_stored, remove, whole_file
from vllm_ascend_hsx.reader.shards import Place

# Of the output directory, so that every further row would fail in the same way.
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Collector:
    """Takes files to the output directory. Its methods block, and may be called from several threads.

    Args:
        output: the directory.
        token: of the run, for hidden names.
        timeout: seconds to wait for a file that the server still writes.
        validate: look at all data of a file.
        copy: copy files that cannot be renamed.
        durable: a file that is there survives a loss of power.
    """

    def __init__(
        self, output: Path, token: str, *, timeout: float, validate: bool = False, copy: bool = False, durable: bool = True
    ) -> None:
        self._output = output
        self._token = token
        self._timeout = timeout
        self._validate = validate
        self._copy = copy
        self._durable = durable
        self._directories: set[Path] = set()  # of servers, where their first files were
        self._foreign: set[Path] = set()  # of them, those on other filesystems

    def collect(self, path: Path, row: int, expected: Expected) -> Examined:
        """The file of a row's request becomes that of the row.

        Raises:
            RequestError: there is no file, or it is not what was asked for; it has been removed.
            RunError: the output directory cannot take it, nor any other.
        """
        try:
            examined = self._take(path, self._output / row_file(row), self._hidden(row_file(row)), expected)
        except TimeoutError as error:
            raise self._late(path) from error
        except HiddenStatesError as error:
            self._drop(path)
            raise RequestError(str(error), fault=Fault.ILL) from error
        except CheckError as error:
            self._drop(path)
            raise RequestError(f"{path}: {error}", fault=Fault.ILL) from error
        except FileNotFoundError as error:
            # Without a lock there is nothing to wait for: it may come yet.
            raise RequestError(f"{path}: {error.strerror}", fault=Fault.ILL, lost=True) from error
        except OSError as error:
            if error.errno in _HOPELESS:
                raise RunError(describe(f"{self._output} cannot take another file", error)) from error
            raise RequestError(describe(f"{path} cannot be taken", error), fault=Fault.ILL) from error
        self._tidy(path)
        return examined

    def try_out(self, path: Path) -> Examined:
        """Do with a server's first file all that has to be done with the others, and remove it.

        Raises:
            RequestError: there is no file yet.
            RunError: it cannot be read, is none of hidden states, or cannot be moved; the message names the remedy.
        """
        target, partial = self._hidden(path.name), self._hidden(path.name + ".copy")
        try:
            try:
                examined = self._take(path, target, partial, Expected(None, None, None))
            finally:
                target.unlink(missing_ok=True)
            remove(path)
            self._directories.add(path.parent)
            return examined
        except TimeoutError as error:
            raise self._late(path) from error
        except HiddenStatesError as error:
            self._drop(path)
            raise RequestError(str(error), fault=Fault.ILL) from error
        except CheckError as error:
            self._drop(path)
            raise RunError(f"{path}: {error}") from error
        except FileNotFoundError as error:
            remedy = "mount the server's directory, or, if it is called otherwise here, say so with --map-path SERVER=HERE"
            if path.parent.is_dir():
                raise RequestError(f"the server's answer names {path}, which is not there; {remedy}", fault=Fault.ILL) from error
            raise RunError(f"the server's answer names {path}, and there is no such directory here; {remedy}") from error
        except OSError as error:
            self._drop(path)
            remedy = "; let this user write in both directories" if isinstance(error, PermissionError) else ""
            raise RunError(describe(f"{path} cannot be moved to {self._output}", error) + remedy) from error
        except RunError:
            self._drop(path)
            raise

    def check_place(self, path: Path, row: int | None) -> None:
        """Whether a path that an answer names may be taken, and removed: a server, or what stands before it, may say anything.

        Args:
            path: as it is called here.
            row: whose answer it is; None for a trial's, whose directory becomes that of the rows.

        Raises:
            RequestError: it is not that of the row's own request.
        """
        if server_file(path.name) != ServerFile(path.name, self._token, row):
            problem = "it is not the file of this request; does a proxy mix up answers?"
        elif row is not None and path.parent not in self._directories:
            problem = "it is in another directory than the trial request's; let each --endpoint be one server, with one directory"
        else:
            return
        raise RequestError(f"{path}, which the answer names, is left alone: {problem}", fault=Fault.ILL, lost=True)

    def examine(self, row: int, expected: Expected) -> Examined:
        """Check a row's own file, wholly.

        Raises:
            CheckError: it is not what it has to be.
            OSError: it cannot be read.
        """
        place = self._open_own(self._output / row_file(row))
        try:
            return examine(place, expected, validate=True)
        finally:
            os.close(place.fd)

    def facts(self, row: int) -> ServerFacts:
        """What a row's own file says of its server. Raises as `examine`."""
        place = self._open_own(self._output / row_file(row))
        try:
            return facts_of(place)
        finally:
            os.close(place.fd)

    def _open_own(self, path: Path) -> Place:
        return whole_file(open_regular(path))

    def _take(self, path: Path, target: Path, partial: Path, expected: Expected) -> Examined:
        place = open_stored(path, self._timeout)
        try:
            if place.offset:
                raise RunError(
                    f"the server stores rows in shards of {path.parent}, where each is one of many; let them stay there with --in-place "
                    "and --output naming that directory, or have the server make files (sink=file)"
                )
            if path.parent in self._foreign:
                examined = self._copy_file(place, target, partial, expected, self._validate)
            else:
                examined = examine(place, expected, validate=self._validate)
                if self._durable:
                    os.fdatasync(place.fd)
                if not self._rename(path, target):
                    self._copy_file(place, target, partial, expected, validate=False)
        finally:
            os.close(place.fd)
        if self._durable:
            sync_directory(self._output)
        return examined

    def _tidy(self, path: Path) -> None:
        """What a file leaves behind that was taken."""
        remove(path)

    def _rename(self, path: Path, target: Path) -> bool:
        """Whether it could be renamed; if not, it is to be copied."""
        try:
            os.rename(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if not self._copy:
                raise RunError(
                    f"{path.parent} and {self._output} are on different filesystems, so no file can be renamed from one to the other; "
                    "name an --output on the server's filesystem, or say with --copy that every file is to be copied"
                ) from error
            self._foreign.add(path.parent)
            return False
        return True

    def _copy_file(self, place: Place, target: Path, partial: Path, expected: Expected, validate: bool) -> Examined:
        copy = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, os.fstat(place.fd).st_mode & 0o777)
        try:
            try:
                examined = examine(place, expected, validate=validate, copy_to=copy)
                if self._durable:
                    os.fdatasync(copy)
            finally:
                os.close(copy)
            os.rename(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return examined

    def _hidden(self, name: str) -> Path:
        return self._output / hidden_file(name, self._token)

    @staticmethod
    def _drop(path: Path) -> None:
        """Remove what is of no use. What cannot be removed now is tried again, and told, at the end of the run."""
        with suppress(OSError):
            remove(path)

    def _late(self, path: Path) -> RequestError:
        return RequestError(f"the server has not finished {path} within {self._timeout:g} s", fault=Fault.ILL, lost=True)
