"""The commands of docs/train.md in order: from a data set with loss masks to a served draft."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks, page
from harness import compare_file
from launch import HERE, START_SECONDS, process_environment
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vllm_ascend_hsx.demo.server import Server, free_port
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2
from vllm_ascend_hsx.draft_layers import layers_of_draft

BIN = Path(sys.executable).parent
STEPS = ("prepare", "serve", "extract", "train", "draft", "request", "metrics")
# Tensors of a batch with an entry for each token.
ROWS = ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states")
DRAFT_TOKENS = 3
LAYERS = 8
LAYER_IDS = (2, 4, 5, 8)  # eagle3 of 8 layers
SAMPLES = 12
TRAINED = 9  # of these, with --train-data-ratio 0.75; the others are for validation
EPOCHS = 3
STEP_SECONDS = 600.0  # on a busy machine
# More options of `vllm serve`, for a tiny target.
SMALL = (
    " --host 127.0.0.1 --max-model-len 512 --max-num-seqs 16 --max-num-batched-tokens 64"
    " --enforce-eager --gpu-memory-utilization 0.4"
)
SHORT = f" --epochs {EPOCHS} --lr 1e-3 --total-seq-len 256 --num-workers 0 --train-data-ratio 0.75"


def command(step: str) -> str:
    """Return the command of a step as the page shows it."""
    (text,) = blocks("train.md", f"main-path {step}")
    return text.strip()


def samples(model: Path) -> list[dict[str, list[int]]]:
    """Return rows of one or two questions with answers. The masks select the answers."""
    encode = AutoTokenizer.from_pretrained(model).encode
    rows = []
    for number in range(SAMPLES):
        question = encode(f"What does layer {number} of the model say about the river?")
        answer = encode("the sun rose over the harbour, and " * (1 + number % 4))
        turns = 1 + number % 2
        mask = [0] * len(question) + [1] * len(answer)
        rows.append({"input_ids": (question + answer) * turns, "loss_mask": mask * turns})
    return rows


@dataclass
class Walk:
    """The directory that takes the place of /data, and the output of each command that ended."""

    directory: Path
    url: str = ""
    printed: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def batches(self) -> Path:
        """The batches that the trainer has computed."""
        return self.directory / "batches.pt"

    @property
    def draft(self) -> Path:
        return self.directory / "draft" / "checkpoint_best"

    @property
    def dataset(self) -> list[dict[str, Any]]:
        """The rows of the prepared data set, in order."""
        from datasets import load_from_disk

        return list(load_from_disk(str(self.directory / "training_data")).with_format(None))

    def row_file(self, row: int) -> Path:
        return self.directory / "hidden_states" / f"hs_{row}.safetensors"

    def adapt(self, text: str, more: str) -> str:
        """Return a command of the page with names of this directory and more options."""
        names = {
            "MiniMaxAI/MiniMax-M2": str(self.model),
            "/data/": f"{self.directory}/",
            "http://localhost:8000": self.url,
            "--data-parallel-size 2 --tensor-parallel-size 8": "--tensor-parallel-size 2",
            "hsx speculators": f"{sys.executable} {HERE / 'recorded_training.py'} {self.batches} speculators",
        }
        for old, new in names.items():
            text = text.replace(old, new)
        return text + more

    def environment(self, npus: int, ours: bool = True) -> dict[str, str]:
        return {
            **process_environment(npus=npus, ours=ours),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HF_HOME": str(self.directory / "hf"),
        }

    def run(self, step: str, more: str = "") -> None:
        """Run the command of a step until it ends."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.adapt(command(step), more)],
            cwd=self.directory,
            env={**os.environ, **self.environment(npus=1)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{step}: {done.stdout[-6000:]}"
        self.printed[step] = done.stdout

    def server(self, step: str, npus: int, ours: bool = True) -> Server:
        """Return the server that the command of a step starts."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["bash", "-c", f"exec {self.adapt(command(step), f'{SMALL} --port {port}')}"]
        log = self.directory / f"{step}.log"
        return Server(words, port=port, log=log, environment=self.environment(npus, ours))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Run all steps of the page."""
    walk = Walk(tmp_path_factory.mktemp("main_path"))
    build_minimax_m2(walk.model, layers=LAYERS)
    lines = map(json.dumps, samples(walk.model))
    (walk.directory / "samples.jsonl").write_text("\n".join(lines))
    walk.run("prepare")
    with walk.server("serve", npus=2) as server:
        server.wait_ready(START_SECONDS)
        walk.run("extract")
    walk.run("train", SHORT)
    with walk.server("draft", npus=2, ours=False) as server:
        server.wait_ready(START_SECONDS)
        walk.run("request")
        walk.run("metrics")
    return walk


def documents(batch: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each row in a batch, without padding."""
    numbers = batch["document_ids"][0]
    for number in range(int(numbers.max()) + 1):
        yield {name: batch[name][0][numbers == number] for name in ROWS}


def test_the_steps_are_in_the_order_of_the_page() -> None:
    labels = re.findall(r"^<!-- main-path (\w+) -->$", page("train.md"), re.MULTILINE)
    assert labels == list(STEPS)


def test_the_prepared_data_set_has_the_given_masks(walk: Walk) -> None:
    given = [{**each, "seq_len": len(each["input_ids"])} for each in samples(walk.model)]
    assert sorted(walk.dataset, key=str) == sorted(given, key=str)


def test_each_row_of_the_data_set_has_the_hidden_states_of_transformers(walk: Walk) -> None:
    for row, sample in enumerate(walk.dataset):
        comparison = compare_file(walk.row_file(row), walk.model, sample["input_ids"], LAYER_IDS)
        assert comparison.matches, (row, comparison.reason)


def test_the_trainer_computes_with_the_masks_of_the_data_set_and_the_rows_of_the_files(
    walk: Walk,
) -> None:
    """The draft reads a row and the next token, so trained rows have no first token."""
    dataset = walk.dataset
    seen: dict[bool, list[int]] = {True: [], False: []}
    for batch in torch.load(walk.batches):
        for document in documents(batch):
            ids = document["input_ids"].tolist()
            (row,) = [i for i, each in enumerate(dataset) if each["input_ids"][1:] == ids]
            states = load_file(walk.row_file(row))["hidden_states"]
            assert document["loss_mask"].tolist() == dataset[row]["loss_mask"][1:]
            assert torch.equal(document["hidden_states"], states[:-1, :-1].flatten(1))
            assert torch.equal(document["verifier_last_hidden_states"], states[1:, -1])
            seen[batch["training"]].append(row)
    assert sorted(seen[True]) == sorted(EPOCHS * list(range(TRAINED)))
    assert sorted(seen[False]) == sorted(EPOCHS * list(range(TRAINED, SAMPLES)))


def test_each_epoch_lowers_the_validation_loss(walk: Walk) -> None:
    files = [walk.draft.parent / str(epoch) / "val_metrics.json" for epoch in range(EPOCHS)]
    losses = [json.loads(file.read_text())["loss_epoch"] for file in files]
    assert losses == sorted(set(losses), reverse=True)
    assert losses[-1] < 0.97 * losses[0]


def test_vllm_ascend_without_this_plugin_drafts_with_the_result(walk: Walk) -> None:
    answer = json.loads(walk.printed["request"])
    assert answer["usage"]["completion_tokens"] > DRAFT_TOKENS
    families = text_string_to_metric_families(walk.printed["metrics"])
    counts = {sample.name: sample.value for family in families for sample in family.samples}
    drafts, drafted = (
        counts[f"vllm:spec_decode_num_{each}_total"] for each in ("drafts", "draft_tokens")
    )
    assert 0 < drafts < drafted <= drafts * DRAFT_TOKENS


def test_the_layers_of_the_draft_are_those_of_the_files(walk: Walk) -> None:
    assert layers_of_draft(str(walk.draft), LAYERS) == LAYER_IDS
