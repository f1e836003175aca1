"""docs/file-format.md: its keys, code and commands do what they say."""

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
from shard_harness import sealed_shards
from sink_harness import FORMAT, MIB, bits, finite_rows, publish, token_ids

from vllm_ascend_hsx import load
from vllm_ascend_hsx.cli import serve
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import SinkFile
from vllm_ascend_hsx.sinks.shard import ShardSink

PAGE_TEXT = (Path(__file__).parents[3] / "docs" / "file-format.md").read_text()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return sealed_shards(tmp_path / "storage")


def keys(label: str) -> set[str]:
    table = PAGE_TEXT.partition(f"<!-- {label} -->\n")[2].partition("\n\n")[0]
    return {
        key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def code(label: str) -> str:
    (found,) = re.findall(rf"<!-- {label} -->\n```\w+\n(.*?)```", PAGE_TEXT, re.DOTALL)
    return str(found)


def test_the_page_names_the_keys_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest says nothing of weights: other members may have others."""
    monkeypatch.setattr(
        SinkFile, "origin", Origin([WeightVersion(fingerprint="0a" * 16)], is_aborted=True)
    )
    with ShardSink(tmp_path, replace(FORMAT, quantization="fp8"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
        remove(tmp_path / "a-0123abcd.safetensors")
    (index,), (manifest,) = tmp_path.glob("hsx-*-*.jsonl"), tmp_path.glob("*.json")
    assert json.loads(index.read_text()).keys() == keys("index")
    assert json.loads((tmp_path / "hsx-removed.jsonl").read_text()).keys() == keys("removed")
    assert json.loads(manifest.read_text()).keys() == keys("manifest")


@pytest.mark.parametrize("label", ["read", "slice"])
def test_the_code_of_the_page_reads_a_shard_without_this_package(
    tmp_path: Path, label: str
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a", 4)
    names: dict[str, Any] = {
        "shard": next(tmp_path.glob("*.tar")),
        "index": next(tmp_path.glob("*.jsonl")),
    }
    exec(code(label), names)
    assert np.array_equal(bits(names["tensors"]["hidden_states"]), finite_rows(0, 4))
    assert np.array_equal(names["tensors"]["token_ids"].numpy(), token_ids(4))


def test_shards_that_are_moved_as_the_page_says_answer_as_before(
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


def test_the_command_of_the_page_is_one() -> None:
    program, sub, *arguments = shlex.split(code("serve"))
    assert (program, sub) == ("hsx", "serve")
    options = serve.parse_arguments(arguments)
    config = HsxConfig.parse({"shared_storage_path": str(options.out), **dict(options.option)})
    assert (config.sink, config.shard_bytes) == ("shard", 8 << 30)
