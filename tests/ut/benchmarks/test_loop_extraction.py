"""Extraction for the loop: the commands of both servers, and rows of vLLM's connector."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loop.corpus import stories
from benchmarks.loop.extraction import (
    extraction_command,
    rows_of_vllms_connector,
    vllms_command,
)
from benchmarks.loop.rows import read_rows
from benchmarks.loop.target import LAYER_IDS, Target, build_target
from vllm_ascend_hsx.config import PLUGIN_NAME
from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.server import Server, free_port

FAKE_SERVER = Path(__file__).parents[1] / "fakes" / "serve.py"
DATASET = stories(5, seed=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(build_target(tmp_path_factory.mktemp("target") / "target", steps=1))


@pytest.fixture(autouse=True)
def short_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a process of the fake server that ignores SIGTERM."""
    monkeypatch.setattr("vllm_ascend_hsx.demo.server.STOP_SECONDS", 1.0)


def extract(target: Target, directory: Path, fault: str) -> list[int]:
    """Extract the rows of the dataset from a fake server; return the numbers shown as progress."""
    port, shown = free_port(), list[int]()
    storage, layers = directory.with_name("storage"), json.dumps(LAYER_IDS)
    known = target.directory.with_name("known")
    command = [
        sys.executable,
        FAKE_SERVER,
        target.directory,
        storage,
        layers,
        port,
        "--known",
        known,
        "--fault",
        fault,
    ]
    with Server(
        [*map(str, command)], port=port, log=directory.with_name("log"), environment=os.environ
    ) as server:
        server.wait_ready(60)
        rows_of_vllms_connector(server.url, directory, DATASET, 60, shown.append)
    return shown


def test_rows_of_vllms_connector_have_the_order_of_the_dataset(
    target: Target, tmp_path: Path
) -> None:
    assert extract(target, tmp_path / "rows", "none") == [1, 2, 3, 4, 5]
    for (rows, token_ids), expected in zip(
        read_rows(tmp_path / "rows", len(DATASET)), DATASET, strict=True
    ):
        assert token_ids.tolist() == expected
        assert torch.equal(
            rows, reference_hidden_states(target.directory, expected, LAYER_IDS).to(torch.bfloat16)
        )


def test_file_with_other_tokens_is_an_error(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="does not have the tokens of prompt 0"):
        extract(target, tmp_path / "rows", "foreign tokens")


def test_vllms_connector_is_served_without_this_plugin(tmp_path: Path) -> None:
    command, environment = vllms_command(Target(tmp_path), tmp_path / "storage", 20000)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    assert PLUGIN_NAME not in environment["VLLM_PLUGINS"].split(",")
    assert "ascend" in environment["VLLM_PLUGINS"].split(",")


@pytest.mark.parametrize(
    ("options", "words"), [({}, []), ({"rotation": "keep"}, ["--option", "rotation=keep"])]
)
def test_connector_options_are_passed_to_hsx_serve(
    options: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    command = extraction_command(
        Target(tmp_path, quantised=True), tmp_path / "storage", 20000, options
    )
    ours, vllms = command[: command.index("--")], command[command.index("--") :]
    assert [word for word in ours if word == "--option" or "=" in word] == words
    assert vllms[vllms.index("--quantization") + 1] == "ascend"
