"""A hostile directory: nothing outside is touched, and only the attacked request fails.

docs/security.md describes the trust model and names tests of this file and of
test_request_params.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from depth import depth
from hostile import CHOSEN, DIRECTORIES, JSON, PLANTS, STRINGS, Place, place
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sink_harness import (
    FORMAT,
    bits,
    dead_workspace,
    end,
    finite_rows,
    listing,
    put,
    reason_of,
    token_ids,
)

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.api import ParamsError, ServerParams, read_params
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.names import file_name, workspace_name
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.sinks.base import NAME_USED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import MOVED, RequestFile
from vllm_ascend_hsx.sinks.storage import Storage

ROOT = Path(__file__).parents[3]


def rows_in(path: Path) -> np.ndarray:
    """Return rows. Ignore lock and reason, because others may have planted them."""
    return bits(load_file(path)["hidden_states"])


def end_file(sink: FileSink, file: RequestFile, how: str) -> None:
    if how == "close":
        sink.close()
    else:
        end(file, how)


def real_directory(file: RequestFile) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{file.storage.fd}"))


@settings(max_examples=depth(120))
@given(
    request_id=STRINGS,
    chosen=CHOSEN | STRINGS,
    absolute=st.booleans(),
    end=st.sampled_from(["commit", "fail", "discard"]),
)
def test_client_path_stays_below_the_directory(
    request_id: str, chosen: str, absolute: bool, end: str
) -> None:
    with place() as where, FileSink(where.storage, FORMAT) as sink:
        try:
            path = read_params(
                {"hidden_states_path": f"{where.storage}/{chosen}" if absolute else chosen},
                ServerParams(where.storage, allow_path=True),
            ).path
        except ParamsError:
            path = None
        # The sink accepts all paths of the scheduler, and checks other paths itself.
        if path is None:
            with pytest.raises(SinkError):
                sink.open(request_id, Path(f"{where.storage}/../{chosen}"))
            assert not [name for name in listing(where.storage) if not name.startswith(".")]
            return
        file = sink.open(request_id, path)
        file.write(0, finite_rows(0, 2))
        end_file(sink, file, end)
        if end == "commit":
            assert np.array_equal(rows_in(path), finite_rows(0, 2))
        elif end == "fail":
            assert reason_of(path) == "as a test"
        else:
            assert listing(path.parent) in (
                [],
                [name for name in listing(path.parent) if name.startswith(".hsx-")],
            )


SLOTS = (
    "data",
    "lock",
    "error",
    "hidden 0",
    "hidden 1",
    "hidden error",
    "hidden lock",
    "folder",
    "inner folder",
    "storage",
)
LINKS_TO_DIRECTORIES = ("link to a directory", "link to the directory above")
PATHS = (
    "a.safetensors",
    "folder/a.safetensors",
    "folder/inner/a.safetensors",
    "r-0123abcd.safetensors",
)


class Attack(NamedTuple):
    """Plant something under a name before a step of a request.

    The storage directory is replaced only while a request is open, and never by a link to another
    directory: the administrator chose the path, and the sink follows it.
    """

    step: str
    slot: str
    kind: str


def attacked(slot: str, where: Place, relative: str, token: str) -> Path | None:
    """Return the attacked path; None if a request of this path has no such slot."""
    *folders, name = relative.split("/")
    if slot == "storage":
        return where.storage
    if slot in ("folder", "inner folder"):
        level = 1 if slot == "folder" else 2
        return where.storage.joinpath(*folders[:level]) if len(folders) >= level else None
    if slot.startswith("hidden"):
        workspace = next(where.storage.glob(f".hsx-*{token}"), None)
        hidden = {"hidden lock": f"{name}.lock.new", "hidden error": f"{name}.error.1"}.get(
            slot, f"{name}.{slot.removeprefix('hidden ')}"
        )
        return workspace and workspace / hidden
    return where.storage.joinpath(
        *folders, {"data": name, "lock": f"{name}.lock", "error": f"{name}.error"}[slot]
    )


@settings(max_examples=depth(300))
@given(
    relative=st.sampled_from(PATHS),
    attacks=st.lists(
        st.builds(
            Attack,
            st.sampled_from(["open", "write", "end"]),
            st.sampled_from(SLOTS),
            st.sampled_from(sorted(PLANTS)),
        ).filter(
            lambda attack: (
                attack.slot != "storage"
                or (attack.step != "open" and attack.kind not in LINKS_TO_DIRECTORIES)
            )
        ),
        max_size=3,
    ),
    earlier=st.sampled_from([None, "discard", "fail"]),
    end=st.sampled_from(["commit", "fail", "discard", "close"]),
    options=st.builds(
        FileOptions,
        use_lock=st.booleans(),
        durability=st.sampled_from(["none", "fdatasync"]),
        io=st.sampled_from(["buffered", "direct"]),
        checksum=st.sampled_from(["none", "crc32c"]),
    ),
)
def test_planted_files_affect_nothing_outside_and_fail_only_their_request(
    relative: str, attacks: list[Attack], earlier: str | None, end: str, options: FileOptions
) -> None:
    with place() as where, FileSink(where.storage, FORMAT, options) as sink:
        path = where.storage / relative

        def plant(step: str) -> None:
            for attack in attacks:
                if (
                    attack.step == step
                    and (target := attacked(attack.slot, where, relative, sink.token)) is not None
                ):
                    where.plant(target, attack.kind)

        if earlier is not None:
            before = sink.open("earlier", path)
            before.write(0, finite_rows(0, 2, version=1))
            end_file(sink, before, earlier)
        try:
            plant("open")
            file = sink.open("r-0123abcd", path)  # one of the paths is that of this id
            plant("write")
            try:
                file.write(0, finite_rows(0, 2))
            except SinkError as error:
                assert re.search(r"could not be created: .*\(E[A-Z]+\)", error.reason)
                file.fail(error.reason)
                return
            plant("end")
            end_file(sink, file, end)
        except SinkError as error:
            assert attacks, "nobody is in its way"
            assert re.search(
                rf"\(E[A-Z]+\)$|another request|^shared_storage_path=|{NAME_USED}|{MOVED}",
                error.reason,
            ), error.reason
            return
        replaced = any(attack.slot.startswith("hidden") for attack in attacks)
        if end == "commit" and not replaced:  # whoever replaces the written file owns the result
            assert not path.is_symlink()
            assert np.array_equal(rows_in(path), finite_rows(0, 2))
            assert stat.S_IMODE(path.stat().st_mode) == options.mode


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot != "storage"])
def test_planted_name_is_replaced_or_fails_the_request(slot: str, kind: str) -> None:
    """The outcome for each name and kind of file, planted before the request is opened."""
    relative = "folder/inner/a.safetensors"
    with place() as where, FileSink(where.storage, FORMAT) as sink:
        target = attacked(slot, where, relative, sink.token)
        assert target is not None
        where.plant(target, kind)
        directory = kind in DIRECTORIES
        expected = {
            "data": NAME_USED,
            "lock": "EISDIR|ENOTEMPTY|EEXIST" if directory else None,
            "error": "EISDIR|EPERM" if directory else None,
            "hidden lock": "EISDIR" if directory else None,
            "hidden 0": "EEXIST",
            "folder": None if directory else "ENOTDIR|ELOOP",
            "inner folder": None if directory else "ENOTDIR|ELOOP",
        }.get(slot)
        try:
            file = sink.open("r", where.storage / relative)
            inside = real_directory(file)
            try:
                file.write(0, finite_rows(0, 2))
            except SinkError as error:
                file.fail(error.reason)
                raise
            file.commit(token_ids(2), 2)
            outcome = ""
        except SinkError as error:
            outcome = error.reason
        if expected is None:
            assert outcome == ""
            assert inside == where.storage / "folder" / "inner"
            assert np.array_equal(rows_in(inside / "a.safetensors"), finite_rows(0, 2))
            assert not (inside / "a.safetensors.lock").is_symlink()
            assert not os.path.lexists(inside / "a.safetensors.error")
        else:
            assert re.search(rf"\(({expected})\)|^{NAME_USED}", outcome), outcome
        sink.open("beside", where.storage / "beside.safetensors").discard()


@pytest.mark.parametrize("kind", ["link to a directory", "link to a file", "hard link"])
@pytest.mark.parametrize(
    "slot", ["folder", "inner folder", "data", "lock", "error", "hidden 1", "hidden lock"]
)
def test_replacement_between_system_calls_does_not_lead_outside(slot: str, kind: str) -> None:
    relative = "folder/inner/a.safetensors"
    for turn in itertools.count():
        calls = -1

        def checkpoint(turn: int = turn) -> None:
            nonlocal calls
            if calls >= 0:
                calls += 1
                if calls == turn + 1:
                    target = attacked(slot, where, relative, sink.token)
                    assert target is not None
                    where.plant(target, kind)

        with place(checkpoint) as where, FileSink(where.storage, FORMAT) as sink:
            if slot != "folder":  # the folders are created there, too
                sink.open("earlier", where.storage / relative).fail("as a test")
            calls = 0
            try:
                put(sink.open("r", where.storage / relative), 2)
            except SinkError as error:
                assert re.search(
                    rf"\(E[A-Z]+\)$|another request|{NAME_USED}|{MOVED}", error.reason
                ), error.reason
            made, calls = calls, -1
        if made <= turn:
            break
    assert turn > 20


@pytest.mark.parametrize("kind", PLANTS)
def test_planted_workspace_does_not_lead_outside(kind: str) -> None:
    """A server removes leftovers of dead servers. Other users can create a similar directory."""
    with place() as where:
        (where.outside / "folder" / "x.safetensors.lock").touch()
        folders = [
            "../outside/folder",
            "link",
            f"{where.outside}/folder",
            "\0",
            "..",
            "fifo",
            "x" * 10_000,
        ]
        (where.storage / "link").symlink_to(where.outside / "folder")
        os.mkfifo(where.storage / "fifo")
        dead_workspace(where.storage, "89abcdef", "\n".join(folders))
        where.plant(dead_workspace(where.storage, "01234567") / "planted", kind)
        where.plant(where.storage / workspace_name("00000000"), kind)
        where.restart()
        with FileSink(where.storage, FORMAT) as sink:
            sink.open("r", where.storage / "a.safetensors").discard()


def test_server_starts_beside_a_planted_lock_of_any_size(tmp_path: Path) -> None:
    with open(dead_workspace(tmp_path) / "lock", "w") as lock:
        lock.truncate(1 << 42)  # takes no space
    with FileSink(tmp_path, FORMAT) as sink:
        sink.open("r", tmp_path / "a.safetensors").discard()


@pytest.mark.parametrize("kind", ["link to a file", "hard link", "file", "fifo"])
def test_direct_writes_go_to_the_created_file_after_a_replacement(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct I/O needs a second descriptor. It can only be opened by name."""
    with place() as where, FileSink(where.storage, FORMAT, FileOptions(io="direct")) as sink:
        file = sink.open("r", where.storage / "a.safetensors")
        hidden = where.storage / workspace_name(sink.token) / "a.safetensors.0"
        real = Storage.open_direct

        def open_direct(storage: Storage, name: str, fd: int) -> int:
            where.plant(hidden, kind)
            return real(storage, name, fd)

        monkeypatch.setattr(Storage, "open_direct", open_direct)
        with pytest.raises(
            SinkError, match=r"could not be created: .*\((ELOOP|ESTALE|ENXIO|EINVAL)\)"
        ):
            file.write(0, finite_rows(0, 2))
        file.fail("x")


