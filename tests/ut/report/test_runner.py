"""A step that fails, hangs or leaves processes affects only itself; the report has the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_hsx.report.result import BROKE, HELD, Result
from vllm_ascend_hsx.report.runner import descendants, run_step, subreaper
from vllm_ascend_hsx.report.steps import Line, Step

STEP = Step(
    "fake",
    "doing as it likes",
    "",
    30.0,
    (Line("first", "what comes first"), Line("second", "what comes next")),
)
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from vllm_ascend_hsx.report.result import Teller
tell = Teller(Path(sys.argv[1]))
def beget(code):
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"


@pytest.fixture(autouse=True)
def _reaping() -> Iterator[None]:
    with subreaper():
        yield


def run(directory: Path, code: str, limit_s: float = 30.0) -> list[Result]:
    command = [sys.executable, "-c", PRELUDE + code, str(directory / "told")]
    return run_step(STEP, command, directory / "told", directory / "log", limit_s, stop_s=0.5)


def outcomes(results: list[Result]) -> list[tuple[str, str, str]]:
    return [(result.line, result.outcome, result.found) for result in results]


FIRST = 'tell("first", "held", "as it should be", size=3)\n'
BOTH = FIRST + 'tell("second", "held", "too")\n'


@pytest.mark.parametrize(
    ("code", "second"),
    [
        ("sys.exit(3)", "the step ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the step ended with signal SIGSEGV"),
        (
            "tell.failed('it is full\\nthe disk\\nthe last lines of a log:\\nmore'); sys.exit(1)",
            "it is full; the disk",
        ),
        ("", "the step ended without a result for it"),
        (
            "tell._path.open('a').write('{\"line\": \"sec')",
            "the step ended without a result for it",
        ),
    ],
    ids=["exit code", "signal", "reason", "silence", "half a line"],
)
def test_missing_results_of_a_step_did_not_hold_and_others_are_kept(
    code: str, second: str, tmp_path: Path
) -> None:
    results = run(tmp_path, FIRST + code)
    assert outcomes(results) == [("first", HELD, "as it should be"), ("second", BROKE, second)]
    assert results[0].data == {"size": 3}


def test_failed_lines_keep_the_end_of_the_steps_output(tmp_path: Path) -> None:
    _, second = run(tmp_path, FIRST + "print('one'); raise RuntimeError('two')")
    assert second.log.startswith("one\n") and second.log.endswith("RuntimeError: two")


def test_hanging_step_is_stopped_at_its_limit(tmp_path: Path) -> None:
    started = time.monotonic()
    results = run(
        tmp_path,
        FIRST + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
        limit_s=3.0,
    )
    assert time.monotonic() - started < 60
    assert outcomes(results)[1] == ("second", BROKE, "the step was stopped at its limit of 3 s")


def test_hanging_step_can_stop_its_own_server(tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (tell.failed('stopped the server'), "
        "sys.exit(1)))\ntime.sleep(600)"
    )
    results = run(tmp_path, FIRST + code, limit_s=3.0)
    assert results[1].found == "stopped the server; the step was stopped at its limit of 3 s"


@pytest.mark.parametrize("hangs", [False, True], ids=["the step ends", "the step hangs"])
def test_no_process_of_a_step_outlives_it_in_any_session(hangs: bool, tmp_path: Path) -> None:
    before = descendants(1)
    mark = f"{tmp_path}/alive"
    child = f"{STUBBORN.replace('time.sleep', f'open({mark!r}, chr(119)); time.sleep')}"
    code = f"beget({child!r})\nwhile not os.path.exists({mark!r}): time.sleep(0.05)\n"
    results = run(
        tmp_path, BOTH + code + ("time.sleep(600)" if hangs else ""), limit_s=5.0 if hangs else 30.0
    )
    left = [pid for pid in descendants(1) - before if mark in command_of(pid)]
    assert left == []
    assert results[0].outcome == HELD
    if not hangs:
        assert outcomes(results)[1] == (
            "second",
            BROKE,
            "too; the step left 1 processes running; they were killed",
        )


def command_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else ""


def test_complete_step_has_no_reason(tmp_path: Path) -> None:
    assert outcomes(run(tmp_path, BOTH)) == [
        ("first", HELD, "as it should be"),
        ("second", HELD, "too"),
    ]
