"""`hsx ... | head`: who prints to nobody ends without a word, with the exit code of a program that the broken pipe has ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_examine import rows_of, write

from vllm_ascend_hsx.cli.main import COMMANDS
from vllm_ascend_hsx.cli.output import sign_of_life

HSX = (sys.executable, "-m", "vllm_ascend_hsx.cli.main")
SIGN_OF_LIFE = re.compile(r"hsx \w+: .* \.\.\.")  # the machine may be slow
BROKEN_PIPE = 128 + 13  # what a shell calls the end by SIGPIPE
HELP = [("--help",), (), ("--version",), *((name, "--help") for name in COMMANDS)]


def run_unread(*arguments: str | Path, buffered: bool, errors_too: bool = False) -> tuple[int, str]:
    """Exit code and errors of a command whose output goes into a pipe that nobody reads."""
    readable, writable = os.pipe()
    os.close(readable)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [*HSX, *map(str, arguments)],
            stdout=writable,
            stderr=writable if errors_too else subprocess.PIPE,
            env=environ if buffered else {**environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writable)
    said = [line for line in (done.stderr or "").splitlines() if not SIGN_OF_LIFE.fullmatch(line)]
    return done.returncode, "\n".join(said)


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_a_help_that_nobody_reads_ends_without_a_word(arguments: tuple[str, ...]) -> None:
    assert run_unread(*arguments, buffered=True) == (BROKEN_PIPE, "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of hidden states, a dataset, and a model."""
    place = tmp_path_factory.mktemp("place")
    for name in ("a", "b"):
        write(place / "rows", name, rows_of(5))
    (place / "left").mkdir()
    for name in ("a", "b"):
        (place / "left" / f"{name}.safetensors.lock").touch()
    (place / "data.jsonl").write_text('{"token_ids": [1, 2]}\n')
    (place / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 62}))
    return place


@pytest.mark.parametrize(("buffered", "errors_too"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    "words",
    [
        "inspect {}/rows",
        "inspect {}/rows/a.safetensors",
        "verify {}/rows",
        "verify {}/rows --json --jobs 1",
        "clean {}/rows --dry-run",
        "clean {}/left",
        "serve {} --dry-run",
        "generate --data {}/data.jsonl --output {}/out --endpoint http://127.0.0.1:1 --max-retries 0",
    ],
)
def test_what_nobody_reads_ends_a_command_without_a_word(place: Path, words: str, buffered: bool, errors_too: bool) -> None:
    arguments = [word.format(place) for word in words.split()]
    assert run_unread(*arguments, buffered=buffered, errors_too=errors_too) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("command", ["nosuch", "inspect {}/none", "verify", "plan {}/none", "serve {}/none", "emulate --npus 0 -- true"])
def test_an_error_that_nobody_reads_ends_a_command_too(place: Path, command: str) -> None:
    assert run_unread(*(word.format(place) for word in command.split()), buffered=True, errors_too=True) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_without_an_output_does_its_work(place: Path, stream: str) -> None:
    """As with `hsx verify DIR >&-`: there is no such descriptor at all."""
    number = {"stdout": 1, "stderr": 2}[stream]
    done = subprocess.run(["/bin/sh", "-c", f'exec "$@" {number}>&-', "sh", *HSX, "verify", str(place / "rows")], check=False, timeout=300)
    assert done.returncode == 0


def test_a_program_with_emulated_npus_is_ended_by_a_broken_pipe_as_without() -> None:
    """Python ignores the signal, and what it becomes would inherit that."""
    code, errors = run_unread("emulate", "--npus", "1", "--", "/bin/sh", "-c", "while true; do echo y; done", buffered=True)
    assert (code, errors) == (-13, "")


def test_a_command_that_takes_long_gives_a_sign_of_life_once(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    said = []
    with sign_of_life("hsx plan: asking ...", seconds=0.01):
        while not said:
            said = capfd.readouterr().err.splitlines()
            done.wait(0.02)
    assert said + capfd.readouterr().err.splitlines() == ["hsx plan: asking ..."]


def test_a_command_that_is_soon_done_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with sign_of_life("hsx plan: asking ...", seconds=3600):
        pass
    assert capfd.readouterr().err == ""


def test_every_command_that_works_itself_says_at_what() -> None:
    assert [name for name, command in COMMANDS.items() if command.at_work is None] == ["emulate"]


def test_the_sign_goes_to_stderr_and_leaves_the_result_alone(place: Path) -> None:
    code = "import sys, vllm_ascend_hsx.cli.output as o; o.sign_of_life.__wrapped__.__defaults__ = (0.0,)\n"
    code += "from vllm_ascend_hsx.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "verify", str(place / "rows"), "--json", "--jobs", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["good"] == 2
    assert done.stderr.splitlines()[0] == "hsx verify: reading files ..."
