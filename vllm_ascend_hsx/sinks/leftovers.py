"""What servers that died have left in a directory: found and removed by the next one, and never anything of a server that lives.

A server that uses locks holds an flock on a hidden file of its own, its mark, for as long as there may be hidden files with its token.
The kernel lets go of it when the server dies, however that happens. So:
* a mark that nobody holds, and every hidden file with its token, are left over
* shards with its token that are not sealed are sealed
* a lock file that nobody holds, and that has neither data nor error beside it, is left over: by a server that died, or by a consumer that
  has taken the data away
Whatever is decided by a lock is done while that lock is held, for the next server may want the same name at the same instant, and so may
another one that cleans up. Data, errors, and the locks beside them belong to the consumers and stay.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from vllm_ascend_hsx.sinks.lock import HeldLock
from vllm_ascend_hsx.sinks.names import (
    DATA_SUFFIX,
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    mark_name,
    path_refusal,
    token_of_mark,
    token_of_partial,
)
from vllm_ascend_hsx.sinks.shard_recovery import recover_shard, unsealed_shards
from vllm_ascend_hsx.sinks.storage import open_folder
from vllm_ascend_hsx.sinks.system import describe

logger = logging.getLogger(__name__)

_ATTEMPTS = 8  # each is lost only to somebody who cleans up and saw the mark before it was held
_DATA_LOCK = DATA_SUFFIX + LOCK_SUFFIX
_DATA_ERROR = DATA_SUFFIX + ERROR_SUFFIX


class ServerMark:
    """Says that the server whose hidden files have `token` in their names lives. Ended by `remove` or `leave`, once.

    Its file names the folders below the directory in which there may be such files, a line each.

    Args:
        dir_fd: the directory, open for as long as this object is used.
        mode: of the mark's file.

    Raises:
        OSError: it cannot be created or held.
    """

    def __init__(self, dir_fd: int, mode: int) -> None:
        self._folders: set[str] = set()
        for _ in range(_ATTEMPTS):
            self.token = secrets.token_hex(4)
            try:
                held = HeldLock.create(dir_fd, mark_name(self.token), mode)
            except FileExistsError:  # another server's token
                continue
            if held is not None:
                self._held = held
                return
        raise OSError(errno.EAGAIN, "every mark was locked or removed by somebody else at once")

    def enter(self, folders: Sequence[str]) -> None:
        """There may be hidden files in the folder that these names lead to, from now on. Raises OSError: that cannot be noted."""
        folder = "/".join(folders)
        if folder and folder not in self._folders:
            self._held.append(os.fsencode(folder) + b"\n")
            self._folders.add(folder)

    def remove(self) -> None:
        """There are no hidden files any more."""
        self._held.remove()

    def leave(self) -> None:
        """There may be some, which the next server is to remove."""
        self._held.release()


def remove_leftovers(dir_fd: int, directory: str) -> None:
    """Remove what dead servers have left in a directory. Raises nothing; logs what was done and what could not be.

    A directory without leftovers costs one pass over its names, some two microseconds and 40 bytes for each; only marks are opened.

    Args:
        dir_fd: the directory.
        directory: its path, for the log.
    """
    cleaning = _Cleaning(dir_fd)
    with cleaning.noting("could not look for leftovers"):
        cleaning.run()
    if cleaning.hidden or cleaning.locks:
        logger.info("%s: removed what dead servers left: %d hidden files, %d locks", directory, cleaning.hidden, cleaning.locks)
    if cleaning.shards:
        logger.info("%s: sealed %d shards of dead servers", directory, cleaning.shards)
    if cleaning.problems:
        logger.warning("%s: %s (%d problems in all)", directory, cleaning.first_problem, cleaning.problems)


class _Cleaning:
    """A pass over a directory's names, and a second one if there is anything to do.

    Attributes:
        hidden, locks: how many were removed. shards: how many were sealed.
        problems, first_problem: what went wrong.
    """

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd
        self.hidden = 0
        self.locks = 0
        self.shards = 0
        self.problems = 0
        self.first_problem = ""

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.first_problem = self.first_problem or describe(what, error)
            self.problems += 1

    def run(self) -> None:
        tokens, lonely = _look(self._dir_fd)
        dead = self._hold_marks(tokens)
        stuck = set(dead)
        try:
            if dead or lonely:
                stuck = self._clean(self._dir_fd, dead, lonely)
            if dead:
                stuck |= self._seal_shards(dead)
            for folder, owners in _folders(dead).items():
                if not self._clean_folder(folder, owners):
                    stuck |= owners
        finally:
            for token, held in dead.items():
                with self.noting(f"could not remove {mark_name(token)!r}"):
                    (held.release if token in stuck else held.remove)()

    def _hold_marks(self, tokens: list[str]) -> dict[str, HeldLock]:
        """The marks that no living server holds, by token."""
        dead = {}
        for token in tokens:
            with self.noting(f"could not open {mark_name(token)!r}"):
                held = HeldLock.adopt(self._dir_fd, mark_name(token))
                if held is not None:
                    dead[token] = held
        return dead

    def _clean(self, dir_fd: int, dead: Collection[str], lonely: set[int]) -> set[str]:
        """Remove hidden files of dead tokens, and the lonely locks that are left over. Returns the tokens that still have files."""
        stuck = set()
        # Names are taken only now: a server may have made hidden files after the first pass, before it died.
        hidden, locks = _take_names(dir_fd, dead, lonely)
        for token, name in hidden:
            problems = self.problems
            with self.noting(f"could not remove {name!r}"), suppress(FileNotFoundError):
                os.unlink(name, dir_fd=dir_fd)
                self.hidden += 1
            if self.problems > problems:
                stuck.add(token)
        for name in locks:
            with self.noting(f"could not remove {name!r}"):
                self._remove_lock(dir_fd, name)
        return stuck

    def _seal_shards(self, dead: Collection[str]) -> set[str]:
        """Seal the shards of dead tokens. Returns the tokens that still have some which are not sealed."""
        stuck = set()
        for token, stem in unsealed_shards(self._dir_fd, dead):
            problems = self.problems
            with self.noting(f"could not seal {stem}"):
                recover_shard(self._dir_fd, token, stem)
                self.shards += 1
            if self.problems > problems:
                stuck.add(token)
        return stuck

    def _clean_folder(self, folder: str, dead: Collection[str]) -> bool:
        """Whether nothing is left in it."""
        problems = self.problems
        with self.noting(f"could not clean {folder!r}"):
            dir_fd = open_folder(self._dir_fd, folder)
            if dir_fd >= 0:
                try:
                    _, lonely = _look(dir_fd)
                    self._clean(dir_fd, dead, lonely)
                finally:
                    os.close(dir_fd)
        return self.problems == problems

    def _remove_lock(self, dir_fd: int, name: str) -> None:
        held = HeldLock.adopt(dir_fd, name)
        if held is None:
            return
        end = held.release
        try:
            data = name.removesuffix(LOCK_SUFFIX)
            # Again, for now nobody can publish anything: it may have been there for a moment only when its name was read.
            if not _exists(dir_fd, data) and not _exists(dir_fd, data + ERROR_SUFFIX):
                end = held.remove
                self.locks += 1
        finally:
            end()


def _look(dir_fd: int) -> tuple[list[str], set[int]]:
    """The tokens of all marks, and the hash values of the data names of which there is a lock, but neither data nor an error."""
    tokens = []
    locked, decided = array("q"), array("q")
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                token = token_of_mark(name)
                if token is not None:
                    tokens.append(token)
            elif name.endswith(DATA_SUFFIX):
                decided.append(hash(name))
            elif name.endswith(_DATA_LOCK):
                locked.append(hash(name.removesuffix(LOCK_SUFFIX)))
            elif name.endswith(_DATA_ERROR):
                decided.append(hash(name.removesuffix(ERROR_SUFFIX)))
    return tokens, set(np.setdiff1d(np.frombuffer(locked, np.int64), np.frombuffer(decided, np.int64)).tolist())


def _take_names(dir_fd: int, dead: Collection[str], lonely: set[int]) -> tuple[list[tuple[str, str]], list[str]]:
    """The hidden files of dead tokens, as (token, name), and the locks that may be left over."""
    hidden, locks = [], []
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                token = token_of_partial(name)
                if token is not None and token in dead:
                    hidden.append((token, name))
            elif lonely and name.endswith(_DATA_LOCK) and hash(name.removesuffix(LOCK_SUFFIX)) in lonely:
                locks.append(name)
    return hidden, locks


def _folders(dead: dict[str, HeldLock]) -> dict[str, set[str]]:
    """The folders that marks name, with the tokens of those that do; others may have written into a mark too."""
    folders: dict[str, set[str]] = {}
    for token, held in dead.items():
        for line in held.content().split(b"\n"):
            folder = os.fsdecode(line)
            if folder and path_refusal(f"{folder}/x{DATA_SUFFIX}") is None:
                folders.setdefault(folder, set()).add(token)
    return folders


def _exists(dir_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
