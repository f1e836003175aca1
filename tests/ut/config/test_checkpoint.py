"""The fingerprint of a checkpoint: changes that affect it, and the bytes that it reads."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from vllm_ascend_hsx import checkpoint
from vllm_ascend_hsx.checkpoint import MOST_PIECES, PIECE, find_checkpoint, fingerprint, weights_of

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DESCRIPTION = "quant_model_description.json"
WHOLE_FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(place: Path, seed: int = 0, elements: int = 64) -> Path:
    """Make a checkpoint of two shards with two tensors each."""
    place.mkdir(parents=True)
    random = np.random.default_rng(seed)
    names = {}
    for shard, name in enumerate(SHARDS):
        tensors = {
            f"layers.{shard}.{kind}": random.random(elements).astype(np.float16)
            for kind in ("q_proj", "up_proj")
        }
        save_file(tensors, place / name)
        names |= dict.fromkeys(tensors, name)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    (place / "config.json").write_text('{"hidden_size":8}')
    (place / DESCRIPTION).write_text('{"layers.0.q_proj":"FLOAT"}')
    return place


def of(place: Path, load_format: str = "auto") -> str:
    found = find_checkpoint(place, load_format)
    assert found is not None
    return fingerprint(found)


def config(model: Path | str, **changes: Any) -> Any:
    """Return the part of a VllmConfig that is read."""
    values: dict[str, Any] = {
        "revision": None,
        "download_dir": None,
        "load_format": "auto",
    } | changes
    load = SimpleNamespace(download_dir=values["download_dir"], load_format=values["load_format"])
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=values["revision"]),
        load_config=load,
    )


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


def test_fingerprint_depends_only_on_contents(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    second = Path(shutil.copytree(first, tmp_path / "b/c", copy_function=shutil.copyfile))
    for path in second.iterdir():
        os.utime(path, (1, 1))
    linked = tmp_path / "linked"  # as in the cache of a hub
    linked.mkdir()
    for path in first.iterdir():
        (linked / path.name).symlink_to(path)
    assert (
        len({of(first), of(second), of(linked), *(weights_of(config(first)) for _ in range(3))})
        == 1
    )
    assert len(of(first)) == 32 and set(of(first)) <= set("0123456789abcdef")


def test_pipes_and_directories_are_ignored_without_blocking(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    before = of(place)
    os.mkfifo(place / "params.json")
    os.mkfifo(place / "quant_model_description_w8a8.json")
    (place / "zz.safetensors").mkdir()
    (place / "model.safetensors.index.json").unlink()
    assert weights_of(config(place)) == before
    (place / "params.json").unlink()
    (place / "params.json").symlink_to("nowhere")
    assert weights_of(config(place)) == before


@WHOLE_FILES
@given(st.sampled_from([*SHARDS, "config.json", DESCRIPTION]), st.data())
def test_any_byte_of_a_small_checkpoint_changes_the_fingerprint(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    place = tmp_path / "a"
    if not place.exists():
        make(place)
    before, path = of(place), place / name
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(
        whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    )
    assert of(place) != before
    path.write_bytes(whole)
    assert of(place) == before


@pytest.mark.parametrize("name", [*SHARDS, "config.json", DESCRIPTION])
def test_sizes_and_names_change_the_fingerprint(tmp_path: Path, name: str) -> None:
    place = make(tmp_path / "a")
    (place / "model.safetensors.index.json").unlink()
    before, path = of(place), place / name
    with path.open("ab") as file:
        file.write(b"\0")
    assert of(place) != before
    os.truncate(path, path.stat().st_size - 1)
    assert of(place) == before
    if name in SHARDS:
        path.rename(place / "model-3.safetensors")
        assert of(place) != before


@pytest.mark.parametrize(
    "tensor", ["layers.0.q_proj", "layers.0.up_proj", "layers.1.q_proj", "layers.1.up_proj"]
)
def test_training_one_tensor_changes_the_fingerprint(tmp_path: Path, tensor: str) -> None:
    """The shapes stay the same, and most bytes are not sampled."""
    place = make(tmp_path / "a", elements=100 * PIECE)
    before = of(place)
    name = SHARDS[int(tensor.split(".")[1])]
    whole = bytearray((place / name).read_bytes())
    length = int.from_bytes(whole[:8], "little")
    begin, end = json.loads(whole[8 : 8 + length])[tensor]["data_offsets"]
    rows = np.frombuffer(whole, np.uint8)[8 + length + begin : 8 + length + end]
    rows[::2] ^= 1  # the last bit of each number
    (place / name).write_bytes(whole)
    assert of(place) != before


@pytest.mark.parametrize("suffix", ["bin", "pt", "gguf"])
def test_files_without_a_header_are_sampled_from_the_first_byte_to_the_last(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"model.{suffix}"
    whole = np.random.default_rng(0).bytes(1 << 22)
    found = set()
    for at in (None, 0, 1 << 20, len(whole) - 1):
        changed = bytearray(whole)
        if at is not None:
            changed[at] ^= 1
            changed[at // 2 : at // 2 + (1 << 17)] = bytes(1 << 17)
        path.write_bytes(changed)
        found.add(of(tmp_path))
    assert len(found) == 4
    assert of(path) == of(tmp_path)


def not_in_the_index(place: Path) -> None:
    save_file({"x": np.zeros(4, np.float16)}, place / "adapter_model.safetensors")


UNUSED: dict[str, Callable[[Path], object]] = {
    "notes": lambda place: (place / "README.md").write_text("x"),
    "other formats": lambda place: (place / "pytorch_model.bin").write_bytes(b"x"),
    "of the tokenizer": lambda place: (place / "tokenizer.json").write_text("{}"),
    "folders": lambda place: make(place / "original"),
    "not in the index": not_in_the_index,
}


@pytest.mark.parametrize("name", UNUSED)
def test_files_that_vllm_does_not_load_do_not_change_the_fingerprint(
    tmp_path: Path, name: str
) -> None:
    place = make(tmp_path / "a")
    before = of(place)
    UNUSED[name](place)
    assert of(place) == before


def test_the_load_format_decides_which_files_are_loaded(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    before = of(place)
    save_file({"x": np.zeros(4, np.float16)}, place / "consolidated.safetensors")
    assert of(place, "safetensors") == before
    assert of(place) == of(place, "mistral") != before
    for name in ("model.pt", "model.bin", "training_args.bin"):
        (place / name).write_bytes(name.encode())
    found = {each: find_checkpoint(place, each) for each in ("pt", "npcache", "gguf", "hf")}
    names = {
        each: None if found is None else [path.name for path in found.weights]
        for each, found in found.items()
    }
    assert names == {"pt": ["model.pt"], "npcache": ["model.bin"], "gguf": None, "hf": list(SHARDS)}


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "modelexpress", "a plugin's"])
def test_weights_from_other_sources_have_no_fingerprint(tmp_path: Path, load_format: str) -> None:
    assert weights_of(config(make(tmp_path / "a"), load_format=load_format)) == ""


@pytest.mark.usefixtures("no_network")
def test_model_without_local_files_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        "{}"
    )  # vLLM keeps only the configuration of a model in an object store
    for model in (tmp_path, "s3://bucket/model", "somebody/model"):
        assert weights_of(config(model, download_dir=str(tmp_path / "cache"))) == ""


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("revision", [None, "v2"])
def test_hub_name_resolves_to_the_loaded_snapshot(tmp_path: Path, revision: str | None) -> None:
    cache = tmp_path / "cache"
    repository = cache / "models--somebody--model"
    for seed, (name, commit) in enumerate({"main": "a" * 40, "v2": "b" * 40}.items()):
        make(repository / "snapshots" / commit, seed)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    loaded = repository / "snapshots" / ("a" * 40 if revision is None else "b" * 40)
    assert huggingface_hub.snapshot_download(
        "somebody/model", cache_dir=cache, revision=revision, local_files_only=True
    ) == str(loaded)
    assert weights_of(config("somebody/model", revision=revision, download_dir=str(cache))) == of(
        loaded
    )


def test_modelscope_name_resolves_to_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, asked = make(tmp_path / "a"), []

    def snapshot_download(model: str, **options: object) -> str:
        asked.append((model, options))
        return str(place)

    modules = {
        "modelscope": {},
        "modelscope.hub": {},
        "modelscope.hub.snapshot_download": {"snapshot_download": snapshot_download},
    }
    for name, values in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace(**values))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert weights_of(config("somebody/model", revision="v2", download_dir="/cache")) == of(place)
    assert asked == [("somebody/model", {"revision": "v2", "local_files_only": True})]


def test_model_that_modelscope_has_not_downloaded_has_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot_download(model: str, **options: object) -> str:
        raise ValueError("Cannot find the requested files in the cached path")

    modules = {
        "modelscope": {},
        "modelscope.hub": {},
        "modelscope.hub.snapshot_download": {"snapshot_download": snapshot_download},
    }
    for name, values in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace(**values))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert checkpoint.local_checkpoint(config("somebody/model")) is None


@pytest.mark.parametrize("damage", ["no index", "index", "unreadable"])
def test_unreadable_checkpoint_is_logged_and_has_no_fingerprint(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = make(tmp_path / "a")
    if damage == "unreadable":
        (place / SHARDS[0]).unlink()
        os.mkfifo(place / SHARDS[0])
    else:
        (place / "model.safetensors.index.json").write_text("{}" if damage == "index" else "")
    with caplog.at_level("WARNING", checkpoint.logger.name):
        assert weights_of(config(place)) == ""
    assert "files will not name their weights" in caplog.text


@pytest.mark.parametrize(
    "header", [b"", b"[1]", b'{"a":{"data_offsets":[-1,2]}}', b'{"a":{}}', b"{" * 100_000, b"\xff"]
)
def test_file_with_an_invalid_header_is_sampled_as_bytes(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 100)
    before = of(tmp_path)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 99 + b"y")
    assert of(tmp_path) != before


@pytest.mark.parametrize(("files", "tensors"), [(1, 3), (1, 5000), (40, 200), (2100, 2)])
def test_bytes_read_are_bounded(
    tmp_path: Path, files: int, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 1 << 20
    header = {
        f"layers.{at}": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [at * each, (at + 1) * each],
        }
        for at in range(tensors)
    }
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text("{}")
    for number in range(files):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + tensors * each)  # sparse
    read = 0

    def pread(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        found = original(fd, size, offset)
        read += len(found)
        return found

    original = os.pread
    monkeypatch.setattr(os, "pread", pread)
    of(tmp_path)
    assert read <= len("{}") + files * (8 + len(text)) + max(files, MOST_PIECES) * PIECE
    assert read >= files * (8 + len(text) + min(tensors, max(1, MOST_PIECES // files)) * PIECE)
