"""`hsx generate` against a server of `hsx serve`: after kills and restarts every row is right."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import compare_file, tokens
from launch import START_SECONDS, process_environment
from safetensors.torch import load_file, save_file

from vllm_ascend_hsx import load, remove
from vllm_ascend_hsx.checkpoint import find_checkpoint, fingerprint
from vllm_ascend_hsx.demo.server import Server, free_port

LAYER_IDS = (4, 1, 3)
MAX_MODEL_LEN = 512
LENGTHS = (5, 70, 1, 130, 33, 64, 65, 9, 200, 17)
ROOT = Path(__file__).parents[3]
DIES_AT = 60  # number of the system call: some rows have a file, some are in progress


@dataclass
class Serving:
    """A server, and runs of the command against it."""

    server: Server
    model: Path
    storage: Path
    work: Path

    def generate(
        self, output: str, records: list[dict[str, Any]], *options: str, dies_at: int | None = None
    ) -> tuple[int, str]:
        """Return exit code and output."""
        data = self.work / f"{output}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in records))
        arguments = [
            "--data",
            str(data),
            "--output",
            str(self.storage / output),
            "--endpoint",
            f"{self.server.url}/v1",
            *options,
        ]
        command = [sys.executable, "-m", "vllm_ascend_hsx.cli.main", "generate"]
        if dies_at is not None:
            command = [
                sys.executable,
                "-m",
                "tests.ut.fakes.generate_process",
                str(self.work / "killed.log"),
                str(dies_at),
            ]
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=250,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def left(self, output: str = "") -> list[str]:
        """Return the visible names in the server's directory or in a folder below."""
        return sorted(
            path.name for path in (self.storage / output).iterdir() if not path.name.startswith(".")
        )

    def ledger(self, output: str) -> dict[int, dict[str, Any]]:
        """Return the last line of each row."""
        lines = map(json.loads, (self.storage / output / "ledger.jsonl").read_text().splitlines())
        return {line["row"]: line for line in lines if "row" in line}

    def path(self, output: str, row: int) -> Path:
        return self.storage / output / f"hs_{row}.safetensors"


@pytest.fixture(scope="module")
def serving(tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("generate")
    with serve(tiny_minimax_m2, directory / "hidden_states", directory) as started:
        yield started


@contextmanager
def serve(
    model: Path,
    storage: Path,
    directory: Path,
    *options: str,
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> Iterator[Serving]:
    """Start a server; the log and datasets are in `directory`."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm_ascend_hsx.cli.main", "serve", str(model)),
        *(
            "--layers",
            ",".join(map(str, layer_ids)),
            "--out",
            str(storage),
            "--option",
            "extract=requested",
            "--",
        ),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--enforce-eager",
            "--gpu-memory-utilization",
            "0.4",
        ),
        *(
            "--max-model-len",
            str(MAX_MODEL_LEN),
            "--max-num-seqs",
            "16",
            "--max-num-batched-tokens",
            "64",
        ),
        *options,
    ]
    server = Server(
        command, port=port, log=directory / "server.log", environment=process_environment(npus=1)
    )
    with server:
        server.wait_ready(START_SECONDS)
        yield Serving(server, model, storage, directory)


def cached_tokens(server: Server) -> float:
    """Return the number of prompt tokens found in the prefix cache."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:prefix_cache_hits_total")
    )


def test_with_extraction_on_request_plain_requests_use_the_prefix_cache_and_leave_no_file(
    serving: Serving,
) -> None:
    before, reused = cached_tokens(serving.server), 0
    for params in (None, None, {"hidden_states": True}, {"include_output_tokens": True}):
        body = {
            "model": str(serving.model),
            "prompt": tokens(300),
            "max_tokens": 1,
            **({"kv_transfer_params": params} if params else {}),
        }
        response = (
            httpx.post(f"{serving.server.url}/v1/completions", json=body, timeout=120)
            .raise_for_status()
            .json()
        )
        if params is None:
            assert response["kv_transfer_params"] is None
            assert serving.left() == []
        else:
            assert load(
                response["kv_transfer_params"]["hidden_states_path"], timeout=60
            ).token_ids.tolist() == tokens(300)
            remove(response["kv_transfer_params"]["hidden_states_path"])
            reused += response["kv_transfer_params"].get("reused_tokens", 0)
    assert cached_tokens(serving.server) - before == 256 + reused  # of the second, in whole blocks


