"""Files that no server wrote: each is one clear error, and other files are not affected."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import DEEP, KINDS, plant_no_file, promptly
from safetensors.torch import save_file
from sink_harness import FORMAT, MIB, open_fds, publish, put

from vllm_ascend_hsx import HiddenStatesDataset, find, load, open_dir
from vllm_ascend_hsx.cli import clean, inspect, verify
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Files a and b, and the members c and d of a sealed shard."""
    where = tmp_path / "storage"
    with FileSink(where, FORMAT) as sink:
        publish(sink, where, "a")
        publish(sink, where, "b")
    with ShardSink(where, FORMAT, shard_bytes=MIB) as shards:
        publish(shards, where, "c")
        publish(shards, where, "d")
    return where


def name(letter: str) -> str:
    return f"{letter}-0123abcd.safetensors"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["data", "error", "lock", "tar"])
def test_load_refuses_irregular_files_at_once(storage: Path, kind: str, what: str) -> None:
    path = storage / name("c" if what == "tar" else "a")
    place = {"data": path, "tar": next(storage.glob("*.tar"))}.get(
        what, path.with_name(f"{path.name}.{what}")
    )
    words = plant_no_file(place, kind)
    before = open_fds()
    for options in ({}, {"mmap": True}, {"verify": True}):
        with pytest.raises(HiddenStatesError, match=f"{place.name}.* is {words}"):
            promptly(lambda options=options: load(path, 1, **options))  # type: ignore[misc]
    assert not open_fds() - before


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_and_verify_name_irregular_files_and_continue(
    storage: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = plant_no_file(storage / name("a"), kind)
    plant_no_file(storage / f"{name('e')}.error", kind)
    if kind != "directory":
        assert promptly(lambda: inspect.main([str(storage / name("a"))])) == 1
        assert words in capsys.readouterr().out
    assert promptly(lambda: inspect.main([str(storage)])) == 1
    assert capsys.readouterr().out.count("verified") == 3
    assert promptly(lambda: verify.main([str(storage), "--json", "--jobs", "1"])) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["good"] == 3
    assert [(Path(each["path"]).name, words in each["problem"]) for each in said["bad"]] == [
        (name("a"), True)
    ]
    assert [(Path(each["path"]).name, words in each["reason"]) for each in said["failed"]] == [
        (f"{name('e')}.error", True)
    ]
    assert promptly(lambda: find(storage, "b")) == storage / name("b")


@pytest.mark.parametrize("kind", [*KINDS, "link to a lock", "link to nothing"])
def test_foreign_lock_without_data_ends_the_wait(
    storage: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = storage / f"{name('e')}.lock"
    words = "no hidden states, lock or error|its server died|the server died"
    if kind in KINDS:
        words = plant_no_file(lock, kind)
    else:
        (tmp_path / "lock").touch()
        lock.symlink_to(tmp_path / kind.removeprefix("link to a "))
    with pytest.raises((HiddenStatesError, FileNotFoundError), match=words):
        promptly(lambda: load(storage / name("e"), 1))
    assert len(promptly(lambda: list(open_dir(storage)))) == 4
    promptly(lambda: verify.main([str(storage), "--json", "--jobs", "1"]))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["good"] == 4
    promptly(lambda: verify.main([str(storage), "--jobs", "1"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["tar", "json", "jsonl"])
def test_irregular_file_of_a_shard_affects_that_shard_only(
    storage: Path, kind: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = next(storage.glob(f"*.{suffix}"))
    words = plant_no_file(place, kind)
    ((where, problem),) = promptly(lambda: list(shard_problems(storage)))
    assert (where, words in problem) == (place.with_suffix(".tar"), True)
    found = [
        path.name
        for path, _ in promptly(lambda: list(open_dir(storage, on_bad=lambda error: None)))
    ]
    assert found == [
        name(letter) for letter in {"tar": "ab", "jsonl": "ab", "json": "abcd"}[suffix]
    ]
    assert promptly(lambda: verify.main([str(storage), "--json", "--jobs", "1"])) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["good"] == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_remove_does_not_write_into_irregular_files(storage: Path, kind: str) -> None:
    plant_no_file(storage / "hsx-removed.jsonl", kind)
    assert len(promptly(lambda: list(open_dir(storage)))) == 4
    with pytest.raises(OSError, match="removed"):
        promptly(lambda: remove(storage / name("c")))
    assert len(list(open_dir(storage))) == 4


def test_links_are_followed_to_data_and_lock(storage: Path, tmp_path: Path) -> None:
    target = shutil.move(storage / name("a"), tmp_path)
    shutil.move(storage / f"{name('a')}.lock", tmp_path)
    (storage / name("a")).symlink_to(target)
    (storage / f"{name('a')}.lock").symlink_to(f"{target}.lock")
    assert len(promptly(lambda: load(storage / name("a"), 1, verify=True)).token_ids) == 3


def test_open_dir_raises_for_a_bad_file_or_calls_on_bad(storage: Path) -> None:
    (storage / name("b")).write_bytes(b"nothing")
    with pytest.raises(HiddenStatesError, match=name("b")):
        list(open_dir(storage))
    told: list[HiddenStatesError] = []
    assert [path.name[0] for path, _ in open_dir(storage, on_bad=told.append)] == ["a", "c", "d"]
    assert [error.path for error in told] == [storage / name("b")]


# Headers that are JSON and invalid


def file_of(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


STATES = tensor("F32", [2, 1, 3], 0, 24)
IDS = tensor("I64", [2], 24, 40)
PLAIN: dict[str, Any] = {"hidden_states": STATES, "token_ids": IDS}


def with_states(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, "hidden_states": {**STATES, **changes}}


def with_metadata(**metadata: Any) -> dict[str, Any]:
    return {"__metadata__": metadata, **PLAIN}


ODD_HEADERS: dict[str, dict[str, Any] | str] = {
    "deep nesting": '{"hidden_states":' + DEEP + "}",
    "deep nesting without an end": '{"hidden_states":' + "[" * 100_000,
    "infinity as a shape": '{"hidden_states":{"dtype":"F32","shape":[Infinity,1,3],"data_offsets":[0,24]}}',
    "1e400 as a shape": json.dumps(with_states(shape="X")).replace('"X"', "[1e400,1,3]"),
    "nan as an offset": json.dumps(with_states(data_offsets="X")).replace('"X"', "[NaN,24]"),
    "1e400 as an offset": json.dumps(with_states(data_offsets="X")).replace('"X"', "[0,1e400]"),
    "a fraction as a shape": with_states(shape=[2.0, 1, 3]),
    "true as a shape": with_states(shape=[2, True, 3]),
    "a number of many digits": json.dumps(with_states(shape="X")).replace('"X"', "[" + "9" * 5000 + ",1,3]"),
    "a shape that no memory has": with_states(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
    "a shape of many dimensions": with_states(shape=[2, 1, 3] + [1] * 5000),
    "a shape of two dimensions": with_states(shape=[2, 3]),
    "a shape that is a word": with_states(shape="213"),
    "three offsets": with_states(data_offsets=[0, 24, 24]),
    "offsets in the wrong order": with_states(data_offsets=[24, 0]),
    "a dtype that is a list": with_states(dtype=["F32"]),
    "rows of integers": with_states(dtype="I32"),
    "ids of dtype F64": {**PLAIN, "token_ids": {**IDS, "dtype": "F64"}},
    "an entry that is a number": {**PLAIN, "more": 1},
    "tensors that overlap": {**PLAIN, "token_ids": {**IDS, "data_offsets": [20, 36]}, "more": tensor("U8", [4], 36, 40)},
    "bytes of no tensor": {**PLAIN, "hidden_states": {**STATES, "shape": [2, 1, 2], "data_offsets": [0, 16]}},
    "bytes after the last tensor": {"token_ids": tensor("I64", [2], 0, 16), "hidden_states": tensor("F32", [2, 1, 2], 16, 32)},
    "a key that is there twice": json.dumps(PLAIN)[:-1] + ',"token_ids":' + json.dumps(IDS) + "}",
    "a tensor outside": with_states(data_offsets=[2**62, 2**62 + 24]),
    "metadata that is a list": {"__metadata__": [["a", "b"]], **PLAIN},
    "metadata that is no text": with_metadata(layer_ids=[1]),
    "metadata with half a surrogate pair": with_metadata(model="\ud800"),
    "layer ids that are no JSON": with_metadata(layer_ids="[1,"),
    "layer ids that are a number": with_metadata(layer_ids="3"),
    "layer ids that are words": with_metadata(layer_ids='["a"]'),
    "layer ids that are nested": with_metadata(layer_ids=DEEP),
    "layer ids of null": with_metadata(layer_ids="null"),
    "a number of tokens that is none": with_metadata(num_prompt_tokens="many"),
    "a number of tokens of many digits": with_metadata(num_prompt_tokens="9" * 5000),
    "a negative number of tokens": with_metadata(num_prompt_tokens="-1"),
    "a number of tokens in other digits": with_metadata(num_prompt_tokens="２"),
    "images that are no JSON": with_metadata(placeholders='[["image",0,'),
    "images of null": with_metadata(placeholders="null"),
    "no images": with_metadata(placeholders="[]"),
    "images that are nested": with_metadata(placeholders=DEEP),
    "an image without rows": with_metadata(placeholders='[["image",0,0]]'),
    "an image before the first row": with_metadata(placeholders='[["image",-1,2]]'),
    "an image of half a row": with_metadata(placeholders='[["image",0,0.5]]'),
    "an image without a place": with_metadata(placeholders='[["image"]]'),
    "images that overlap": with_metadata(placeholders='[["image",0,2],["image",1,1]]'),
    "an image beyond the prompt": with_metadata(placeholders='[["image",0,2]]', num_prompt_tokens="1"),
    "a list": "[1,2]",
    "null": "null",
    "bytes that are no text": "\udcff",
}  # fmt: skip


def write_odd(path: Path, label: str) -> None:
    header = ODD_HEADERS[label]
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(file_of(text.encode("utf-8", "surrogateescape"), bytes(40)))


@pytest.mark.parametrize("label", ODD_HEADERS)
def test_invalid_header_is_one_error(tmp_path: Path, label: str) -> None:
    path = tmp_path / "odd.safetensors"
    write_odd(path, label)
    before = open_fds()
    for options in ({}, {"mmap": True}, {"verify": True}, {"dequantize": False}):
        with pytest.raises(HiddenStatesError, match="this is not a file of hidden states"):
            load(path, 0, **options)
    assert examine(path).problem is not None
    assert not open_fds() - before
    with pytest.raises(HiddenStatesError):
        HiddenStatesDataset([path])[0]


def test_valid_header_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    path.write_bytes(file_of(json.dumps(PLAIN).encode(), bytes(40)))
    assert load(path, 0).hidden_states.shape == (2, 1, 3)


@pytest.mark.parametrize("value", [2**27, 2**63, 2**64 - 1])
def test_header_longer_than_its_file_is_not_read(tmp_path: Path, value: int) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(value.to_bytes(8, "little") + bytes(100))
    with pytest.raises(HiddenStatesError, match="the first 8 state a header"):
        load(path, 0)


def test_inspect_and_verify_show_every_odd_file_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, label in enumerate(ODD_HEADERS):
        write_odd(tmp_path / f"{number}.safetensors", label)
    # Words that a terminal or rich would take for an instruction.
    save_file(
        {"hidden_states": torch.ones(2, 1, 3), "token_ids": torch.arange(2)},
        tmp_path / "good.safetensors",
        metadata={"model": "[/red]", "request_id": "\x1b[31m\0"},
    )
    os.rename(
        tmp_path / "good.safetensors", os.fsencode(tmp_path) + b"/[red][b]\x1b\xff.safetensors"
    )
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/[b]\x1b\xff.safetensors.lock")).touch()
    assert verify.main([str(tmp_path), "--json", "--jobs", "1"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["good"], len(said["bad"])) == (1, len(ODD_HEADERS))
    assert inspect.main([str(tmp_path)]) == 1
    assert "\x1b" not in capsys.readouterr().out
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    assert "\x1b" not in capsys.readouterr().out
    for path in tmp_path.glob("*.safetensors"):
        assert inspect.main([str(path)]) == (1 if path.stem.isdigit() else 0)
        assert "\x1b" not in capsys.readouterr().out


@pytest.fixture
def states() -> HiddenStates:
    return HiddenStates(torch.ones(2, 1, 3), torch.arange(2), {})


@pytest.mark.parametrize(
    "text", ["[1,", "3", '{"a":1}', DEEP, "[1.5]", "[true]", "9" * 5000], ids=range(7)
)
def test_changed_metadata_is_a_documented_error(states: HiddenStates, text: str) -> None:
    with pytest.raises(KeyError):
        _ = states.layer_ids
    changed = states._replace(metadata={"layer_ids": text, "num_prompt_tokens": text + "x"})
    with pytest.raises(ValueError, match="layer_ids"):
        _ = changed.layer_ids
    with pytest.raises(ValueError, match="num_prompt_tokens"):
        _ = changed.num_prompt_tokens


def test_token_ids_of_other_producers_become_int64(tmp_path: Path) -> None:
    save_file(
        {"hidden_states": torch.ones(2, 1, 3), "token_ids": torch.arange(2, dtype=torch.int32)},
        tmp_path / "a.safetensors",
    )
    for mmap in (False, True):
        assert load(tmp_path / "a.safetensors", mmap=mmap).token_ids.equal(torch.arange(2))


@pytest.mark.parametrize(
    "reason",
    ["[" * 100_000, '{"reason":' + DEEP + "}", "[1]", "null", "\udcff", '{"reason":1e400}'],
    ids=range(6),
)
def test_invalid_error_file_is_still_a_failure(
    tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors.error").write_bytes(reason.encode("utf-8", "surrogateescape"))
    with pytest.raises(HiddenStatesError, match="report of the failure is invalid") as raised:
        load(tmp_path / "a.safetensors", 0)
    assert len(raised.value.reason) < 1000
    assert verify.main([str(tmp_path), "--json", "--jobs", "1"]) == 1
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]) == 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("BF16", [1, 1 << 50, 0]), ("BF16", [0, 1 << 50, 4]), ("F8_E4M3", [1, 2, 4])],
)
def test_rows_of_invalid_shape_are_one_bad_file(
    tmp_path: Path, dtype: str, shape: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    size = math.prod(shape)
    header = {
        "hidden_states": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]},
        "token_ids": {
            "dtype": "I64",
            "shape": shape[:1],
            "data_offsets": [size, size + 8 * shape[0]],
        },
    }
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"\x7f" * size + bytes(8 * shape[0])
    )
    assert examine(tmp_path / "a.safetensors").problem is not None
    assert inspect.main([str(tmp_path)]) == 1
    assert "bad" in capsys.readouterr().out


def test_name_too_long_for_companions_is_read_and_removed(
    tmp_path: Path,
) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        put(sink.open("a", tmp_path / "a.safetensors", 2), 2)
    path = tmp_path / ("x" * 243 + ".safetensors")
    (tmp_path / "a.safetensors").rename(path)
    assert [each for each, _ in open_dir(tmp_path)] == [path]
    remove(path)
    assert list(open_dir(tmp_path)) == []
    lock = tmp_path / ("x" * 238 + ".safetensors.lock")
    lock.touch()
    assert clean.main([str(tmp_path)]) == 0
    assert not lock.exists()


@pytest.mark.parametrize("name", ["x" * 300, ".error", "a/../" + "y" * 256])
def test_inspect_of_an_impossible_path_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect.main([str(tmp_path / name)]) == 2
    assert "does not exist" in capsys.readouterr().err
