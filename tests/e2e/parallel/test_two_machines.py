"""A server on two machines, with the commands of the quick start, in a shared directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from documents import blocks, parse_serve
from harness import compare_file, tokens
from launch import START_SECONDS, process_environment, smaller
from machines import CABLE, Machine, two_machines

from vllm_ascend_hsx.demo.metrics import parse, settle
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStatesError, load

LAYER_IDS = (4, 1, 3)
TP = 2
LENGTHS = 3 * (5, 70, 1, 130, 33, 64, 65, 200)
PORT = 8000  # vLLM's default


@dataclass
class Cluster:
    """Two machines with a server of two nodes."""

    first: Machine
    second: Machine
    front: Server
    headless: Server
    storage: Path

    def log_tail(self) -> str:
        return f"{self.front.log_tail()}\n{self.headless.log_tail()}"


@pytest.fixture(scope="module")
def cluster(tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    storage = directory / "hidden_states"
    environment = process_environment(npus=TP, late=True) | {"GLOO_SOCKET_IFNAME": CABLE}
    with ExitStack() as stack:
        machines = stack.enter_context(two_machines())
        servers = []
        for machine, block in zip(
            machines, blocks("serve.md", "serve minimax-m2-tp8-dp2"), strict=True
        ):
            words = smaller(
                parse_serve(block),
                tiny_minimax_m2,
                storage,
                LAYER_IDS,
                **{"--tensor-parallel-size": str(TP)},
            )
            command = machine.command(words)
            log = directory / f"{machine.address}.log"
            servers.append(
                stack.enter_context(Server(command, port=PORT, log=log, environment=environment))
            )
        found = Cluster(*machines, *servers, storage)
        with found.first.network():
            found.front.wait_ready(START_SECONDS)
        yield found


@pytest.mark.long
def test_the_rows_of_both_machines_are_right_and_found_from_either(
    cluster: Cluster, tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"token_ids": tokens(length, seed=row)}) + "\n"
            for row, length in enumerate(LENGTHS)
        )
    )
    # On the machine that answers no requests.
    output = cluster.storage / "rows"
    generate = [
        sys.executable,
        "-m",
        "vllm_ascend_hsx.cli.main",
        "generate",
        "--data",
        str(data),
        "--output",
        str(output),
        "--validate",
    ]
    command = cluster.second.command(
        [*generate, "--endpoint", f"http://{cluster.first.address}:{PORT}"]
    )
    done = subprocess.run(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{cluster.log_tail()}"
    with cluster.first.network():
        settle(cluster.front.url, ("0", "1"), timeout=120)
        metrics = parse(httpx.get(f"{cluster.front.url}/metrics", timeout=30).text)
    published = {
        each.engine
        for each in metrics.counts
        if each.name == "vllm:hsx_published_bytes_total" and each.value > 0
    }
    assert published == {"0", "1"}
    for row, length in enumerate(LENGTHS):
        comparison = compare_file(
            output / f"hs_{row}.safetensors", tiny_minimax_m2, tokens(length, seed=row), LAYER_IDS
        )
        assert comparison.matches, (row, comparison)
    assert [path.name for path in cluster.storage.iterdir() if not path.name.startswith(".")] == [
        "rows"
    ]


@pytest.mark.long
def test_readers_learn_that_the_other_machine_died(cluster: Cluster, tiny_minimax_m2: Path) -> None:
    """Last in this file: there is no server afterwards."""
    body = {
        "model": str(tiny_minimax_m2),
        "prompt": tokens(40),
        "max_tokens": 450,
        "ignore_eos": True,
    }

    def ask() -> httpx.Response:
        with cluster.first.network():
            return httpx.post(
                f"{cluster.front.url}/v1/completions",
                json={**body, "kv_transfer_params": {"include_output_tokens": True}},
                headers={"X-data-parallel-rank": "1"},
                timeout=120,
            )

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        while not (locks := list(cluster.storage.glob(f"*{LOCK_SUFFIX}"))):
            assert not wait([answer], 0.02).done, answer.result().text
        (lock,) = locks
        assert cluster.headless.process is not None
        os.killpg(cluster.headless.process.pid, signal.SIGKILL)
        with pytest.raises(HiddenStatesError, match="the server died"):
            load(lock.with_name(lock.name.removesuffix(LOCK_SUFFIX)), 60)
        # The remaining ranks cannot continue. Mostly vLLM ends at once. But an engine may wait for
        # a rank that waits in a collective for a dead rank, until a timeout.
        cluster.front.stop()
