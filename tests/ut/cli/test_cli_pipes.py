"""`hsx ... | head` ends silently, with the exit code of a program killed by SIGPIPE."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from written_files import rows_of, write

from vllm_ascend_hsx.cli.main import COMMANDS, main
from vllm_ascend_hsx.cli.output import sign_of_life

HSX = (sys.executable, "-m", "vllm_ascend_hsx.cli.main")
SIGN_OF_LIFE = re.compile(r"hsx [\w-]+: .* \.\.\.")  # the machine may be slow
BROKEN_PIPE = 128 + 13  # a shell's exit code for an end by SIGPIPE
HELP = [("--help",), (), ("--version",), *((name, "--help") for name in COMMANDS)]


def run_unread(*arguments: str | Path, buffered: bool, errors_too: bool = False) -> tuple[int, str]:
    """Return exit code and errors of a command with output to a closed pipe."""
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
def test_help_into_a_closed_pipe_ends_silently(arguments: tuple[str, ...]) -> None:
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
    (place / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 62})
    )
    return place


UNREAD = (
    "inspect {}/rows",
    "verify {}/rows",
    "verify {}/rows --json --jobs 1",
    "clean {}/rows --dry-run",
    "clean {}/left",
    "serve {} --dry-run",
    "generate --data {}/data.jsonl --output {}/out --endpoint http://127.0.0.1:1 --max-retries 0",
)


@pytest.mark.parametrize(
    ("words", "buffered"), [*((words, True) for words in UNREAD), (UNREAD[1], False)]
)
def test_closed_stdout_ends_a_command_silently(place: Path, words: str, buffered: bool) -> None:
    arguments = [word.format(place) for word in words.split()]
    assert run_unread(*arguments, buffered=buffered, errors_too=buffered) == (BROKEN_PIPE, "")


@pytest.mark.parametrize(
    "command",
    [
        "nosuch",
        "inspect {}/none",
        "verify",
        "plan {}/none",
        "serve {}/none",
        "emulate --npus 0 -- true",
    ],
)
def test_closed_stderr_ends_a_command(place: Path, command: str) -> None:
    assert run_unread(
        *(word.format(place) for word in command.split()), buffered=True, errors_too=True
    ) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_command_without_open_outputs_does_its_work(place: Path, stream: str) -> None:
    """As with `hsx verify DIR >&-`: the descriptor is not open."""
    number = {"stdout": 1, "stderr": 2}[stream]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {number}>&-', "sh", *HSX, "verify", str(place / "rows")],
        check=False,
        timeout=300,
    )
    assert done.returncode == 0


def test_broken_pipe_ends_an_emulated_program_as_usual() -> None:
    """Python ignores the signal, and the program that replaces it would inherit that."""
    code, errors = run_unread(
        "emulate",
        "--npus",
        "1",
        "--",
        "/bin/sh",
        "-c",
        "while true; do echo y; done",
        buffered=True,
    )
    assert (code, errors) == (-13, "")


def test_long_command_prints_one_sign_of_life(
    capfd: pytest.CaptureFixture[str],
) -> None:
    done = threading.Event()
    said = []
    with sign_of_life("hsx plan: asking ...", seconds=0.01):
        while not said:
            said = capfd.readouterr().err.splitlines()
            done.wait(0.02)
    assert said + capfd.readouterr().err.splitlines() == ["hsx plan: asking ..."]


def test_short_command_prints_no_sign_of_life(capfd: pytest.CaptureFixture[str]) -> None:
    with sign_of_life("hsx plan: asking ...", seconds=3600):
        pass
    assert capfd.readouterr().err == ""


def test_every_command_has_a_sign_of_life() -> None:
    assert [name for name, command in COMMANDS.items() if command.at_work is None] == ["emulate"]


def test_sign_of_life_goes_to_stderr_only(place: Path) -> None:
    code = (
        "import sys, vllm_ascend_hsx.cli.output as o; o.sign_of_life.__wrapped__.__defaults__ = "
        "(0.0,)\n"
    )
    code += "from vllm_ascend_hsx.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "verify", str(place / "rows"), "--json", "--jobs", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["good"] == 2
    assert done.stderr.splitlines()[0] == "hsx verify: reading files ..."


# Names that cannot be printed


STRICT = {"PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "1"}


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """Create files with names that are not UTF-8 or have escape sequences."""
    directory = tmp_path / "d\udcff\x1b[31m"
    write(directory, "good", rows_of(5))
    for stem in ("x\udcff", "w\x1b[31m"):
        os.rename(write(directory, "moved", rows_of(5)), directory / f"{stem}.safetensors")
        (directory / f"bad-{stem}.safetensors").write_bytes(b"x")
        (directory / f"taken-{stem}.safetensors.lock").touch()
        (directory / f"{stem}-error.safetensors.error").write_text(
            '{"reason": "\\ud800 \\u001b[31m"}'
        )
        os.utime(directory / f"{stem}-error.safetensors.error", (0, 0))
    (directory / "moved.safetensors.lock").unlink()
    (directory / "hsx-0123abcd-000000.jsonl").symlink_to("nowhere")  # the reader logs it
    return directory


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["verify", "{}", "--jobs", "1"], 1),
        (["verify", "{}", "--jobs", "1", "--json"], 1),
        (["verify", "{}/none"], 2),
        (["inspect", "{}"], 1),
        (["inspect", "{}/x\udcff.safetensors"], 0),
        (["inspect", "{}/none"], 2),
        (["clean", "{}", "--dry-run", "--errors-older-than", "1d"], 0),
        (["clean", "{}", "--errors-older-than", "1d"], 0),
        (["clean", "{}/none"], 2),
        (["nosuch\udcff"], 2),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, list) else None,
)
def test_names_that_are_not_utf8_are_escaped_on_every_output(
    strange: Path, words: list[str], code: int
) -> None:
    arguments = [os.fsencode(word.format(strange)) for word in words]
    done = subprocess.run(
        [*HSX, *arguments],
        capture_output=True,
        env={**os.environ, **STRICT},
        timeout=300,
        check=False,
    )
    said = (done.stdout + done.stderr).decode()  # it is UTF-8
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert "\x1b" not in said
    if words[0] == "clean" and code == 0 and "--dry-run" not in words:
        assert not [
            name
            for name in os.listdir(strange)
            if name.startswith("taken") or name.endswith(".error")
        ]


# Outputs that cannot be written


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "words", ["--help", "verify --help", "verify {}/rows --jobs 1", "clean {}/rows"]
)
def test_output_to_a_full_disk_gives_one_line_on_stderr(
    place: Path, words: str, buffered: bool
) -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        command = [*HSX, *(word.format(place) for word in words.split())]
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            timeout=300,
            check=False,
        )
    said = [line for line in done.stderr.splitlines() if not SIGN_OF_LIFE.fullmatch(line)]
    if words == "verify --help" and not buffered:  # argparse suppresses the error
        assert (done.returncode, said) == (0, [])
        return
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    assert "No space left on device" in said[0]


# Ctrl-C


def test_an_interrupted_command_ends_with_130_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_ascend_hsx.cli.clean.main", interrupted)
    assert main(["clean", "."]) == 130
    assert capsys.readouterr().err == "hsx clean: interrupted\n"


STALLED = """
import fcntl