# Names, metadata and modes


@pytest.mark.parametrize(
    "request_id",
    ["x" * 65_536, "../../etc/passwd", "\0", "\ud800", '"}\n', "a\u202eb"],
    ids="abcdef",
)
def test_hostile_id_is_stored_unchanged_and_readable(tmp_path: Path, request_id: str) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        path = tmp_path / file_name(request_id)
        put(sink.open(request_id, path), 2)
        states = load(path, 0)
        assert (
            states.metadata["request_id"] == request_id.encode("utf-8", "backslashreplace").decode()
        )
        remove(path)
        sink.open(request_id, path).fail("the reason")
        with pytest.raises(HiddenStatesError, match="the reason"):
            load(path, 0)


def every_example(*values: Any) -> Callable[[Any], Any]:
    """Try each of these, too."""
    return lambda test: functools.reduce(lambda made, value: example(value)(made), values, test)


ODD_MODES = (
    "0440",
    "0000",
    "1777",
    "0o640",
    "rw-r-----",
    "0640 ",
    "0640\n",
    "٠640",
    640,
    True,
    None,
    "0" * 10_000,
)


@settings(max_examples=depth(200))
@given(value=JSON)
@every_example(*ODD_MODES)
def test_invalid_file_mode_is_refused_in_one_line(value: Any) -> None:
    options = {"shared_storage_path": "/data", "file_mode": value}
    try:
        mode = int(HsxConfig.parse(options).file_mode, 8)
    except UserError as refused:
        assert str(refused).startswith("kv_connector_extra_config.file_mode=")
        assert "octal digits, such as '0640'" in str(refused)
        assert "\n" not in str(refused)
    else:
        assert mode & 0o600 == 0o600
        assert mode <= 0o777


@pytest.mark.parametrize(("value", "mode"), [("0640", 0o640), ("600", 0o600), ("0666", 0o666)])
def test_octal_file_mode_is_accepted(value: str, mode: int) -> None:
    assert (
        int(HsxConfig.parse({"shared_storage_path": "/data", "file_mode": value}).file_mode, 8)
        == mode
    )


def test_clients_choose_names_only_if_allowed() -> None:
    assert HsxConfig.parse({"shared_storage_path": "/data"}).allow_custom_save_path is False
    for value in ("true", 1, None):
        with pytest.raises(UserError, match="allow_custom_save_path"):
            HsxConfig.parse({"shared_storage_path": "/data", "allow_custom_save_path": value})


def test_tests_named_in_the_documentation_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for each in texts for name in re.findall(r"^def (test_\w+)", each, re.MULTILINE)}
    assert len(named) > 8
    assert named <= there