def test_every_row_is_right_after_kills_and_restarts(serving: Serving) -> None:
    records = [{"token_ids": tokens(length)} for length in LENGTHS]
    code, printed = serving.generate(
        "tokens", records, "--validate", "--concurrency", "3", dies_at=DIES_AT
    )
    assert code == -signal.SIGKILL, printed
    before = {row for row in range(len(LENGTHS)) if serving.path("tokens", row).exists()}
    assert 0 < len(before) < len(LENGTHS)
    stamps = {row: serving.path("tokens", row).stat().st_mtime_ns for row in before}

    code, printed = serving.generate("tokens", records, "--concurrency", "3")
    assert code == 0, printed
    assert {row: serving.path("tokens", row).stat().st_mtime_ns for row in before} == stamps
    assert serving.left("tokens") == sorted(
        ["ledger.jsonl", *(f"hs_{row}.safetensors" for row in range(10))]
    )
    for row, record in enumerate(records):
        comparison = compare_file(
            serving.path("tokens", row), serving.model, record["token_ids"], LAYER_IDS
        )
        assert comparison.matches, (row, comparison)
    lines = serving.ledger("tokens")
    assert {line["status"] for line in lines.values()} <= {"done", "found"}
    assert {row: line["attempts"] for row, line in lines.items() if line["status"] == "done"} == {
        row: 1 for row, line in lines.items() if line["status"] == "done"
    }
    checkpoint = find_checkpoint(serving.model, "auto")
    assert checkpoint is not None
    assert {load(serving.path("tokens", row)).metadata["weights"] for row in range(10)} == {
        fingerprint(checkpoint)
    }
    # Existing files are unchanged.
    code, printed = serving.generate("tokens", records, "--validate")
    assert code == 0, printed