def look(path, listed, checksum):
    with open({began!r}, "wb") as began:
        began.write(b"x")
    with open({held!r}) as held:
        fcntl.flock(held, fcntl.LOCK_SH)
"""


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], int, TextIO]]:
    """Run `hsx verify` of six files with two processes that wait for a lock.

    Yields command, environment, the pipe to which each process writes at the start, and the lock.
    """
    os.mkfifo(tmp_path / "began")
    began = os.open(tmp_path / "began", os.O_RDWR)
    (tmp_path / "stalled.py").write_text(
        STALLED.format(began=str(tmp_path / "began"), held=str(tmp_path / "held"))
    )
    for number in range(6):
        write(tmp_path / "rows", f"r{number}", rows_of(5))
    # A shell starts background processes with SIGINT ignored.
    code = "import signal, sys, stalled; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from vllm_ascend_hsx.cli import verify; verify.examine = stalled.look\n"
    code += "from vllm_ascend_hsx.cli.main import main; sys.exit(main())"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with open(tmp_path / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield (
            [sys.executable, "-c", code, "verify", str(tmp_path / "rows"), "--jobs", "2"],
            environ,
            began,
            held,
        )
    os.close(began)


@pytest.mark.parametrize(
    ("number", "to_all", "released", "code", "says"),
    [
        (signal.SIGINT, True, True, 130, ["hsx verify: interrupted"]),  # as a terminal does
        (signal.SIGTERM, False, True, 143, ["hsx verify: terminated"]),
        (signal.SIGTERM, True, False, 143, ["hsx verify: terminated"]),  # as timeout does
        (signal.SIGKILL, False, False, -9, []),
    ],
)
def test_signal_ends_verify_and_its_processes_without_a_traceback(
    stalled: tuple[list[str], dict[str, str], int, TextIO],
    number: int,
    to_all: bool,
    released: bool,
    code: int,
    says: list[str],
) -> None:
    command, environ, began, held = stalled
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        assert os.read(began, 1) and os.read(began, 1)
        (os.killpg if to_all else os.kill)(process.pid, number)
        if released:
            fcntl.flock(held, fcntl.LOCK_UN)
        output, errors = process.communicate(timeout=60)  # each process has the pipes open
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    said = [line for line in errors.splitlines() if not SIGN_OF_LIFE.fullmatch(line)]
    assert (process.returncode, output, "Traceback" in errors) == (code, "", False)
    assert (
        said == says or number == signal.SIGKILL
    )  # the resource tracker of Python reports leftovers then


KILLED = """
import os, signal
from vllm_ascend_hsx.reader.check import examine

def look(path, listed, checksum):
    if path.name == "r5.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    return examine(path, checksum=checksum)
"""


def test_verify_shows_partial_results_if_a_process_is_killed(tmp_path: Path) -> None:
    """As the system does if memory runs out."""
    (tmp_path / "stalled.py").write_text(KILLED)
    for number in range(6):
        write(tmp_path / "rows", f"r{number}", rows_of(5))
    code = (
        "import sys, stalled; from vllm_ascend_hsx.cli import verify; verify.examine = "
        "stalled.look\n"
    )
    code += "from vllm_ascend_hsx.cli.main import main; sys.exit(main())"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [
        sys.executable,
        "-c",
        code,
        "verify",
        str(tmp_path / "rows"),
        "--jobs",
        "2",
        "--json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=300, check=False
    )
    said = [line for line in done.stderr.splitlines() if not SIGN_OF_LIFE.fullmatch(line)]
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    result = json.loads(done.stdout)
    assert result["good"] + result["unseen"] == 6 and result["unseen"] > 0
    assert (
        f"a process was killed, possibly for lack of memory: {result['unseen']} files were not "
        "checked"
    ) in said[0]
