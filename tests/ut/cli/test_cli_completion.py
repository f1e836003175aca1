"""Tab completion in bash, with the function that argcomplete registers."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib
from documents import ROOT, blocks

from vllm_ascend_hsx.cli.main import COMMANDS

if find_spec("argcomplete") is None:
    pytest.skip(
        "completion needs argcomplete: pip install 'vllm-ascend-hsx[completion]'",
        allow_module_level=True,
    )

PROGRAMS = {
    "hsx": "vllm_ascend_hsx",
    "register-python-argcomplete": "argcomplete.scripts.register_python_argcomplete",
}
# Sets bash's variables for a completion function, calls the function, and prints the result.
ASK = """
eval "$1"
COMP_LINE="$2" COMP_POINT=${#2} COMP_TYPE=9 COMP_KEY=9
read -ra COMP_WORDS <<< "$2"
[[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete hsx "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with `hsx` of this checkout and argcomplete of this Python."""
    directory = tmp_path_factory.mktemp("bin")
    for name, module in PROGRAMS.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (directory / name).chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def setting_up() -> str:
    """Return the documented line for a shell, below the installation of argcomplete."""
    install, line = blocks("operations.md", "completion")[0].splitlines()
    extra = re.fullmatch(r"pip install 'vllm-ascend-hsx\[(\w+)\]'", install)
    assert extra is not None
    (required,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ][extra[1]]
    assert required.startswith("argcomplete>=")
    return line


def completions(line: str, setting_up: str, environ: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", setting_up, line],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    return sorted(word.strip() for word in done.stdout.splitlines() if word.strip())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hsx ", ["--help", "--version", "-h", *COMMANDS]),
        ("hsx pl", ["plan"]),
        ("hsx plan minimax-m2 --quanti", ["--quantization"]),
        ("hsx plan --quantization ", ["fp8", "none"]),
        ("hsx plan --quantization=f", ["fp8"]),
        ("hsx generate --max-r", ["--max-retries"]),
        ("hsx serve --dry", ["--dry-run"]),
        ("hsx doctor --durability f", ["fdatasync"]),
    ],
)
def test_bash_completes_commands_options_and_values(
    line: str, words: list[str], setting_up: str, environ: dict[str, str]
) -> None:
    assert completions(line, setting_up, environ) == sorted(words)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"emulate", "speculators"}))
def test_every_command_has_its_own_options_completed(
    name: str, setting_up: str, environ: dict[str, str]
) -> None:
    assert completions(f"hsx {name} --jso", setting_up, environ) == ["--json"]


def test_tab_completes_a_word_in_a_terminal(
    setting_up: str, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rc").write_text(f"PS1='ready> '\n{setting_up}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(
            "bash",
            ["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"],
            {**environ, "TERM": "dumb"},
        )
    try:
        read_until(terminal, "ready> ")
        os.write(terminal, b"hsx plan minimax-m2 --quanti\t")
        read_until(terminal, "--quantization ")
    finally:
        os.close(terminal)  # which ends the shell
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: str) -> None:
    seen, end = "", time.monotonic() + 60
    while wanted not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode()
