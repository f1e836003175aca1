"""`hsx doctor` as a command: exit code, JSON, progress and options."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from documents import blocks

from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.cli import doctor as command
from vllm_ascend_hsx.doctor import patch_points
from vllm_ascend_hsx.doctor.findings import Finding

ROOT = Path(__file__).parents[3]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Set the findings of software and patch points that the command shows."""
    found = [Finding("software", "vllm", "ok", "0.23.0")]
    monkeypatch.setattr(command, "check_software", lambda: iter(found))
    held = Finding("patch points", "a.b", "ok", "called")
    monkeypatch.setattr(patch_points, "check_patch_points", lambda software_is_right: iter([held]))
    return found


def test_long_checks_are_announced_on_stderr(
    healthy: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"]
    assert (
        "importing vllm and vllm-ascend" in shown.err
        and f"writing 256 MiB to {tmp_path}" in shown.err
    )


def test_exit_code_is_1_if_there_are_problems(
    healthy: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 0
    assert "all 1 hold" in (shown := capsys.readouterr().out) and "no problems" in shown
    healthy.append(Finding("software", "CANN", "problem", "not found [here]", "Install it."))
    assert command.main([]) == 1
    shown = capsys.readouterr().out
    assert "not found [here]" in shown and "Install it." in shown and "1 problem:" in shown


def test_json_has_every_finding(
    healthy: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", "--model", "qwen3.5-27b"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert asdict(healthy[0]) in shown["findings"]
    assert all(each["what_to_do"] for each in shown["findings"])
    assert {each["topic"] for each in shown["findings"]} == {"software", "patch points", "target"}


def test_invalid_model_gives_exit_code_2(
    healthy: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.startswith(
        "hsx doctor: MODEL='no-such-model' is neither a preset nor a file"
    )


@pytest.mark.parametrize(
    "words", [["--io", "direct"], ["--no-lock"], ["--io", "fast", "--out", "x"], ["directory"]]
)
def test_storage_options_without_out_are_refused(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parse_arguments(words)
    assert stopped.value.code == 2


def test_the_command_starts_without_torch_and_vllm() -> None:
    code = "import sys, vllm_ascend_hsx.cli.doctor; print({'torch', 'vllm'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        == "set()\n"
    )


def test_documented_doctor_command_is_accepted() -> None:
    (shown,) = blocks("operations.md", "doctor")
    words = shlex.split(shown)
    assert words[:2] == ["hsx", "doctor"]
    assert command.parse_arguments(words[2:]).out == Path("/data/hidden_states")
