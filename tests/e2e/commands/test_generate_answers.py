"""Sampled answers of a target are a training set: a second pass and speculators agree with them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from documents import blocks
from harness import tokens
from launch import process_environment
from safetensors.torch import load_file
from test_generate import Serving, serve
from test_speculators import BIN, LAYER_IDS, LAYERS
from transformers import AutoTokenizer

from vllm_ascend_hsx.demo.tiny_models import build_qwen3

pytestmark = pytest.mark.long

ROWS = 50
EPOCHS = 3
TEXTS = 20  # the first rows are texts and chats
MAX_TOKENS = 12
TOLERANCE = 1e-4  # relative, of float32 rows
SAMPLED = (
    "--include-output",
    "--max-tokens",
    str(MAX_TOKENS),
    "--temperature",
    "1",
    "--top-p",
    "0.95",
    "--seed",
    "3",
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("answers")
    model = build_qwen3(directory / "model", dtype="float32", layers=LAYERS)
    with serve(
        model, directory / "hidden_states", directory, "--dtype", "float32", layer_ids=LAYER_IDS
    ) as started:
        yield started


@pytest.fixture(scope="module")
def answers(serving: Serving) -> dict[int, dict[str, Any]]:
    """The lines of 50 sampled answers, to token ids, texts and chats."""
    texts = [{"prompt": f"The ship number {row}"} for row in range(TEXTS // 2)]
    chats = [
        {"messages": [{"role": "user", "content": f"What is {row}?"}]} for row in range(TEXTS // 2)
    ]
    records = [
        *texts,
        *chats,
        *({"token_ids": tokens(length)} for length in range(3, 3 + ROWS - TEXTS)),
    ]
    code, printed = serving.generate("answers", records, "--validate", *SAMPLED)
    assert code == 0, printed
    lines = map(
        json.loads,
        filter(str.strip, (serving.storage / "answers" / "answers.jsonl").read_text().splitlines()),
    )
    return {line["row"]: line for line in lines}


def test_text_ids_mask_and_rows_equal_a_second_pass(
    serving: Serving, answers: dict[int, dict[str, Any]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(serving.model)
    trained = datasets.load_from_disk(serving.storage / "answers" / "training_data")
    assert len(answers) == len(trained) == ROWS
    assert len({tuple(line["output_token_ids"]) for line in answers.values()}) > ROWS // 2, (
        "they are sampled"
    )
    code, printed = serving.generate(
        "second", [{"token_ids": answers[row]["token_ids"]} for row in range(ROWS)], "--validate"
    )
    assert code == 0, printed
    for row, line in answers.items():
        once, again = (load_file(serving.path(folder, row)) for folder in ("answers", "second"))
        assert (
            once["token_ids"].tolist()
            == again["token_ids"].tolist()
            == line["token_ids"]
            == trained[row]["input_ids"].tolist()
        )
        assert (once["hidden_states"] - again["hidden_states"]).abs().max() < TOLERANCE
        answer = line["token_ids"][line["prompt_tokens"] :]
        assert (
            answer == line["output_token_ids"][:-1] and len(line["output_token_ids"]) <= MAX_TOKENS
        )
        assert line["finish_reason"] == (
            "length" if len(line["output_token_ids"]) == MAX_TOKENS else "stop"
        )
        # vLLM omits a partial character at the end. If a prompt ends within a character, as random
        # tokens do, the answer's text begins with the end of the prompt.
        text = tokenizer.decode(line["output_token_ids"], skip_special_tokens=True).rstrip("\ufffd")
        sent = line["text"].rstrip("\ufffd")
        assert sent == text or (row >= TEXTS and sent.endswith(text.lstrip("\ufffd")))
        assert torch.equal(
            trained[row]["loss_mask"], torch.tensor([0] * line["prompt_tokens"] + [1] * len(answer))
        )


def test_finished_answers_are_not_requested_again(
    serving: Serving, answers: dict[int, dict[str, Any]]
) -> None:
    records = [
        json.loads(line) for line in (serving.work / "answers.jsonl").read_text().splitlines()
    ]
    before = serving.ledger("answers")
    code, printed = serving.generate("answers", records, *SAMPLED)
    assert code == 0 and serving.ledger("answers") == before, printed


def test_unmodified_speculators_trains_on_them_without_conversion(
    serving: Serving, answers: dict[int, dict[str, Any]]
) -> None:
    (text,) = blocks("generate.md", "train-on-answers")
    for name, value in {
        "MiniMaxAI/MiniMax-M2": serving.model,
        "/data/hidden_states": serving.storage / "answers",
    }.items():
        text = text.replace(name, str(value))
    program, *words = shlex.split(text.replace("\\\n", " "))
    words += f"--epochs {EPOCHS} --total-seq-len 128 --num-workers 0 --lr 1e-3 --train-data-ratio 0.75".split()
    environment = {
        **os.environ,
        **process_environment(npus=1),
        "HF_HOME": str(serving.work / "hf"),
        "COLUMNS": "300",
    }
    done = subprocess.run(
        [str(BIN / program), *words],
        cwd=serving.work,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    metrics: list[Path] = [
        serving.work / "checkpoints" / str(epoch) / "val_metrics.json" for epoch in range(EPOCHS)
    ]
    losses = [json.loads(path.read_text())["loss_epoch"] for path in metrics]
    assert losses[-1] < losses[0], losses
