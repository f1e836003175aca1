"""From the server's directory to the output directory: a file is read once, checked, and moved or refused; nothing stays behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generate_harness import HIDDEN, LAYER_IDS, expected_rows, stored_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import wait_for_sleepers

from vllm_ascend_hsx.generate import collect as collect_module
from vllm_ascend_hsx.generate import examine as examine_module
from vllm_ascend_hsx.generate.collect import Collector
from vllm_ascend_hsx.generate.errors import RequestError, RunError
from vllm_ascend_hsx.generate.examine import _EXPONENTS, Expected, ServerFacts, _is_finite
from vllm_ascend_hsx.generate.leftovers import find_leftovers, remove_leftovers
from vllm_ascend_hsx.generate.names import RequestNames, hidden_file, is_hidden_file, row_file, row_of_file, server_file
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

TOKEN = "0123456789ab"
FACTS = ServerFacts("[2, 0, 3]", "BF16", (3, HIDDEN))
IDS = [5, 900, 3, 2]


class Place:
    """A server's directory with an open sink, and an output directory beside it."""

    def __init__(self, root: Path) -> None:
        self.storage, self.output = root / "storage", root / "output"
        self.output.mkdir()
        self.sink = FileSink(self.storage, RowFormat(LAYER_IDS, HIDDEN, "BF16", "tiny"))
        self.collector = self.make()

    def make(self, **options: Any) -> Collector:
        return Collector(self.output, TOKEN, **{"timeout": 30.0, "validate": True, **options})

    def begin(self, name: str = "r", ids: list[int] = IDS) -> RequestFile:
        file = self.sink.open(name, self.storage / f"{name}.safetensors")
        file.write(0, expected_rows(ids))
        return file

    def publish(self, name: str = "r", ids: list[int] = IDS) -> Path:
        file = self.begin(name, ids)
        file.commit(np.asarray(ids, dtype=np.int64), len(ids))
        return file.path

    def files(self, directory: Path) -> list[str]:
        return sorted(name for name in os.listdir(directory) if not name.startswith(".hsx-"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.sink.close()


def expected(**changes: Any) -> Expected:
    return Expected(**{"prompt": IDS, "output": (), "facts": FACTS, **changes})


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_gets_its_row_s_name_and_nothing_is_left_of_the_request(place: Place, durable: bool) -> None:
    path = place.publish()
    inode = os.stat(path).st_ino
    examined = place.make(durable=durable).collect(path, 7, expected())
    assert place.files(place.storage) == []
    assert place.files(place.output) == ["hs_7.safetensors"]
    assert os.stat(place.output / "hs_7.safetensors").st_ino == inode  # renamed, not copied
    ids, rows = stored_rows(place.output / "hs_7.safetensors")
    assert (ids, rows.tolist()) == (IDS, expected_rows(IDS).tolist())
    assert examined == (4, os.stat(place.output / "hs_7.safetensors").st_size, FACTS)


def test_a_file_that_the_server_still_writes_is_waited_for(place: Place) -> None:
    file = place.begin()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(place.collector.collect(file.path, 0, expected())))
    thread.start()
    wait_for_sleepers(Path(f"{file.path}.lock"))
    assert place.files(place.output) == []
    file.commit(np.asarray(IDS, dtype=np.int64), len(IDS))
    thread.join()
    assert found[0].tokens == 4
    assert place.files(place.output) == ["hs_0.safetensors"]


def test_a_file_that_is_not_finished_in_time_is_left_to_the_server(place: Place) -> None:
    file = place.begin()
    with pytest.raises(RequestError, match=r"has not finished .*r.safetensors within 0.01 s") as late:
        place.make(timeout=0.01).collect(file.path, 0, expected())
    assert late.value.lost and late.value.again
    file.commit(np.asarray(IDS, dtype=np.int64), len(IDS))
    assert place.collector.collect(file.path, 0, expected()).tokens == 4


def spoil(at: Callable[[int], int], to: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        begin = at(len(data))
        data[begin : begin + 2] = to(bytes(data[begin : begin + 2]))
        path.write_bytes(data)

    return change


BAD_FILES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "another prompt": (lambda path: None, {"prompt": [5, 900, 4, 2]}, "token 2 of the prompt is 3 in it, and was 4"),
    "a longer prompt": (lambda path: None, {"prompt": [*IDS, 1]}, "it has 4 rows for the prompt of 5 tokens"),
    "rows of an output": (lambda path: None, {"prompt": IDS[:2]}, "it has 2 rows for the generated tokens of 0 tokens"),
    "another output": (lambda path: None, {"prompt": IDS[:2], "output": [3, 9]}, "token 1 of the generated tokens is 2 in it, and was 9"),
    "other layers": (
        lambda path: None,
        {"facts": ServerFacts("[2, 0, 4]", "BF16", (3, HIDDEN))},
        "and the others hold BF16 .3, 8. of layers",
    ),
    "another type": (lambda path: None, {"facts": ServerFacts("[2, 0, 3]", "F16", (3, HIDDEN))}, "it holds BF16"),
    "a changed bit": (spoil(lambda size: 4096, lambda two: bytes([two[0] ^ 1, two[1]])), {}, "it is not as it was written: its checksum"),
    "a changed id": (spoil(lambda size: size - 8, lambda two: b"\x09\x00"), {"prompt": None, "output": None}, "its checksum"),
    "infinity": (spoil(lambda size: 4096, lambda two: b"\x80\x7f"), {}, "hidden_states has numbers that are not finite"),
    "no number": (spoil(lambda size: size - 34, lambda two: b"\xc1\xff"), {}, "hidden_states has numbers that are not finite"),
    "cut off": (lambda path: os.truncate(path, 4100), {}, "this is not a file of hidden states: hidden_states ends at byte"),
    "empty": (lambda path: os.truncate(path, 0), {}, "this is not a file of hidden states: it has 0 bytes"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_what_was_asked_for_is_refused_and_removed(place: Place, name: str) -> None:
    change, wanted, message = BAD_FILES[name]
    path = place.publish()
    change(path)
    with pytest.raises(RequestError, match=message) as refused:
        place.collector.collect(path, 0, expected(**wanted))
    assert str(path) in refused.value.reason and refused.value.again
    assert place.files(place.storage) == place.files(place.output) == []


@pytest.mark.parametrize("name", ["a changed bit", "infinity", "no number"])
def test_without_validate_the_data_is_not_looked_at(place: Place, name: str) -> None:
    path = place.publish()
    BAD_FILES[name][0](path)
    assert place.make(validate=False).collect(path, 0, expected()).tokens == 4


def test_the_server_s_reason_for_a_failure_is_passed_on(place: Place) -> None:
    file = place.begin()
    file.fail("the server's disk is full")
    with pytest.raises(RequestError, match="the server's disk is full"):
        place.collector.collect(file.path, 0, expected())
    assert place.files(place.storage) == []


def test_an_aborted_request_has_no_file(place: Place) -> None:
    file = place.begin()
    file.discard()
    with pytest.raises(RequestError, match="there are no hidden states, lock or error"):
        place.collector.collect(file.path, 0, expected())


# Read once


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every read."""
    found: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        found.append((offset, count))
        return count

    monkeypatch.setattr(examine_module, "os", SimpleNamespace(preadv=preadv, fstat=os.fstat))
    return found


@pytest.mark.parametrize("copies", [False, True])
def test_all_checks_and_the_copy_together_read_each_byte_once(
    place: Place, reads: list[tuple[int, int]], copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(50_000))  # more than a block
    path = place.publish("large", ids)
    size = os.stat(path).st_size
    collector = place.make(copy=copies)
    if copies:
        other_filesystem(monkeypatch, place.storage)
        collector.try_out(place.publish("first"))
        reads.clear()
    collector.collect(path, 0, expected(prompt=ids))
    rows = sorted((offset, count) for offset, count in reads if offset < size - 8 * len(ids))
    assert sum(count for _, count in rows) == size - 8 * len(ids) - 4096  # the header is read by the reader
    assert sum(count for _, count in reads) - sum(count for _, count in rows) == 2 * 8 * len(ids)  # the token ids: compared, and checked
    assert (place.output / "hs_0.safetensors").stat().st_size == size


@settings(deadline=None)
@given(st.sampled_from(sorted(_EXPONENTS)), st.binary(min_size=8, max_size=64))
def test_finite_is_what_torch_says_it_is(dtype: str, data: bytes) -> None:
    types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    types |= {"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}
    data = data[: len(data) // 8 * 8]
    numbers = torch.frombuffer(bytearray(data), dtype=types[dtype]).to(torch.float64)
    assert _is_finite(memoryview(data), dtype) == bool(numbers.isfinite().all())


# Filesystems


def other_filesystem(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    """Files of these directories cannot be renamed to any other."""
    rename = os.rename

    def refuse(source: Any, target: Any, **options: Any) -> None:
        if Path(source).parent in directories and Path(target).parent not in directories:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        rename(source, target, **options)

    monkeypatch.setattr(collect_module.os, "rename", refuse)


@pytest.mark.parametrize("what", ["collect", "try_out"])
def test_nothing_is_copied_across_filesystems_unless_that_is_wanted(place: Place, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    other_filesystem(monkeypatch, place.storage)
    path = place.publish()
    with pytest.raises(RunError, match=f"{place.storage} and {place.output} are on different filesystems.*--copy"):
        place.collector.try_out(path) if what == "try_out" else place.collector.collect(path, 0, expected())
    assert place.files(place.output) == []
    assert path.exists() == (what == "collect")


@pytest.mark.parametrize("known", [False, True], ids=["first", "further"])
def test_a_copy_is_checked_renamed_and_the_source_removed(place: Place, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    other_filesystem(monkeypatch, place.storage)
    collector = place.make(copy=True)
    if known:
        collector.try_out(place.publish("first"))
        assert place.files(place.output) == place.files(place.storage) == []
    path = place.publish()
    data, mode = path.read_bytes(), path.stat().st_mode
    seen: list[list[str]] = []
    monkeypatch.setattr(collect_module.os, "fdatasync", lambda fd: seen.append(place.files(place.output)))
    assert collector.collect(path, 3, expected()).tokens == 4
    assert seen[-1] == [hidden_file(row_file(3), TOKEN)]  # durable before it has its name
    assert (place.output / "hs_3.safetensors").read_bytes() == data
    assert (place.output / "hs_3.safetensors").stat().st_mode == mode
    assert (place.files(place.storage), place.files(place.output)) == ([], ["hs_3.safetensors"])


def test_a_copy_that_is_not_as_it_was_written_never_gets_its_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    other_filesystem(monkeypatch, place.storage)
    collector = place.make(copy=True)
    collector.try_out(place.publish("first"))
    path = place.publish()
    BAD_FILES["a changed bit"][0](path)
    with pytest.raises(RequestError, match="checksum"):
        collector.collect(path, 0, expected())
    assert place.files(place.storage) == place.files(place.output) == []


def test_a_full_output_directory_stops_the_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    other_filesystem(monkeypatch, place.storage)

    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(examine_module, "write_at", full)
    path = place.publish()
    with pytest.raises(RunError, match=r"cannot take another file: No space left on device \(ENOSPC\)"):
        place.make(copy=True).collect(path, 0, expected())
    assert place.files(place.output) == []
    assert path.exists()  # for the next run


def test_a_first_file_that_is_not_here_says_how_to_name_its_directory(place: Place) -> None:
    with pytest.raises(
        RunError, match=r"names /far/away/x.safetensors, and there is no such directory here; mount .* --map-path SERVER=HERE"
    ):
        place.collector.try_out(Path("/far/away/x.safetensors"))


def test_a_first_file_that_is_not_in_its_directory_may_come_yet(place: Place) -> None:
    with pytest.raises(RequestError, match=r"nothing.safetensors, which is not there; mount .* --map-path SERVER=HERE") as missing:
        place.collector.try_out(place.storage / "nothing.safetensors")
    assert missing.value.again


def test_a_first_file_that_cannot_be_moved_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    path = place.publish()
    monkeypatch.setattr(collect_module.os, "rename", refuse)
    with pytest.raises(RunError, match=r"cannot be moved to .*: Permission denied \(EACCES\); let this user write in both directories"):
        place.collector.try_out(path)
    assert place.files(place.storage) == []


# Left over


def test_the_files_of_requests_are_found_by_their_names(place: Place) -> None:
    from vllm_ascend_hsx import find

    names = RequestNames(TOKEN, "00ff")
    other = RequestNames("f" * 12, "00ff")
    requests = {
        "cmpl-" + names.row(4, 1): 4,
        "chatcmpl-" + names.row(12, 3): 12,
        "cmpl-" + names.probe(1): None,
        "cmpl-" + other.row(4, 1): 99,
    }
    for request in requests:
        internal = f"{request}-0-0a1b2c3d" if request.startswith("cmpl") else f"{request}-0a1b2c3d"
        place.publish(file_name(internal).removesuffix(".safetensors"))
        assert find(place.storage, request).exists()
    place.publish("cmpl-hsx-notes")
    found = find_leftovers([place.storage, place.storage / "gone"], {TOKEN})
    assert {row: [path.name for path in paths] for row, paths in found.items()} == {
        4: [f"cmpl-hsx-{TOKEN}-00ff-4-1-0-0a1b2c3d.safetensors"],
        12: [f"chatcmpl-hsx-{TOKEN}-00ff-12-3-0a1b2c3d.safetensors"],
        None: [f"cmpl-hsx-{TOKEN}-00ff-probe-1-0-0a1b2c3d.safetensors"],
    }
    assert remove_leftovers([path for paths in found.values() for path in paths], 0) == []
    assert find_leftovers([place.storage], {TOKEN}) == {}
    assert len(place.files(place.storage)) == 4  # another run's, and somebody's, with their locks


def test_a_leftover_is_removed_when_the_server_has_let_go_of_it(place: Place) -> None:
    file = place.begin("cmpl-" + RequestNames(TOKEN, "00ff").row(1, 1))
    assert remove_leftovers([file.path], 0.01) == [file.path]
    thread = threading.Thread(target=remove_leftovers, args=([file.path], 30))
    thread.start()
    wait_for_sleepers(Path(f"{file.path}.lock"))
    file.commit(np.asarray(IDS, dtype=np.int64), len(IDS))
    thread.join()
    assert place.files(place.storage) == []


def test_an_error_and_a_lonely_lock_are_left_over_too(place: Place) -> None:
    name = RequestNames(TOKEN, "00ff")
    place.begin("cmpl-" + name.row(1, 1)).fail("because")
    lonely = place.publish("cmpl-" + name.row(2, 1))
    lonely.unlink()
    found = find_leftovers([place.storage], {TOKEN})
    assert sorted(found, key=str) == [1, 2]
    remove_leftovers([path for paths in found.values() for path in paths], 0)
    assert place.files(place.storage) == []


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 99))
def test_names_lead_back_to_what_they_were_made_of(row: int, attempt: int) -> None:
    names = RequestNames.for_this_process(TOKEN)
    for name in (
        f"cmpl-{names.row(row, attempt)}-0-0123abcd",
        f"chatcmpl-{names.row(row, attempt)}-0123abcd",
        f"cmpl-{names.row(row, attempt)}-0",
    ):
        for suffix in ("", ".lock", ".error"):
            assert server_file(file_name(name) + suffix) == (file_name(name), TOKEN, row)
    assert row_of_file(row_file(row)) == row
    assert is_hidden_file(hidden_file(row_file(row), TOKEN), TOKEN)
    assert not is_hidden_file(hidden_file(row_file(row), TOKEN), "f" * 12)


@settings(deadline=None)
@given(st.text() | st.from_regex(r"hs_[0-9]{1,3}\.safetensors(\.lock)?", fullmatch=True))
def test_only_the_name_of_a_row_is_a_row_s(name: str) -> None:
    row = row_of_file(name)
    assert row is None or row_file(row) == name
