"""The storage directory: refused at start with one clear error; nothing outside it is touched."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, end, finite_rows, listing, open_fds, put
from tracing import Calls, Traced

from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.names import file_name, workspace_name
from vllm_ascend_hsx.reader.load import load, remove
from vllm_ascend_hsx.sinks import directory as directory_module
from vllm_ascend_hsx.sinks import workspace as workspace_module
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import MOVED


def test_usable_directory_is_created_and_left_empty(tmp_path: Path) -> None:
    before = open_fds()
    check_directory(tmp_path / "a" / "b")
    assert listing(tmp_path / "a" / "b") == []
    assert open_fds() == before


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/proc/no/such", "cannot be created or opened"),
        ("/dev/null", "cannot be used: /dev/null is not a directory"),
        ("/dev/null/x", "cannot be used: /dev/null/x is not a directory"),
        ("/proc/self", "cannot be written"),
        ("/tmp/a\0b", "is not a path"),
    ],
    ids=ascii,
)
def test_unusable_directory_is_one_error_with_option_value_and_remedy(
    path: str, problem: str
) -> None:
    before = open_fds()
    for use in (check_directory, lambda path: FileSink(path, FORMAT)):
        with pytest.raises(UserError) as raised:
            use(Path(path))
        assert str(raised.value).startswith(f"shared_storage_path={path!r} {problem}")
        assert str(raised.value).endswith(".")
        assert len(str(raised.value).split(". ")) >= 2, "a remedy follows the problem"
    assert open_fds() == before


def test_directory_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o555)
        source = str(pathlib.Path(directory_module.__file__).parents[2])
        result = subprocess.run(
            [sys.executable, "-c", "import sys; from pathlib import Path\n"
             "from vllm_ascend_hsx.protocol.errors import UserError\n"
             "from vllm_ascend_hsx.sinks.directory import check_directory\n"
             "import os; os.geteuid() or os.seteuid(65534)\n"
             "try: check_directory(Path(sys.argv[1]))\n"
             "except UserError as error: print(error)", directory],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": source},
        )  # fmt: skip
        assert result.stdout.startswith(
            f"shared_storage_path={directory!r} cannot be written: Permission denied. Make it "
            "writable"
        )
        assert listing(Path(directory)) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_filesystem_without_flock_is_refused_unless_locks_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(lock_module, "fcntl", Traced(lock_module.fcntl, Calls(code, "flock")))
    with pytest.raises(UserError, match="without flock.*use_synchronization_lock"):
        check_directory(tmp_path)
    check_directory(tmp_path, use_lock=False)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("failing", "direct"),
    [("pwrite", False), ("pwrite", True), ("rename", False), ("mkdir", False)],
)
def test_full_filesystem_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, direct: bool
) -> None:
    before = open_fds()
    for module in (directory_module, workspace_module):
        monkeypatch.setattr(module, "os", Traced(os, Calls(errno.EDQUOT, failing)))
    with pytest.raises(UserError, match="cannot store a file: Disk quota exceeded"):
        check_directory(tmp_path, direct=direct)
    assert listing(tmp_path) == []
    assert open_fds() == before


# Paths of requests


@pytest.mark.parametrize(
    "path",
    [
        "../escaped.safetensors",
        "sub/../escaped.safetensors",
        ".hidden/inside.safetensors",
        "r.safetensors/inside.safetensors",
        "r.safetensors.lock/inside.safetensors",
        "a/" * 9 + "inside.safetensors",
        "/etc/passwd.safetensors",
        "..",
        ".",
        ".hidden.safetensors",
        "nul\0.safetensors",
        "\udc80.safetensors",
        "no-suffix",
        "x" * 300 + ".safetensors",
    ],
    ids=ascii,
)
def test_path_outside_the_directory_or_with_odd_names_is_refused(tmp_path: Path, path: str) -> None:
    directory = tmp_path / "storage"
    with FileSink(directory, FORMAT) as sink:
        (directory / "sub").mkdir()
        before = open_fds()
        with pytest.raises(SinkError) as raised:
            sink.open("r", directory / path)
        assert open_fds() == before
    assert raised.value.request_id == "r"
    assert listing(tmp_path) == ["storage"]
    assert listing(directory) == ["sub"]
    assert listing(directory / "sub") == []


def test_relative_directory_is_resolved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FileSink(Path("storage"), FORMAT) as sink:
        monkeypatch.chdir("/")
        for parent in (Path("storage"), tmp_path / "storage"):
            put(sink.open("r", parent / "r.safetensors"), 1)
            assert load(tmp_path / "storage" / "r.safetensors", 0).token_ids.shape == (1,)
            remove(tmp_path / "storage" / "r.safetensors")


@settings(max_examples=80)
@given(
    st.text(st.characters(exclude_categories=()), max_size=60)
    | st.text("./\0~a", max_size=20)
    | st.just("x" * 10_000)
)
def test_any_request_id_writes_one_file_in_the_directory(
    request_id: str,
) -> None:
    with tempfile.TemporaryDirectory() as above:
        directory = Path(above, "storage")
        with FileSink(directory, FORMAT) as sink:
            path = directory / file_name(request_id)
            put(sink.open(request_id, path), 2)
            assert load(path, 0).hidden_states.shape == (2, 3, 8)
            remove(path)
            sink.open(request_id, path).fail("x")
        assert listing(Path(above)) == ["storage"]
        assert set(listing(directory)) == {f"{path.name}.lock", f"{path.name}.error"}


def test_request_whose_directory_was_replaced_fails_and_frees_both(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    with FileSink(directory, FORMAT) as sink:
        under_way = sink.open("a", directory / "a.safetensors")
        under_way.write(0, finite_rows(0, 2))
        shutil.rmtree(directory)
        with pytest.raises(SinkError, match="another request is writing"):
            sink.open("a", directory / "a.safetensors")
        directory.mkdir()
        put(sink.open("c", directory / "c.safetensors"), 3)
        with pytest.raises(SinkError, match=MOVED):
            end(under_way, "commit")
        put(sink.open("a", directory / "a.safetensors"), 3)
        with FileSink(directory, FORMAT):
            assert len([name for name in os.listdir(directory) if name.startswith(".")]) == 2, (
                "both hidden directories are held"
            )
    assert not [name for name in os.listdir(directory) if name.startswith(".")]


@pytest.mark.parametrize("use_lock", [False, True])
def test_removed_hidden_directory_is_recreated_with_and_without_locks(
    tmp_path: Path, use_lock: bool
) -> None:
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=use_lock)) as sink:
        shutil.rmtree(tmp_path / workspace_name(sink.token, use_lock))
        path = put(sink.open("r", tmp_path / "r.safetensors"), 2)
    assert load(path, 0, verify=True).token_ids.shape == (2,)


def test_published_file_has_the_group_of_its_folder(
    tmp_path: Path,
) -> None:
    of_storage, of_team = (4321, 1234) if os.geteuid() == 0 else (os.getgroups() * 2)[:2]
    storage, team, plain = (
        tmp_path / "storage",
        tmp_path / "storage/team",
        tmp_path / "storage/plain",
    )
    for folder, gid, mode in (
        (storage, of_storage, 0o2770),
        (team, of_team, 0o2770),
        (plain, of_team, 0o770),
    ):
        folder.mkdir()
        os.chown(folder, -1, gid)
        folder.chmod(mode)
    with FileSink(storage, FORMAT) as sink:
        for folder in (storage, team, plain, storage / "new"):
            put(sink.open("r", folder / "r.safetensors"), 1)
            sink.open("failed", folder / "failed.safetensors").fail("x")
            (folder / "made there").touch()
            assert {path.stat().st_gid for path in folder.iterdir() if path.is_file()} == {
                (folder / "made there").stat().st_gid
            }
        os.chown(storage, -1, of_team)
        assert put(sink.open("later", storage / "later.safetensors"), 1).stat().st_gid == of_team


@pytest.mark.parametrize("use_lock", [False, True])
def test_folder_on_another_filesystem_is_refused_when_a_request_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_lock: bool
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    fstat = os.fstat

    def as_if_mounted(fd: int) -> os.stat_result:
        found = fstat(fd)
        if not os.path.samestat(found, os.stat(mounted)):
            return found
        fields = list(found)
        fields[2] += 1  # st_dev
        return os.stat_result(fields)

    before = open_fds()
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=use_lock)) as sink:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", as_if_mounted)
            with pytest.raises(
                SinkError, match=r"on another filesystem than the storage directory \(EXDEV\)"
            ):
                sink.open("r", mounted / "r.safetensors")
        sink.open("r", mounted / "r.safetensors").discard()
    assert not open_fds() - before
