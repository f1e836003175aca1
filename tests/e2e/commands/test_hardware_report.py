"""`hsx hardware-report` on two emulated NPUs: every line is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_hsx.report.runner import descendants
from vllm_ascend_hsx.report.steps import STEPS

# Lines that no emulated NPU can measure, and their text.
NOT_HERE = {
    "process table": "not measured here: npu-smi is not on PATH",
    "profile": "not measured here: the emulated NPU has no profiler",
}
HSX = str(Path(sys.executable).with_name("hsx"))


def reported(directory: Path, *options: str, late: bool = False) -> tuple[dict[str, Any], str]:
    """Run the command; return the JSON file and the Markdown."""
    before = descendants(1)
    emulated = [HSX, "emulate", "--npus", "2", *(["--late"] if late else []), "--"]
    command = [*emulated, HSX, "hardware-report", "--output", str(directory), *options]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert not [pid for pid in descendants(1) - before if str(directory) in _command_of(pid)]
    assert not list((directory / "files").rglob("*.safetensors")), (
        "rows of a large model would fill the disk"
    )
    return json.loads((directory / "hardware-report.json").read_text()), (
        directory / "hardware-report.md"
    ).read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return reported(tmp_path_factory.mktemp("report") / "out")


def _command_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text(errors="replace") if path.exists() else ""


def test_every_line_of_the_named_steps_is_measured(tmp_path: Path) -> None:
    """Only steps without a server."""
    names = ("software", "environment", "npus", "copies", "pinned", "storage", "direct")
    content, text = reported(tmp_path / "out", "--steps", ",".join(names))
    measured = {
        each["line"] for each in content["lines"] if each["outcome"] in ("held", "measured")
    }
    assert measured == {line.key for step in STEPS if step.name in names for line in step.lines}
    assert "0 did not hold" in text


@pytest.mark.long
def test_every_line_is_measured(report: tuple[dict[str, Any], str]) -> None:
    content, text = report
    assert [each["line"] for each in content["lines"]] == [
        line.key for step in STEPS for line in step.lines
    ]
    left_out = {
        each["line"]: each["found"] for each in content["lines"] if each["outcome"] == "not run"
    }
    assert left_out == NOT_HERE
    assert f"0 did not hold, {len(NOT_HERE)} not run" in text


@pytest.mark.long
def test_figures_have_the_expected_values(report: tuple[dict[str, Any], str]) -> None:
    data = {each["line"]: each["data"] for each in report[0]["lines"]}
    assert [each["name"] for each in data["npus"]["npus"]] == ["Ascend910B3"] * 2
    assert data["sizes"] == {"tensor_parallel": 2, "data_parallel": 1, "expert_parallel": True}
    assert [data[line]["passed"] for line in ("one NPU", "parallel", "plain")] == [16, 16, 16]
    assert all(data[line]["compared"] for line in ("one NPU", "parallel", "plain"))
    assert [data[line]["passed"] for line in ("awake", "sleep 1", "sleep 2")] == [16, 16, 16]
    assert data["parallel"]["generated"] == 32 * 9 + sum(range(8))
    assert data["stop"]["whole"] >= 16
    assert [worker["contexts"] for worker in data["contexts"]["workers"]] == [[0], [1]]
    threads = data["threads"]
    assert threads["copied"] > 0 and {"main", "hsx-writer"} <= set(threads["cpu_seconds_per_gib"])
    assert data["device error"]["seconds"] < 30 and list(data["device error"]["reasons"])
    for server in ("off", "hsx", "vllm"):
        for figures in data[server].values():
            assert figures["requests_per_s"] > 0 and figures["step_ms"] > 0
    off, hsx, vllm = (data[f"KV cache, {server}"]["tokens"] for server in ("off", "hsx", "vllm"))
    assert vllm < hsx <= off
    assert data["plan"]["kept_at_least"] - 0.005 <= hsx / off == data["plan"]["measured"]


@pytest.mark.long
def test_rows_of_long_steps_are_right_eager_and_with_graphs(tmp_path: Path) -> None:
    """Copies run as late as possible: while the next step is staged."""
    content, _ = reported(tmp_path / "out", "--steps", "npus,long-steps", late=True)
    data = {each["line"]: each["data"] for each in content["lines"]}
    assert [data[line]["passed"] for line in ("eager", "graphs")] == [8, 8]
    assert [data[line]["generated"] for line in ("eager", "graphs", "agreement")] == [284] * 3


def test_machine_without_npus_gets_a_one_line_error(tmp_path: Path) -> None:
    command = [HSX, "hardware-report", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 2
    told = [
        line for line in done.stdout.splitlines() if not line.endswith(" ...")
    ]  # heartbeat of a slow machine
    assert len(told) == 1 and "this machine has no NPUs" in told[0]
    assert not (tmp_path / "out").exists()
