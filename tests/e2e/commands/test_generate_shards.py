"""`hsx generate` into shards, DP=2 x TP=2: after a kill and restart each row exists once."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from harness import tokens
from launch import FLASHCOMM, START_SECONDS, tiny_server

from vllm_ascend_hsx import HiddenStatesDataset, load
from vllm_ascend_hsx.demo.reference import compare, reference_hidden_states
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.reader.members import shards_of

LAYER_IDS = (4, 1, 3)
LENGTHS = 3 * (5, 70, 1, 130, 33, 64, 65, 9, 200, 17)
ROOT = Path(__file__).parents[3]
SHARD_BYTES = 1 << 20
SEAL_SECONDS = 120.0
HSX = (sys.executable, "-m", "vllm_ascend_hsx.cli.main")


@pytest.fixture(scope="module")
def server(tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("in_place")
    connector = {"sink": "shard", "shard_bytes": SHARD_BYTES, "allow_custom_save_path": True}
    options = {"data_parallel": 2, "tensor_parallel": 2, "environ": FLASHCOMM}
    with tiny_server(
        directory, tiny_minimax_m2, LAYER_IDS, connector=connector, **options
    ) as server:
        server.wait_ready(START_SECONDS)
        yield server


def test_every_row_is_in_a_shard_and_right_after_kills_and_restarts(
    server: Server, tiny_minimax_m2: Path
) -> None:
    output = server.log.parent / "hidden_states"
    data = server.log.parent / "data.jsonl"
    data.write_text("".join(json.dumps({"token_ids": tokens(length)}) + "\n" for length in LENGTHS))
    arguments = ["--data", str(data), "--output", str(output), "--endpoint", f"{server.url}/v1"]
    with subprocess.Popen(
        [*HSX, "generate", *arguments, "--concurrency", "1"], stdout=subprocess.DEVNULL
    ) as killed:
        while len(shards_of(output).members()) < 3:
            with suppress(subprocess.TimeoutExpired):
                killed.wait(0.02)
            assert killed.returncode is None
        killed.kill()
    before = shards_of(output).members()
    assert 3 <= len(before) < len(LENGTHS)

    code, printed = hsx("generate", *arguments, "--validate")
    assert code == 0, printed
    after = shards_of(output).members()
    assert list(after) == sorted(f"hs_{row}.safetensors" for row in range(len(LENGTHS)))
    assert {name: after[name] for name in before} == before, "a finished row is not asked for again"
    assert sorted(
        path.name for path in output.iterdir() if not path.name.startswith((".", "hsx-"))
    ) == ["ledger.jsonl"]
    for row, length in enumerate(LENGTHS):
        states = load(output / f"hs_{row}.safetensors", verify=True)
        assert states.token_ids.tolist() == tokens(length)
        comparison = compare(
            states.hidden_states,
            reference_hidden_states(tiny_minimax_m2, tokens(length), LAYER_IDS),
        )
        assert comparison.matches, (row, comparison)
    assert [
        len(item["token_ids"]) for item in map(HiddenStatesDataset(output).__getitem__, range(2))
    ] == [LENGTHS[0], LENGTHS[1]]
    code, printed = hsx("verify", str(output), "--json")
    assert (code, json.loads(printed.splitlines()[0])["good"]) == (0, len(LENGTHS)), printed
    code, printed = hsx("inspect", str(output))
    assert code == 0
    assert printed.count("hs_") == len(LENGTHS)

    # A stopped server leaves complete tar files.
    server.stop(SEAL_SECONDS)
    names = []
    for shard in sorted(output.glob("hsx-*.tar")):
        assert json.loads(shard.with_suffix(".json").read_text())["sealed_by"] == "server"
        with tarfile.open(shard) as archive:
            names += [member.name for member in archive]
    assert sorted(names) == sorted(f"hs_{row}.safetensors" for row in range(len(LENGTHS)))


def hsx(*words: str) -> tuple[int, str]:
    """Return exit code and output."""
    done = subprocess.run(
        [*HSX, *words], cwd=ROOT, text=True, capture_output=True, timeout=250, check=False
    )
    return done.returncode, done.stdout + done.stderr
