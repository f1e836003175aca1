"""Hostile values, and a storage directory outside of which nothing may change."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import strategies as st
from sink_harness import open_fds

# Includes surrogates, NUL and control characters.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
HOSTILE = st.text("./~\\\0 \n-aé\ud800\u202e", max_size=20)
CHOSEN = st.builds(
    lambda parts, end: "/".join(parts) + end,
    st.lists(HOSTILE | st.sampled_from(["a", "b.c", ".."])),
    st.sampled_from(["", ".safetensors"]),
)
KNOWN = [
    "x" * 10_000,
    "../" * 3000,
    "/data/a.safetensors",
    "/etc/passwd.safetensors",
    "a/b.safetensors",
]
STRINGS = ANY_TEXT | HOSTILE | CHOSEN | st.sampled_from(KNOWN)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def nested(depth: int) -> Any:
    """Return lists nested to this depth. Python refuses to serialise deep lists."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


T = TypeVar("T")
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**5000  # Python refuses to convert it to a string


class Entry(NamedTuple):
    mode: int
    changed: int
    content: bytes | str


def change(path: Path, offset: int, how: Callable[[bytes], bytes], size: int = 1) -> None:
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), how(os.pread(file.fileno(), size, offset)), offset)


def snapshot(directory: Path) -> dict[str, Entry]:
    """Return mode, mtime and content or link target of each path in a tree."""
    found = {}
    for where, folders, files in os.walk(directory):
        for name in [".", *folders, *files]:
            path = os.path.join(where, name)
            status = os.lstat(path)
            content: bytes | str = b""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            found[os.path.relpath(path, directory)] = Entry(
                status.st_mode, status.st_mtime_ns, content
            )
    return found


def make_outside(directory: Path) -> Path:
    """Create files with names of a sink that no sink may touch, and return the directory."""
    (directory / "folder" / "inner").mkdir(parents=True)
    for name in (
        "file",
        "a.safetensors",
        "folder/a.safetensors",
        "folder/a.safetensors.error",
        "folder/a.safetensors.lock",
    ):
        (directory / name).write_text(f"precious: {name}")
        (directory / name).chmod(0o604)
    (directory / "folder").chmod(0o705)
    return directory


class Place(NamedTuple):
    """Directories of an example: `storage`, and `outside` beside it."""

    above: Path
    storage: Path
    outside: Path
    before: dict[str, Entry]

    def restart(self) -> None:
        """Record the tree outside. `place` checks that it stays the same."""
        self.before.clear()
        self.before.update(snapshot(self.outside))

    def plant(self, path: Path, kind: str) -> None:
        """Create a file of this kind, like any user who may write to the directory."""
        for folder in reversed(path.relative_to(self.above).parents):
            inside = self.above / folder
            if not os.path.lexists(inside):
                inside.mkdir()
            if not stat.S_ISDIR(os.lstat(inside).st_mode):
                return  # a parent is no longer a directory
        if os.path.lexists(path):
            os.rename(path, self.above / f"stolen-{len(os.listdir(self.above))}")
        PLANTS[kind](path, self.outside)


def _mknod(kind: int) -> Callable[[Path, Path], None]:
    return lambda path, outside: os.mknod(path, kind | 0o600)


def _full_directory(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "planted").touch()


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a directory": lambda path, outside: path.symlink_to(outside / "folder"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "new"),
    "link to the directory above": lambda path, outside: path.symlink_to(".."),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "hard link": lambda path, outside: os.link(outside / "file", path),
    "fifo": _mknod(stat.S_IFIFO),
    "socket": _mknod(stat.S_IFSOCK),
    "file": lambda path, outside: path.write_text("planted"),
    "directory": lambda path, outside: path.mkdir(),
    "full directory": _full_directory,
}
DIRECTORIES = ("directory", "full directory")


@contextmanager
def place(checkpoint: Callable[[], None] = lambda: None) -> Iterator[Place]:
    """Yield an empty storage directory. Check that the tree outside and descriptors do not change.

    Args:
        checkpoint: called before each system call of the sink's modules.
    """
    with (
        tempfile.TemporaryDirectory(dir=os.path.realpath(tempfile.gettempdir())) as above,
        pytest.MonkeyPatch.context() as patch,
    ):
        where = Place(Path(above), Path(above, "storage"), make_outside(Path(above, "outside")), {})
        where.storage.mkdir()
        where.restart()
        fds = open_fds()
        wrong = watch(patch, where, checkpoint)
        yield where
        assert not open_fds() - fds
        assert snapshot(where.outside) == where.before
        assert wrong == []
        assert {name.partition("-")[0] for name in os.listdir(above)} <= {
            "storage",
            "outside",
            "stolen",
        }


def watch(patch: pytest.MonkeyPatch, where: Place, checkpoint: Callable[[], None]) -> list[str]:
    """Return a list of errors that the sink's modules make from now on.

    Errors are to open a file or directory outside, and to use an absolute path other than the
    storage directory.
    """
    found: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            attribute = getattr(os, name)
            if (
                not callable(attribute)
                or isinstance(attribute, type)
                or name in ("fspath", "fsencode", "fsdecode", "strerror")
            ):
                return attribute

            def call(*args: Any, **kwargs: Any) -> Any:
                checkpoint()
                for path in args:
                    if (
                        isinstance(path, str | Path)
                        and os.path.isabs(path)
                        and Path(path) != where.storage
                    ):
                        found.append(f"{name}({str(path)!r})")
                result = attribute(*args, **kwargs)
                if name == "open":
                    opened = os.readlink(f"/proc/self/fd/{result}")
                    if opened.startswith(str(where.outside)) or opened == str(where.above):
                        found.append(f"{opened!r} was opened")
                return result

            return call

    for name, module in list(sys.modules.items()):
        if (
            name.startswith(("vllm_ascend_hsx.sinks.", "vllm_ascend_hsx.protocol."))
            and getattr(module, "os", None) is os
        ):
            patch.setattr(module, "os", Watched())
    return found


def promptly(call: Callable[[], T], seconds: float = 60) -> T:
    """Return the result of a call that must not hang."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend((True, call()))
        except BaseException as error:  # noqa: BLE001
            found.extend((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"it still waits after {seconds:g} s"
    good, result = found
    if not good:
        raise result
    return result  # type: ignore[no-any-return]


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


# Irregular files. Only root can create a device, so the device is a link to /dev/zero.
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "socket": (_socket, "a socket"),
    "directory": (Path.mkdir, "a directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a broken symbolic link"),
}


def plant_no_file(path: Path, kind: str) -> str:
    """Replace the file by an irregular one, and return the term for it in errors."""
    path.unlink(missing_ok=True)
    KINDS[kind][0](path)
    return KINDS[kind][1]
