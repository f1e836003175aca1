"""What servers that died have left in a directory: found and removed by the next one, and never anything of a server that lives.

* A workspace whose lock nobody holds is an orphan, and so are the files in it.
* Shards with its token that are not sealed are sealed.
* A lock file that nobody holds, and that has neither data nor error beside it, is an orphan: of a server
  that died, or of a consumer that has taken the data away.
Whatever is decided by a lock is done while that lock is held, for the next server may want the same name at the same instant, and so may
another one that cleans up. Data, errors, and the locks beside them belong to the consumers and stay.
"""

from __future__ import annotations

import errno
import logging
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

import numpy as np

from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX, token_of_workspace, workspace_name
from vllm_ascend_hsx.protocol.shard_names import TAR
from vllm_ascend_hsx.sinks.shard_recovery import recover_shard, unsealed_shards
from vllm_ascend_hsx.sinks.storage import open_folder
from vllm_ascend_hsx.sinks.workspace import Workspace

logger = logging.getLogger(__name__)

Done: TypeAlias = Literal["removed", "sealed"]

_DATA_LOCK = DATA_SUFFIX + LOCK_SUFFIX
_DATA_ERROR = DATA_SUFFIX + ERROR_SUFFIX


def remove_orphans(dir_fd: int, directory: str) -> None:
    """Remove what dead servers have left in a directory. Raises nothing; logs what was done and what could not be.

    A directory without orphans costs one pass over its names, some two microseconds and 40 bytes for each.

    Args:
        dir_fd: the directory.
        directory: its path, for the log.
    """
    cleaning = Cleaning(dir_fd)
    with cleaning.noting("could not look for what dead servers left"):
        cleaning.run()
    done = cleaning.words("sealed {}", "removed {}")
    if cleaning.servers:
        # vLLM's logging shows no line of ours below a warning.
        which = "a server" if cleaning.servers == 1 else f"{cleaning.servers} servers"
        logger.warning("%s: after %s that died: %s", directory, which, done or "nothing was left")
    elif done:
        logger.info("%s: %s", directory, done)
    if cleaning.problems:
        logger.warning("%s: %s (%d problems in all)", directory, cleaning.first_problem, cleaning.problems)


def _count(number: int, what: str, rest: str = "") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}{rest}"


