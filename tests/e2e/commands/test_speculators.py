"""Unmodified speculators and hs-connectors launch our server, and load files for training.

The commands are from docs/speculators.md, on a tiny MiniMax-M2 and emulated NPUs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hs_connectors.transfer
import httpx
import pytest
import torch
from harness import compare_file, tokens
from launch import HERE, SPAWN, START_SECONDS, process_environment
from releases import installed_is

from vllm_ascend_hsx.demo.server import Server, free_port
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2
from vllm_ascend_hsx.integrations.speculators import HsxTransfer
from vllm_ascend_hsx.protocol.names import token_of_workspace
from vllm_ascend_hsx.serve.options import kv_transfer_config

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
DOCUMENT = (ROOT / "docs" / "speculators.md").read_text()
LAYERS = 8
LAYER_IDS = (2, 4, 5, 8)  # speculators' choice for 8 layers
WAIT_S = 60
# Replacements for the README server's sizes.
SMALL = (
    "--host 127.0.0.1 --max-model-len 512 --max-num-seqs 16 --max-num-batched-tokens 64 "
    "--enforce-eager --gpu-memory-utilization 0.4"
)
if installed_is(">=0.30"):
    SMALL += " --enable-scale-out"  # as in the document


def command(label: str, names: Mapping[str, object]) -> list[str]:
    """Return the words of the document's command with this label, with names replaced."""
    found = re.search(rf"<!-- {label} -->\n```bash\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    text = found[1].replace("\\\n", " ")
    for old, new in names.items():
        text = text.replace(old, str(new))
    for left in ("MiniMaxAI", "localhost", "/data/hidden_states", "scripts/"):
        assert left not in text
    program, *rest = shlex.split(text)
    return [str(BIN / program), *rest]


@dataclass
class Workplace:
    """A server and the directory of all files."""

    directory: Path
    model: Path
    server: Server

    @property
    def storage(self) -> Path:
        return self.directory / "hidden_states"

    @property
    def dataset(self) -> Path:
        return self.directory / "training_data"

    @property
    def samples(self) -> Path:
        return self.dataset / "hidden_states"

    @property
    def names(self) -> dict[str, object]:
        """Return the replacements for names in the document."""
        return {
            "MiniMaxAI/MiniMax-M2": self.model,
            "training_data": self.dataset,
            "http://localhost:8000": self.server.url,
        }

    def run(self, label: str, *more: str) -> str:
        """Run a command of the document with more options, and return the output."""
        words = command(label, self.names)
        own = {"HF_HOME": str(self.directory / "hf"), "COLUMNS": "300"}
        done = subprocess.run(
            [*words, *more],
            cwd=self.directory,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def request(self, prompt: list[int]) -> dict[str, Any]:
        """Send a request like speculators, and return the kv_transfer_params."""
        body = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": 1,
            "return_token_ids": True,
        }
        response = (
            httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
            .raise_for_status()
            .json()
        )
        assert response["choices"][0]["prompt_token_ids"] == prompt
        params: dict[str, Any] = response["kv_transfer_params"]
        return params

    @contextmanager
    def slow_disk(self) -> Iterator[Any]:
        """Write no row until the block ends or the yielded function is called."""
        with (self.directory / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield lambda: fcntl.flock(gate, fcntl.LOCK_UN)

    def left_over(self) -> list[str]:
        """Return the names in the server's directory except the workspace."""
        return sorted(name for name in os.listdir(self.storage) if token_of_workspace(name) is None)

    def assert_right(self, path: Path, prompt: list[int]) -> None:
        comparison = compare_file(path, self.model, prompt, LAYER_IDS)
        assert comparison.matches, comparison.reason


def conversations() -> list[dict[str, Any]]:
    """Return eleven conversations, one with two turns; some exceed one step of the server."""
    ends = [
        "the ships were ready.",
        "the people crossed the bridge.",
        "the captain asked for one more cup of coffee.",
    ]
    question, repeated = (
        "What does layer {} of the model say about the river?",
        "the sun rose over the harbour, and ",
    )
    found = [
        [question.format(i), "It says that " + repeated * (1 + i % 4) + ends[i % 3]]
        for i in range(10)
    ]
    found.append(
        [
            "And then?",
            "The sun rose.",
            "Who crossed the bridge?",
            "The people who cross it every day.",
        ]
    )
    roles = ["user", "assistant"]
    return [
        {"conversations": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}
        for turns in found
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    directory = tmp_path_factory.mktemp("speculators")
    model = build_minimax_m2(directory / "model", layers=LAYERS)
    (directory / "gate").touch()
    port = free_port()
    names = {
        "scripts/launch_vllm.py": HERE / "launch_script.py",
        "MiniMaxAI/MiniMax-M2": model,
        "/data/hidden_states": directory / "hidden_states",
        "--data-parallel-size 2 --tensor-parallel-size 8 --enable-expert-parallel": f"{SMALL} --port {port}",
    }
    environment = (
        process_environment(npus=1, instruments={"gated_writes": str(directory / "gate")}) | SPAWN
    )
    server = Server(
        command("launch", names), port=port, log=directory / "server.log", environment=environment
    )
    with server:
        server.wait_ready(START_SECONDS)
        yield Workplace(directory, model, server)


@pytest.fixture(scope="module")
def generated(workplace: Workplace) -> str:
    """The output of generate-offline-data for the conversations."""
    (workplace.directory / "conversations.jsonl").write_text(
        "\n".join(map(json.dumps, conversations()))
    )
    workplace.run("prepare", "--seq-length", "500")
    return workplace.run("generate")


@pytest.fixture(scope="module")
def rows(generated: str, workplace: Workplace) -> list[dict[str, Any]]:
    """The prepared dataset."""
    from datasets import load_from_disk

    return list(load_from_disk(str(workplace.dataset)).with_format(None))


@pytest.fixture(autouse=True)
def _leave_nothing(workplace: Workplace) -> Iterator[None]:
    """Clean up: one failure must cause no others."""
    yield
    for name in workplace.left_over():
        (workplace.storage / name).unlink()


class WatchedTime(SimpleNamespace):
    """`time` for their reader: `waits` is set when it finds the lock held; tests set `ahead`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()
        self.ahead = 0.0

    def monotonic(self) -> float:
        return self.ahead

    def sleep(self, seconds: float) -> None:
        self.waits.set()
        time.sleep(seconds)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedTime:
    clock = WatchedTime()
    monkeypatch.setattr(hs_connectors.transfer, "time", clock)
    return clock


class Reader(threading.Thread):
    """Reads a sample in another thread."""

    def __init__(self, transfer: Any, params: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.transfer, self.params = transfer, params
        self.sample: dict[str, torch.Tensor] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.sample = self.transfer.get_generated(self.params)
        except TimeoutError as error:
            self.error = error


def test_the_server_is_ours_and_extracts_the_layers_that_speculators_wants(
    workplace: Workplace,
) -> None:
    first, *_ = workplace.server.log.read_text().splitlines()
    assert "--hidden-states-backend hsx" in first
    assert workplace.server.process is not None
    words = Path(f"/proc/{workplace.server.process.pid}/cmdline").read_text().split("\0")
    options = dict(zip(words, words[1:], strict=False))
    assert json.loads(options["--kv_transfer_config"]) == kv_transfer_config(workplace.storage)
    speculative = json.loads(options["--speculative_config"])
    assert speculative["method"] == "extract_hidden_states"
    assert (
        tuple(speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"])
        == LAYER_IDS
    )


def test_speculators_reader_waits_from_before_the_commit(
    workplace: Workplace, watched: WatchedTime, tmp_path: Path
) -> None:
    prompt = tokens(150)
    with workplace.slow_disk() as let_write:
        params = workplace.request(prompt)
        path = Path(params["hidden_states_path"])
        transfer = hs_connectors.transfer.FileTransfer(tmp_path)
        reader = Reader(transfer, params)
        assert watched.waits.wait(WAIT_S)
        assert not path.exists()
        assert reader.sample is None
        let_write()
        reader.join(WAIT_S)
    assert reader.sample is not None
    assert reader.sample["token_ids"].tolist() == prompt
    workplace.assert_right(path, prompt)
    transfer.delete(str(path))
    assert workplace.left_over() == []


def test_our_reader_waits_longer_than_speculators_ten_seconds(
    workplace: Workplace, watched: WatchedTime, tmp_path: Path
) -> None:
    prompt = tokens(40)
    with workplace.slow_disk() as let_write:
        params = workplace.request(prompt)
        theirs = Reader(hs_connectors.transfer.FileTransfer(tmp_path), params)
        ours = Reader(HsxTransfer(tmp_path), params)
        assert watched.waits.wait(WAIT_S)
        watched.ahead = 10.0
        theirs.join(WAIT_S)
        assert "Timed out waiting for lock" in str(theirs.error)
        assert ours.is_alive()
        let_write()
        ours.join(WAIT_S)
    assert ours.sample is not None
    assert ours.sample["token_ids"].tolist() == prompt
    HsxTransfer(tmp_path).delete(params["hidden_states_path"])
    assert workplace.left_over() == []


def test_offline_generation_makes_a_dataset_of_the_right_rows(
    workplace: Workplace, generated: str, rows: list[dict[str, Any]]
) -> None:
    assert len(rows) == 12  # one of the eleven has two turns
    assert max(row["seq_len"] for row in rows) > 64
    assert "Saved 12 new data points" in generated
    assert "Skipping" not in generated
    assert sorted(path.name for path in workplace.samples.iterdir()) == sorted(
        f"hs_{i}.safetensors" for i in range(12)
    )
    for index, row in enumerate(rows):
        workplace.assert_right(workplace.samples / f"hs_{index}.safetensors", row["input_ids"])
    assert workplace.left_over() == []


def test_interrupted_generation_continues(workplace: Workplace, rows: list[dict[str, Any]]) -> None:
    from speculators.cli.generate_offline_data import generate_offline_data

    (workplace.samples / "hs_3.safetensors").unlink()
    cut = workplace.samples / "hs_7.safetensors"
    cut.write_bytes(cut.read_bytes()[:5000])
    before = {path.name: path.stat().st_mtime_ns for path in workplace.samples.iterdir()}
    endpoint = f"{workplace.server.url}/v1"
    generate_offline_data(
        endpoint=endpoint,
        preprocessed_data=str(workplace.dataset),
        concurrency=2,
        validate_outputs=True,
    )
    after = {path.name: path.stat().st_mtime_ns for path in workplace.samples.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {
        "hs_3.safetensors",
        "hs_7.safetensors",
    }
    for index in (3, 7):
        workplace.assert_right(
            workplace.samples / f"hs_{index}.safetensors", rows[index]["input_ids"]
        )


def loaders(workplace: Workplace, transfer: Any, on_missing: str) -> tuple[Any, Any]:
    """Create loaders like speculators' trainer."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    return create_train_val_loaders(
        data_path=str(workplace.dataset),
        total_seq_len=256,
        hidden_states_dtype=torch.bfloat16,
        transfer=transfer,
        vllm_endpoint=f"{workplace.server.url}/v1",
        on_missing=on_missing,
        verifier_name_or_path=str(workplace.model),
        request_timeout=120,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=256,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
        train_data_ratio=0.75,
    )


@pytest.mark.parametrize("on_missing", ["raise", "generate"])
@pytest.mark.parametrize(
    "backend", [hs_connectors.transfer.FileTransfer, HsxTransfer], ids=["file", "hsx"]
)
def test_speculators_loader_accepts_every_sample(
    workplace: Workplace, rows: list[Any], tmp_path: Path, backend: Any, on_missing: str
) -> None:
    """Generated before or during training; in the second case the server keeps no sample."""
    transfer = backend(workplace.samples if on_missing == "raise" else tmp_path)
    seen = []
    for loader in loaders(workplace, transfer, on_missing):
        for batch in loader:
            assert batch["error_records"] == 0
            for document in range(int(batch["document_ids"].max()) + 1):
                mine = batch["document_ids"][0] == document
                seen.append(batch["input_ids"][0, mine].tolist())
                assert batch["hidden_states"][0, mine].shape == (len(seen[-1]), 3 * 256)
                assert batch["verifier_last_hidden_states"][0, mine].abs().sum(-1).min() > 0
    assert sorted(seen) == sorted(row["input_ids"][1:] for row in rows)
    assert workplace.left_over() == []
