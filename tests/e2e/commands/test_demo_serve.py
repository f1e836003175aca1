"""`hsx demo --serve`: the printed commands work as they are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_ascend_hsx import __version__, load
from vllm_ascend_hsx.demo.server import group_members

HSX = str(Path(sys.executable).with_name("hsx"))
ONE_NPU = (
    "--data-parallel-size",
    "1",
    "--tensor-parallel-size",
    "1",
    "--no-expert-parallel",
    "--no-sequence-parallel",
)
NAMES = ("# curl", "# python", "# generate")
LAYERS = [1, 2, 4]


@dataclass
class Served:
    """A running `hsx demo --serve` with the printed lines by name, and the directory."""

    process: subprocess.Popen[str]
    lines: dict[str, str]
    work: Path

    def run(self, name: str) -> str:
        done = subprocess.run(
            ["bash", "-c", self.lines[name]],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    work = tmp_path_factory.mktemp("demo")
    command = [HSX, "demo", "--serve", "--output", str(work), *ONE_NPU]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,
        # A shell starts background processes with SIGINT ignored, perhaps also these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        lines: dict[str, str] = {}
        printed: list[str] = []
        while len(lines) < len(NAMES) and (line := process.stdout.readline()):
            if printed and printed[-1] in NAMES:
                lines[printed[-1]] = line
            printed.append(line.strip())
        assert tuple(lines) == NAMES, "\n".join(printed)
        yield Served(process, lines, work)
    finally:
        process.terminate()
        process.wait(60)


def test_the_curl_line_is_answered_with_a_file(served: Served) -> None:
    answer = json.loads(served.run("# curl"))
    states = load(answer["kv_transfer_params"]["hidden_states_path"], timeout=60)
    assert len(states.token_ids) == answer["usage"]["prompt_tokens"]


def test_the_python_line_prints_the_shape_of_the_rows(served: Served) -> None:
    assert served.run("# python").startswith(f"{LAYERS} torch.Size([")


def test_the_generate_line_writes_a_file_for_each_prompt(served: Served) -> None:
    served.run("# generate")
    rows = [
        load(path)
        for path in sorted((served.work / "hidden_states" / "generated").glob("hs_*.safetensors"))
    ]
    assert [states.layer_ids for states in rows] == [LAYERS] * 3


def test_server_logs_one_start_line_and_reads_weights_once(served: Served) -> None:
    log = (served.work / "server.log").read_text()
    said = (
        f"vllm-ascend-hsx {__version__} extracts layers 1,2,4 of tiny-minimax-m2: 1536 bytes per "
        f"token, into {served.work}/hidden_states"
    )
    assert log.count(said) == 1, log
    assert re.search(
        r"\(sink file\)\. Each worker has a pinned ring of 256 MiB and \d writer threads\.", log
    )
    assert len(re.findall("Loading weights took", log)) == 1


def test_an_interrupt_ends_every_process(served: Served) -> None:
    session = os.getsid(served.process.pid)
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(120) == 130
    left = subprocess.run(
        ["pgrep", "-f", str(served.work)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert not group_members(session) and not left