class Cleaning:
    """A pass over a directory's names, and a second one if there are orphans.

    Args:
        dir_fd: the directory.
        dry_run: change nothing, and count what would be changed.
        tell: called with what is done, and the path below the directory of what it is done to: a file, or the tar file of a shard.

    Attributes:
        servers: how many had died.
        hidden, locks, errors: how many were removed. shards, requests: how many were sealed, and the requests in them.
        problems, first_problem: what went wrong.
    """

    def __init__(self, dir_fd: int, *, dry_run: bool = False, tell: Callable[[Done, str], None] = lambda done, path: None) -> None:
        self._dir_fd = dir_fd
        self._dry_run = dry_run
        self._tell = tell
        self._cleaned: set[str] = set()
        self.servers = self.hidden = self.locks = self.errors = self.shards = self.requests = self.problems = 0
        self.first_problem = ""

    def words(self, sealed: str, removed: str) -> str:
        """What was done, in words; empty: nothing.

        Args:
            sealed, removed: sentences with {} for what was.
        """
        gone = [_count(self.hidden, "hidden file")] if self.hidden else []
        gone += [_count(self.locks, "lock", " without data")] if self.locks else []
        gone += [_count(self.errors, "error")] if self.errors else []
        requests = "" if self._dry_run else f" with {_count(self.requests, 'request')}"  # which sealing counts
        parts = [sealed.format(_count(self.shards, "shard", requests))] if self.shards else []
        return ", ".join(parts + ([removed.format(", ".join(gone))] if gone else []))

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.first_problem = self.first_problem or describe(what, error)
            self.problems += 1

    def run(self) -> None:
        """Remove what dead servers have left, and locks without data in the directory itself. Raises OSError: it cannot be read."""
        for token in self._remove_locks(self._dir_fd, ""):
            with self.noting(f"could not clean {workspace_name(token)!r}"):
                workspace = Workspace.adopt(self._dir_fd, token, make_lock=not self._dry_run)
                if workspace is not None:
                    self.servers += 1
                    self._clean_workspace(workspace)

    def remove_locks(self, folder: str) -> None:
        """Remove the locks without data in a folder below the directory, unless that has been done."""
        if folder not in self._cleaned:
            self._cleaned.add(folder)
            with self.noting(f"could not clean {folder!r}"):
                dir_fd = open_folder(self._dir_fd, folder)
                if dir_fd >= 0:
                    try:
                        self._remove_locks(dir_fd, folder)
                    finally:
                        os.close(dir_fd)

    def remove_errors(self, folder: str, before: float) -> None:
        """Remove the errors that were written before a time, and their locks, unless somebody holds these.

        Args:
            folder: below the directory; "" for the directory itself.
            before: seconds since the epoch.
        """
        with self.noting(f"could not clean {folder!r}"):
            dir_fd = open_folder(self._dir_fd, folder) if folder else os.dup(self._dir_fd)
            if dir_fd >= 0:
                try:
                    for name in _errors(dir_fd):
                        # Another one that cleans up may be faster.
                        with self.noting(f"could not remove {name!r}"), suppress(FileNotFoundError):
                            self._remove_error(dir_fd, folder, name, before)
                finally:
                    os.close(dir_fd)

    def _clean_workspace(self, workspace: Workspace) -> None:
        """Remove an orphan after all else that its server has left; it stays if something does."""
        problems = self.problems
        end = workspace.leave
        try:
            for stem in unsealed_shards(self._dir_fd, workspace.token):
                with self.noting(f"could not seal {stem}"):
                    if not self._dry_run:
                        self.requests += recover_shard(self._dir_fd, workspace.fd, stem)
                    self.shards += 1
                    self._tell("sealed", stem + TAR)
            for folder in workspace.folders():
                self._cleaned.discard(folder)  # as it was when another server's was cleaned
                self.remove_locks(folder)
            files = workspace.files()
            self.hidden += len(files)
            for name in files:
                self._tell("removed", os.path.join(workspace_name(workspace.token), name))
            if self.problems == problems and not self._dry_run:
                end = workspace.remove
        finally:
            end()

    def _remove_locks(self, dir_fd: int, folder: str) -> list[str]:
        """Remove the locks without data in an open folder. Returns the tokens of workspaces there."""
        tokens, lonely = _look(dir_fd)
        if lonely:
            with os.scandir(dir_fd) as entries:
                locks = [each.name for each in entries if each.name.endswith(_DATA_LOCK) and hash(_data_of(each.name)) in lonely]
            for name in locks:
                with self.noting(f"could not remove {name!r}"):
                    self._remove_lock(dir_fd, folder, name)
        return tokens

    def _remove_lock(self, dir_fd: int, folder: str, name: str) -> None:
        held = HeldLock.adopt(dir_fd, name)
        if held is None:
            return
        end = held.release
        try:
            data = name.removesuffix(LOCK_SUFFIX)
            # Again, for now nobody can publish anything: it may have been there for a moment only when its name was read.
            if not _exists(dir_fd, data) and not _exists(dir_fd, data + ERROR_SUFFIX):
                if not self._dry_run:
                    end = held.remove
                self.locks += 1
                self._tell("removed", os.path.join(folder, name))
        finally:
            end()

    def _remove_error(self, dir_fd: int, folder: str, name: str, before: float) -> None:
        if os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mtime >= before:
            return
        data = name.removesuffix(ERROR_SUFFIX)
        lock = data + LOCK_SUFFIX
        held = HeldLock.adopt(dir_fd, lock)
        if held is None and not _exists(dir_fd, lock) and not self._dry_run:  # a consumer has removed it
            with suppress(FileExistsError):
                held = HeldLock.create(dir_fd, lock, 0o600)
        if held is None and (_exists(dir_fd, lock) or not self._dry_run):  # a reader's, or another request's of this name
            return
        try:
            # Again, for now no request of this name can begin: one may have left another error meanwhile.
            if os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mtime < before:
                if not self._dry_run:
                    os.unlink(name, dir_fd=dir_fd)
                self.errors += 1
                self._tell("removed", os.path.join(folder, name))
        finally:
            if held is not None:
                (held.release if self._dry_run or _exists(dir_fd, data) or _exists(dir_fd, name) else held.remove)()


def _look(dir_fd: int) -> tuple[list[str], set[int]]:
    """The tokens of all workspaces, and the hash values of the data names of which there is a lock, but neither data nor an error."""
    tokens = []
    locked, decided = array("q"), array("q")
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                token = token_of_workspace(name)
                if token is not None:
                    tokens.append(token)
            elif name.endswith(DATA_SUFFIX):
                decided.append(hash(name))
            elif name.endswith(_DATA_LOCK):
                locked.append(hash(_data_of(name)))
            elif name.endswith(_DATA_ERROR):
                decided.append(hash(name.removesuffix(ERROR_SUFFIX)))
    return tokens, set(np.setdiff1d(np.frombuffer(locked, np.int64), np.frombuffer(decided, np.int64)).tolist())


def _data_of(lock: str) -> str:
    return lock.removesuffix(LOCK_SUFFIX)


def _errors(dir_fd: int) -> list[str]:
    with os.scandir(dir_fd) as entries:
        return [entry.name for entry in entries if entry.name.endswith(_DATA_ERROR) and not entry.name.startswith(".")]


def _exists(dir_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return False
        raise
    return True
