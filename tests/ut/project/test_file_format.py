"""The keys, code and commands of docs/file-format.md are correct."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import blocks, page, rows
from shard_harness import sealed_shards
from sink_harness import (
    FORMAT,
    MIB,
    as_version_1,
    bits,
    finite_rows,
    make_rows,
    publish,
    token_ids,
)

from vllm_ascend_hsx import load
from vllm_ascend_hsx.cli import serve
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import Adapter
from vllm_ascend_hsx.protocol.weights import UNKNOWN, Origin, WeightVersion
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import SinkFile
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

PAGE = "file-format.md"


def table(label: str) -> list[list[str]]:
    return rows(page(PAGE).partition(f"<!-- {label} -->\n")[2].partition("\n\n")[0] + "\n")


def keys(label: str) -> list[str]:
    return [key for row in table(label) for key in re.findall(r"`(\w+)`", row[0])]


def code(label: str) -> str:
    (found,) = blocks(PAGE, label)
    return found


# Files


def test_documented_metadata_equals_the_metadata_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    of_files = []
    for row_format in (FORMAT, replace(FORMAT, quantization="fp8", basis="model")):
        with FileSink(tmp_path, row_format) as sink:
            more = {"arrived_ns": 1, "adapter": Adapter("a", "0a" * 16)} if row_format.basis else {}
            file = sink.open("one", path, **more)
            file.placeholders = [Placeholder("image", 1, 2)] if row_format.basis else ()
            file.origin = (
                Origin([WeightVersion(fingerprint="0a" * 16)], is_aborted=True)
                if row_format.basis
                else UNKNOWN
            )
            file.write(0, make_rows(0, 5))
            file.commit(token_ids(5), num_prompt_tokens=4)
        of_files.append(load(path, verify=True).metadata)
        content = path.read_bytes()
        path.unlink()
    plain, metadata = of_files
    assert keys("metadata") == list(metadata)
    of_some = (
        "quantization",
        "weights",
        "lora",
        "lora_weights",
        "basis",
        "arrived_ns",
        "placeholders",
        "weight_versions",
        "aborted",
    )
    assert [key for key in metadata if key not in of_some] == list(plain)
    meanings = {row[0].strip("`"): row[1] for row in table("metadata")}
    for key in ("format_version", "producer", "quantization", "checksum_algorithm"):
        assert meanings[key].startswith(f"`{metadata[key]}`")
    assert int.from_bytes(content[:8], "little") % 4096 == 4096 - 8


@pytest.mark.parametrize("version", ["1", "2"])
def test_documented_code_verifies_the_checksum(tmp_path: Path, version: str) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        file = sink.open('","checksum":"', path)
        file.write(0, make_rows(0, 5))
        file.commit(token_ids(5), num_prompt_tokens=4)
    good = path.read_bytes() if version == "2" else as_version_1(path.read_bytes())
    path.write_bytes(good)
    (code,) = blocks(PAGE, "checksum")
    names: dict[str, Any] = {"path": str(path)}
    exec(code, names)
    assert names["metadata"]["format_version"] == version
    for changed in (good.index(b"[2, 0, 3]") + 1, len(good) - 1):
        path.write_bytes(good[:changed] + bytes([good[changed] ^ 1]) + good[changed + 1 :])
        if version == "2" or changed > 4096:
            with pytest.raises(AssertionError, match="not as it was written"):
                exec(code, {"path": str(path)})


def test_error_file_has_the_documented_keys_and_documented_code_raises_it(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        sink.open("one", path, arrived_ns=1).fail("as a test")
    assert keys("error") == list(json.loads((tmp_path / "one.safetensors.error").read_text()))
    (code,) = blocks(PAGE, "read")
    with pytest.raises(RuntimeError, match="^as a test$"):
        exec(code, {"path": str(path)})


def test_documented_code_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        file = sink.open("one", path)
        file.write(0, make_rows(0, 5))
        file.commit(token_ids(5), num_prompt_tokens=5)
    names: dict[str, object] = {"path": str(path)}
    (code,) = blocks(PAGE, "read")
    exec(code, names)
    assert names["hidden_states"].equal(load(path).hidden_states)  # type: ignore[attr-defined]
    assert np.array_equal(names["token_ids"].numpy(), token_ids(5))  # type: ignore[attr-defined]
    assert names["layer_ids"] == list(FORMAT.layer_ids)


# Shards


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return sealed_shards(tmp_path / "storage")


def test_page_names_the_keys_of_index_removals_and_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has no keys for weights: members may have different weights."""
    monkeypatch.setattr(
        SinkFile, "origin", Origin([WeightVersion(fingerprint="0a" * 16)], is_aborted=True)
    )
    with ShardSink(tmp_path, replace(FORMAT, quantization="fp8"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
        remove(tmp_path / "a-0123abcd.safetensors")
    (index,), (manifest,) = tmp_path.glob("hsx-*-*.jsonl"), tmp_path.glob("*.json")
    assert json.loads(index.read_text()).keys() == set(keys("index"))
    assert json.loads((tmp_path / "hsx-removed.jsonl").read_text()).keys() == set(keys("removed"))
    assert json.loads(manifest.read_text()).keys() == set(keys("manifest"))


@pytest.mark.parametrize("label", ["read-shard", "slice-shard"])
def test_documented_code_reads_a_shard_without_this_package(tmp_path: Path, label: str) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a", 4)
    names: dict[str, Any] = {
        "shard": next(tmp_path.glob("*.tar")),
        "index": next(tmp_path.glob("*.jsonl")),
    }
    exec(code(label), names)
    assert np.array_equal(bits(names["tensors"]["hidden_states"]), finite_rows(0, 4))
    assert np.array_equal(names["tensors"]["token_ids"].numpy(), token_ids(4))


def test_shards_moved_by_the_documented_command_read_as_before(
    storage: Path, tmp_path: Path
) -> None:
    with ShardSink(storage, FORMAT, shard_bytes=MIB) as sink:
        for name in ("failed-0123abcd", "folder/failed-0123abcd"):
            sink.open("failed-0123abcd", storage / f"{name}.safetensors", 3).fail("no luck")
    remove(storage / "r1-0123abcd.safetensors")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        ["bash", "-ec", code("move")],
        cwd=storage,
        env={**os.environ, "TO": str(elsewhere)},
        check=True,
    )
    for name in ("failed-0123abcd", "folder/failed-0123abcd"):
        with pytest.raises(HiddenStatesError, match="no luck"):
            load(elsewhere / f"{name}.safetensors", 0)
    with pytest.raises(FileNotFoundError):
        load(elsewhere / "r1-0123abcd.safetensors", 0)
    assert Shards(elsewhere).members().keys() == {
        f"{name}-0123abcd.safetensors" for name in ("r0", "r2", "r3", "r4", "folder/in/r5")
    }
    assert (
        load(elsewhere / "folder/in/r5-0123abcd.safetensors", 0, verify=True).token_ids.numel() == 8
    )
    assert list(shard_problems(elsewhere)) == []


def test_documented_serve_command_selects_the_shard_sink() -> None:
    program, sub, *arguments = shlex.split(code("serve"))
    assert (program, sub) == ("hsx", "serve")
    options = serve.parse_arguments(arguments)
    config = HsxConfig.parse({"shared_storage_path": str(options.out), **dict(options.option)})
    assert (config.sink, config.shard_bytes) == ("shard", 8 << 30)
