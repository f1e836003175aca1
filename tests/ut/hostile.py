"""What the tests of security share: values that no honest client sends, and a place in which nothing outside of it may change."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from sink_harness import open_fds

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates, NUL and control characters included
HOSTILE = st.text("./~\\\0 \n-aé\ud800\u202e", max_size=20)
CHOSEN = st.builds(
    lambda parts, end: "/".join(parts) + end,
    st.lists(HOSTILE | st.sampled_from(["a", "b.c", ".."])),
    st.sampled_from(["", ".safetensors"]),
)
KNOWN = ["x" * 10_000, "../" * 3000, "/data/a.safetensors", "/etc/passwd.safetensors", "a/b.safetensors"]
STRINGS = ANY_TEXT | HOSTILE | CHOSEN | st.sampled_from(KNOWN)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def nested(depth: int) -> Any:
    """A list in a list in a list: Python refuses to write it down."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HUGE = 10**5000  # a number that Python refuses to write down


class Entry(NamedTuple):
    mode: int
    changed: int
    content: bytes | str


def snapshot(directory: Path) -> dict[str, Entry]:
    """Everything in a tree: types and modes, when directories and files were last changed, contents, and where links lead."""
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
            found[os.path.relpath(path, directory)] = Entry(status.st_mode, status.st_mtime_ns, content)
    return found


def make_outside(directory: Path) -> Path:
    """What nobody may touch: named like what a sink makes, so that whoever follows a link to it finds what to change."""
    (directory / "folder" / "inner").mkdir(parents=True)
    for name in ("file", "a.safetensors", "folder/a.safetensors", "folder/a.safetensors.error", "folder/a.safetensors.lock"):
        (directory / name).write_text(f"precious: {name}")
        (directory / name).chmod(0o604)
    (directory / "folder").chmod(0o705)
    return directory


class Place(NamedTuple):
    """Where an example happens: storage and outside are neighbours."""

    above: Path
    storage: Path
    outside: Path
    before: dict[str, Entry]

    def restart(self) -> None:
        """Take the tree outside as it is now for what must not change."""
        self.before.clear()
        self.before.update(snapshot(self.outside))

    def plant(self, path: Path, kind: str) -> None:
        """Put something under a name; what has it now is taken away, as anybody may who may write to the directory."""
        for folder in reversed(path.relative_to(self.above).parents):
            inside = self.above / folder
            if not os.path.lexists(inside):
                inside.mkdir()
            if not stat.S_ISDIR(os.lstat(inside).st_mode):
                return  # something was planted above it
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
    """An empty storage directory; when it is left, the tree outside must be as it was, and no descriptor may have stayed.

    Args:
        checkpoint: called before each system call of the sink's modules.
    """
    with tempfile.TemporaryDirectory(dir=os.path.realpath(tempfile.gettempdir())) as above, pytest.MonkeyPatch.context() as patch:
        where = Place(Path(above), Path(above, "storage"), make_outside(Path(above, "outside")), {})
        where.storage.mkdir()
        where.restart()
        fds = open_fds()
        wrong = watch(patch, where, checkpoint)
        yield where
        assert not open_fds() - fds
        assert snapshot(where.outside) == where.before
        assert wrong == []
        assert {name.partition("-")[0] for name in os.listdir(above)} <= {"storage", "outside", "stolen"}


def watch(patch: pytest.MonkeyPatch, where: Place, checkpoint: Callable[[], None]) -> list[str]:
    """What the sink's modules do wrong from now on: to have something open that stands outside is to touch it already, and to name
    something by a path that leads through the directory is to follow whatever stands there at that instant."""
    found: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            attribute = getattr(os, name)
            if not callable(attribute) or isinstance(attribute, type) or name in ("fspath", "fsencode", "fsdecode", "strerror"):
                return attribute

            def call(*args: Any, **kwargs: Any) -> Any:
                checkpoint()
                for path in args:
                    if isinstance(path, str | Path) and os.path.isabs(path) and Path(path) != where.storage:
                        found.append(f"{name}({str(path)!r})")
                result = attribute(*args, **kwargs)
                if name == "open":
                    opened = os.readlink(f"/proc/self/fd/{result}")
                    if opened.startswith(str(where.outside)) or opened == str(where.above):
                        found.append(f"{opened!r} was opened")
                return result

            return call

    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm_ascend_hsx.sinks.", "vllm_ascend_hsx.protocol.")) and getattr(module, "os", None) is os:
            patch.setattr(module, "os", Watched())
    return found