@pytest.mark.long
def test_changed_checkpoint_under_the_same_name_is_refused(
    serving: Serving, tmp_path: Path
) -> None:
    records = [{"token_ids": tokens(length)} for length in LENGTHS]
    assert serving.generate("replaced", records, "--validate", "--limit", "4")[0] == 0
    model = Path(shutil.copytree(serving.model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] *= 1.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    before = {
        name: (serving.storage / "replaced" / name).read_bytes()
        for name in serving.left("replaced")
    }
    with serve(
        model, serving.storage, tmp_path, "--served-model-name", str(serving.model)
    ) as other:
        code, printed = other.generate("replaced", records, "--validate")
    assert code == 2 and "holds rows of another server: weights was " in printed, printed
    assert serving.left("replaced") == list(before)
    ledger = before.pop("ledger.jsonl")
    after = (serving.storage / "replaced" / "ledger.jsonl").read_bytes()
    assert after.startswith(ledger)
    new = [next(iter(json.loads(line))) for line in after.removeprefix(ledger).splitlines()]
    assert new == ["run", "state", "state"], "no row"
    assert {name: (serving.storage / "replaced" / name).read_bytes() for name in before} == before


def test_texts_chats_and_rows_of_generated_tokens_and_a_row_that_is_too_long(
    serving: Serving,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(serving.model)
    said = [{"role": "user", "content": "Which way?"}]
    answered = [*said, {"role": "assistant", "content": "That one."}]
    chats = (
        [{"from": "human", "value": "Which way?"}],
        [{"from": "human", "value": "Which way?"}, {"from": "gpt", "value": "That one."}],
    )
    records = [
        {"prompt": "The capital of France"},
        *({"conversations": chat} for chat in chats),
        {"input_ids": tokens(MAX_MODEL_LEN + 1)},
    ]
    code, printed = serving.generate(
        "texts", records, "--validate", "--include-output-tokens", "--max-tokens", "6"
    )
    assert code == 1, printed
    prompts = [
        tokenizer("The capital of France").input_ids,
        tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"],
        tokenizer.apply_chat_template(answered)["input_ids"],
    ]
    for row, prompt in enumerate(prompts):
        stored = load_file(serving.path("texts", row))["token_ids"].tolist()
        assert stored[: len(prompt)] == prompt
        assert len(prompt) < len(stored) <= len(prompt) + 5
        assert compare_file(serving.path("texts", row), serving.model, stored, LAYER_IDS).matches
    failed = serving.ledger("texts")[3]
    assert (failed["status"], failed["attempts"]) == ("failed", 1)
    assert "answers 400: " in failed["error"] and "maximum context length" in failed["error"]
    files = [
        "answers.jsonl",
        *(f"hs_{row}.safetensors" for row in range(3)),
        "ledger.jsonl",
        "training_data",
    ]
    assert serving.left("texts") == files


def test_an_interrupted_run_aborts_its_requests_on_the_server(serving: Serving) -> None:
    """Ctrl-C arrives while a request generates: the server keeps nothing."""
    records = [{"token_ids": tokens(20)}]
    data = serving.work / "long.jsonl"
    data.write_text(json.dumps(records[0]))
    command = [
        sys.executable,
        "-m",
        "vllm_ascend_hsx.cli.main",
        "generate",
        "--data",
        str(data),
        "--output",
        str(serving.storage / "long"),
    ]
    command += [
        "--endpoint",
        serving.server.url,
        "--include-output-tokens",
        "--max-tokens",
        str(MAX_MODEL_LEN - 20),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not (serving.storage / "long" / "hs_0.safetensors.lock").exists():
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            assert process.returncode is None, process.communicate()[0]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "interrupted; finished rows are kept" in printed
    assert serving.left("long") == ["ledger.jsonl"]
    code, printed = serving.generate("after", [{"token_ids": tokens(20)}])
    assert code == 0, printed


def test_files_are_inspected_plotted_and_verified_and_a_changed_byte_is_found(
    serving: Serving,
) -> None:
    lengths = (5, 70, 33)
    code, printed = serving.generate("shown", [{"token_ids": tokens(length)} for length in lengths])
    assert code == 0, printed
    directory, damaged, plot = (
        serving.storage / "shown",
        serving.path("shown", 1),
        serving.work / "norms.png",
    )

    code, shown = hsx("inspect", directory)
    assert code == 0, shown
    rows = [line for line in shown.splitlines() if "hs_" in line]
    assert len(rows) == len(lengths)
    for row, length in enumerate(lengths):
        assert f"hs_{row}.safetensors" in rows[row]
        assert str(length) in rows[row]
    code, shown = hsx("inspect", damaged, "--plot", plot)
    assert code == 0, shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    for layer_id in LAYER_IDS:
        assert str(layer_id) in shown
    code, said = hsx("verify", directory, "--json")
    (result,) = [
        json.loads(line) for line in said.splitlines() if line.startswith("{")
    ]  # a slow command reports progress on stderr
    assert (code, result["good"]) == (0, len(lengths)), said

    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    code, said = hsx("verify", directory)
    assert code == 1
    assert damaged.name in said
    code, shown = hsx("inspect", damaged)
    assert code == 1
    assert "changed since it was written" in " ".join(shown.split())


def hsx(*words: object) -> tuple[int, str]:
    """Return exit code and output."""
    command = [sys.executable, "-m", "vllm_ascend_hsx.cli.main", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, timeout=250, check=False
    )
    return done.returncode, done.stdout + done.stderr
