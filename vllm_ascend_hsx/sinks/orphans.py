"""Remove leftovers of dead servers from a directory, and never anything of a living server.

* A workspace with a free lock is an orphan, with all files in it. A workspace without a lock file
  is not.
* Unsealed shards with the token of an orphan are sealed.
* A free lock file without data or error is an orphan. A dead server left it, or a consumer that
  removed the data.
* A workspace of another machine is an orphan only if it also had no heartbeat for some minutes.
  Until then lock files without data stay, too, because they do not name their server.

Every decision about a lock is carried out while holding that lock, because the next server or
another cleaning process may use the same name at the same time. Data, errors and their locks belong
to the consumers and stay.
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
from vllm_ascend_hsx.protocol.heartbeat import may_live_elsewhere
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import (
    DATA_SUFFIX,
    ERROR_SUFFIX,
    INDEX,
    LOCK_SUFFIX,
    MANIFEST,
    MAX_DEPTH,
    TAR,
    parse_shard_name,
    token_of_workspace,
    workspace_name,
)
from vllm_ascend_hsx.sinks.shard_file import recover_shard, unsealed_shards
from vllm_ascend_hsx.sinks.storage import open_folder
from vllm_ascend_hsx.sinks.workspace import Workspace

logger = logging.getLogger(__name__)

Done: TypeAlias = Literal["removed", "sealed"]

_DATA_LOCK = DATA_SUFFIX + LOCK_SUFFIX
_DATA_ERROR = DATA_SUFFIX + ERROR_SUFFIX


def remove_orphans(dir_fd: int, directory: str) -> None:
    """Remove orphans from a directory. Log results and errors, and raise nothing.

    A directory without orphans costs one pass: about two microseconds and 40 bytes per name.

    Args:
        dir_fd: the directory.
        directory: path of the directory, for the log.
    """
    cleaning = Cleaning(dir_fd)
    with cleaning.noting("could not search for leftovers of dead servers"):
        cleaning.run()
    done = cleaning.words("sealed {}", "removed {}")
    if cleaning.servers:
        # A warning, because vLLM's logging shows only warnings of this package.
        which = "a server" if cleaning.servers == 1 else f"{cleaning.servers} servers"
        nothing = "nothing could be cleaned up" if cleaning.problems else "nothing was left"
        logger.warning(
            "%s: leftovers of %s that died or could not clean up: %s",
            directory,
            which,
            done or nothing,
        )
    elif done:
        logger.info("%s: %s", directory, done)
    if cleaning.problems:
        problem = f"{cleaning.first_problem} ({cleaning.problems} problems in all)"
        logger.warning("%s: %s", directory, problem)


class Cleaning:
    """A pass over the names of a directory, and a second pass if there are orphans.

    Args:
        dir_fd: the directory.
        dry_run: count the changes without making them.
        lost_shards: remove the index of each shard whose tar file is gone, and the manifest.
        tell: called for each change, with the path of the file (for a shard, of the tar file) below
            the directory.
        report: called with each problem.

    Attributes:
        servers: number of dead servers.
        hidden, locks, errors: number of files removed.
        acknowledged: number of acknowledged files removed; see Acknowledged.
        lost: number of shards without a tar file whose index was removed.
        shards, requests: number of shards sealed, and number of requests in these shards.
        problems, first_problem: number of errors, and the first error.
    """

    def __init__(
        self,
        dir_fd: int,
        *,
        dry_run: bool = False,
        lost_shards: bool = False,
        tell: Callable[[Done, str], None] = lambda done, path: None,
        report: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._dir_fd = dir_fd
        self._dry_run = dry_run
        self._lost_shards = lost_shards
        self._tell = tell
        self._report = report
        self._cleaned: set[str] = set()
        self._keeps_locks = False  # True after finding a server that locks may not reach
        self._has_looked_above = False
        self.servers = self.hidden = self.locks = self.errors = self.acknowledged = self.lost = 0
        self.shards = self.requests = self.problems = 0
        self.first_problem = ""

    def words(self, sealed: str, removed: str) -> str:
        """Describe the changes in words. Return "" without changes.

        Args:
            sealed, removed: templates with {} for the sealed shards and the removed files.
        """
        kinds = ((self.hidden, "hidden file", ""), (self.locks, "lock", " without data"))
        others = (
            (self.errors, "error", ""),
            (self.lost, "lost shard", ""),
            (self.acknowledged, "acknowledged file", ""),
        )
        gone = [_count(*kind) for kind in (*kinds, *others) if kind[0]]
        parts = [removed.format(", ".join(gone))] if gone else []
        if self.shards:  # only sealing counts requests
            requests = "" if self._dry_run else f" with {_count(self.requests, 'request')}"
            parts.insert(0, sealed.format(_count(self.shards, "shard", requests)))
        return ", ".join(parts)

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Count an OSError of the block as a problem, described by `what`, and continue."""
        try:
            yield
        except OSError as error:
            problem = describe(what, error)
            self.first_problem = self.first_problem or problem
            self.problems += 1
            self._report(problem)

    def run(self) -> None:
        """Remove leftovers of dead servers, and locks without data in the directory itself.

        Raises OSError if the directory cannot be read.
        """
        self._clean(self._dir_fd, "")

    def clean_folder(self, folder: str) -> None:
        """Clean a folder below the directory. It may be the storage directory of a server."""
        with (
            self.noting(f"could not clean {folder!r}"),
            open_folder(self._dir_fd, folder) as dir_fd,
        ):
            if dir_fd >= 0:
                self._clean(dir_fd, folder)

    def remove_errors(self, folder: str, before: float) -> None:
        """Remove unlocked error files that were modified before a time.

        Args:
            folder: folder below the directory; "" is the directory itself.
            before: seconds since the epoch.
        """
        with (
            self.noting(f"could not clean {folder!r}"),
            open_folder(self._dir_fd, folder or ".") as dir_fd,
        ):
            for name in _errors(dir_fd) if dir_fd >= 0 else []:
                # Another cleaning process may be faster.
                with (
                    self.noting(f"could not remove {os.path.join(folder, name)!r}"),
                    suppress(FileNotFoundError),
                ):
                    self._remove_error(dir_fd, folder, name, before)

    def remove_acknowledged(self, path: str, remove: Callable[[], bool]) -> bool:
        """Remove an acknowledged file with `remove`. Return whether it was removed, or would be."""
        removed = False
        with self.noting(f"could not remove {path!r}"):
            removed = remove()
        if removed:
            self.acknowledged += 1
            self._tell("removed", path)
        return removed

    def _remove_lost_shards(self, dir_fd: int, folder: str) -> None:
        """Remove index and manifest of lost shards, unless a server may use the shard."""
        with os.scandir(dir_fd) as entries:
            names = {entry.name for entry in entries}
        parts = {parsed[:2] for name in names if (parsed := parse_shard_name(name))}
        for stem, token in sorted(parts):
            is_ended = stem + MANIFEST in names or not names.intersection(
                (workspace_name(token), workspace_name(token, False))
            )
            if is_ended and stem + TAR not in names:
                with self.noting(f"could not remove {os.path.join(folder, stem + INDEX)!r}"):
                    self._remove_lost(dir_fd, folder, stem)

    def _remove_lost(self, dir_fd: int, folder: str, stem: str) -> None:
        if not self._dry_run:
            for suffix in (MANIFEST, INDEX):
                with suppress(FileNotFoundError):
                    os.unlink(stem + suffix, dir_fd=dir_fd)
        self.lost += 1
        self._tell("removed", os.path.join(folder, stem + INDEX))

    def _clean(self, dir_fd: int, folder: str) -> None:
        for token in self._remove_locks(dir_fd, folder):
            with self.noting(f"could not clean {os.path.join(folder, workspace_name(token))!r}"):
                workspace = Workspace.adopt(dir_fd, token, remove_empty=not self._dry_run)
                if workspace is not None:
                    self.servers += 1
                    self._clean_workspace(workspace, dir_fd, folder)
        if self._lost_shards:
            self._remove_lost_shards(dir_fd, folder)

    def _clean_workspace(self, workspace: Workspace, dir_fd: int, folder: str) -> None:
        """Remove all other leftovers of a dead server, then the workspace if nothing failed.

        `dir_fd` is the storage directory of that server, and `folder` the path of it.
        """
        problems = self.problems
        end = workspace.leave
        try:
            for stem in unsealed_shards(dir_fd, workspace.token):
                with self.noting(f"could not seal {os.path.join(folder, stem)}"):
                    if self._lost_shards and not _exists(dir_fd, stem + TAR):
                        self._remove_lost(dir_fd, folder, stem)
                        continue
                    if not self._dry_run:
                        self.requests += recover_shard(dir_fd, workspace.fd, stem)
                    self.shards += 1
                    self._tell("sealed", os.path.join(folder, stem + TAR))
            for each in workspace.folders():
                inside = os.path.join(folder, each)
                if not self._dry_run:
                    self._cleaned.discard(inside)  # this server may have left new locks
                is_other = suppress(NotADirectoryError)  # a link may have replaced the folder
                with (
                    self.noting(f"could not clean {inside!r}"),
                    is_other,
                    open_folder(self._dir_fd, inside) as inside_fd,
                ):
                    if inside_fd >= 0:
                        self._remove_locks(inside_fd, inside)
            if self.problems == problems:
                files = workspace.files()
                self.hidden += len(files)
                for name in files:
                    self._tell(
                        "removed", os.path.join(folder, workspace_name(workspace.token), name)
                    )
                if not self._dry_run:
                    end = workspace.remove
        finally:
            end()

    def _remove_locks(self, dir_fd: int, folder: str) -> list[str]:
        """Remove locks without data in an open folder, once. Return the tokens of workspaces."""
        tokens, without_data = _look(dir_fd)
        self._keeps_locks = self._keeps_locks or _any_elsewhere(dir_fd, tokens)
        if without_data and not self._has_looked_above:
            self._has_looked_above = True
            self._keeps_locks = self._keeps_locks or self._is_below_another()
        if without_data and not self._keeps_locks and folder not in self._cleaned:
            with os.scandir(dir_fd) as entries:
                names = (each.name for each in entries if each.name.endswith(_DATA_LOCK))
                locks = [
                    name for name in names if hash(name.removesuffix(LOCK_SUFFIX)) in without_data
                ]
            for name in locks:
                with self.noting(f"could not remove {os.path.join(folder, name)!r}"):
                    self._remove_lock(dir_fd, folder, name)
        self._cleaned.add(folder)
        return tokens

    def _is_below_another(self) -> bool:
        """Return whether a directory above belongs to a server that locks may not reach."""
        for depth in range(1, MAX_DEPTH + 1):
            with suppress(OSError), open_folder(self._dir_fd, "/".join([".."] * depth)) as dir_fd:
                if _any_elsewhere(dir_fd, _look(dir_fd)[0]):
                    return True
        return False

    def _remove_lock(self, dir_fd: int, folder: str, name: str) -> None:
        held = HeldLock.adopt(dir_fd, name)
        if held is None:
            return
        end, is_orphan = held.release, False
        try:
            data = name.removesuffix(LOCK_SUFFIX)
            # Look again: nothing can be published now, but data may have been since the first look.
            is_orphan = not _exists(dir_fd, data) and not _exists(dir_fd, data + ERROR_SUFFIX)
            if is_orphan and not self._dry_run:
                end = held.remove
        finally:
            end()
        if is_orphan:
            self.locks += 1
            self._tell("removed", os.path.join(folder, name))

    def _remove_error(self, dir_fd: int, folder: str, name: str, before: float) -> None:
        if _modified(dir_fd, name) >= before:
            return
        data = name.removesuffix(ERROR_SUFFIX)
        lock = data + LOCK_SUFFIX
        held = HeldLock.adopt(dir_fd, lock)
        if held is None:
            if _exists(dir_fd, lock):  # held by a reader, or by another request of this name
                return
            if not self._dry_run:  # a consumer has removed the lock
                with suppress(FileExistsError):
                    held = HeldLock.create(dir_fd, lock, 0o600)
                if held is None:
                    return
        try:
            # Look again: no request of this name can begin now, but a request may have failed.
            if _modified(dir_fd, name) < before:
                if not self._dry_run:
                    os.unlink(name, dir_fd=dir_fd)
                self.errors += 1
                self._tell("removed", os.path.join(folder, name))
        finally:
            if held is not None:
                is_needed = self._dry_run or _exists(dir_fd, data) or _exists(dir_fd, name)
                (held.release if is_needed else held.remove)()


def _count(number: int, what: str, rest: str = "") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}{rest}"


def _look(dir_fd: int) -> tuple[list[str], set[int]]:
    """Return the tokens of all workspaces, and hashes of the data names that have only a lock."""
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
                locked.append(hash(name.removesuffix(LOCK_SUFFIX)))
            elif name.endswith(_DATA_ERROR):
                decided.append(hash(name.removesuffix(ERROR_SUFFIX)))
    without_data = np.setdiff1d(np.frombuffer(locked, np.int64), np.frombuffer(decided, np.int64))
    return tokens, set(without_data.tolist())


def _any_elsewhere(dir_fd: int, tokens: list[str]) -> bool:
    """Return whether one of the servers with these tokens may live on another machine."""
    return any(may_live_elsewhere(workspace_name(token), dir_fd) for token in tokens)


def _errors(dir_fd: int) -> list[str]:
    with os.scandir(dir_fd) as entries:
        return [
            each.name
            for each in entries
            if each.name.endswith(_DATA_ERROR) and not each.name.startswith(".")
        ]


def _modified(dir_fd: int, name: str) -> float:
    return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mtime


def _exists(dir_fd: int, name: str) -> bool:
    try:
        _modified(dir_fd, name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return False
        raise
    return True
