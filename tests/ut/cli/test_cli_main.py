"""`hsx`: dispatch to commands, and errors for mistyped commands."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from vllm_ascend_hsx.cli import main as cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in cli.COMMANDS)


def test_usage_is_shown_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: hsx COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("xyz", f"; choose one of: {', '.join(cli.COMMANDS)}"),
        *((name[:2] + name[3:], f"; did you mean {name}?") for name in cli.COMMANDS),
    ],
)
def test_unknown_command_gets_a_suggestion_or_the_list(
    typed: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([typed]) == 2
    assert capsys.readouterr().err == f"hsx: there is no command {typed!r}{remedy}\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "nosuch"),
            "nosuch: No such file or directory",
        ),
        (
            OSError("nosuch is not a local folder"),
            "nosuch is not a local folder",
        ),  # as transformers raises it
        (
            OSError(28, "No space left on device"),
            "cannot continue or print: [Errno 28] No space left on device",
        ),
    ],
)
def test_system_error_is_reported_by_kind(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("vllm_ascend_hsx.cli.speculators.main", fail)
    assert cli.main(["speculators", "train", "nosuch"]) == 1
    assert capsys.readouterr().err == f"hsx speculators: {said}\n"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_ascend_hsx import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hsx {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_function(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_command_gets_the_arguments_after_its_name_and_gives_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("vllm_ascend_hsx.cli.demo.main", lambda argv: seen.append(argv) or 3)
    assert cli.main(["demo", "--layers", "1,2"]) == 3
    assert seen == [["--layers", "1,2"]]


@pytest.mark.parametrize("module", ["typing", "vllm_ascend_hsx.cli.output", "rich.console"])
def test_an_interrupt_while_hsx_itself_is_imported_ends_it_quietly(module: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Interrupt())
from vllm_ascend_hsx.cli.main import main
sys.exit(main(["--version"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_interrupt_while_a_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    """A module may replace an exception while importing; another thread may take the signal."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(10**6))\n"
        "except KeyboardInterrupt as error:\n    raise ImportError('numpy') from error\n"
        "def main(argv): raise AssertionError('not interrupted')\n"
    )
    # A shell starts background processes with the signal ignored.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += (
        "from vllm_ascend_hsx.cli import main as cli; cli.COMMANDS['x'] = cli.Command('', "
        "'interrupted:main', 'busy')"
    )
    command = [sys.executable, "-c", f"{code}; sys.exit(cli.main(['x']))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "hsx x: interrupted\n")


IMMEDIATE = """
import sys
import vllm_ascend_hsx.cli.output as output

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "vllm", "vllm_ascend", "transformers", "openai", "httpx", "datasets", "ray", "matplotlib", "speculators"}:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
output.sign_of_life.__wrapped__.__defaults__ = (0.0,)
from vllm_ascend_hsx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words", [["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join
)
def test_help_prints_no_sign_of_life(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMMEDIATE, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    program = "npu-emulate" if words[0] == "emulate" else "hsx"
    assert done.stdout.startswith(f"usage: {program} ")


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ascend_hsx", "plan", "none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "hsx plan: MODEL='none' is neither a preset nor a file" in done.stderr
    )  # a slow machine also prints the sign of life


def test_vllm_finds_the_plugin_and_the_shell_finds_hsx() -> None:
    (plugin,) = [
        p
        for p in entry_points(group="vllm.general_plugins")
        if p.value.startswith("vllm_ascend_hsx")
    ]
    assert plugin.value == "vllm_ascend_hsx.plugin:register"
    assert callable(plugin.load())
    (script,) = [p for p in entry_points(group="console_scripts") if p.name == "hsx"]
    assert script.load() is cli.main


BAD_INPUT = [
    ["clean", "{dir}/none"],
    ["clean", "{dir}/good.jsonl"],
    ["clean", "{dir}", "--errors-older-than", "1e300"],
    ["clean", "{dir}", "--errors-older-than=-1s"],
    ["demo", "--model", "{dir}"],
    ["demo", "--model", "{dir}/broken"],
    ["demo", "--model", "{dir}/empty-object"],
    ["demo", "--device", "gpu"],
    ["doctor", "--model", "{dir}/none"],
    ["doctor", "--io", "direct"],
    ["emulate"],
    ["emulate", "--npus", "0", "--", "true"],
    ["generate", "--data", "{dir}/none.jsonl", "--output", "{dir}/out"],
    ["generate", "--data", "{dir}/bad.jsonl", "--output", "{dir}/out"],
    ["generate", "--data", "{dir}/good.jsonl", "--output", "{dir}/good.jsonl"],
    ["generate", "--data", "{dir}/good.jsonl", "--output", "{dir}/out", "--map-path", "x"],
    ["generate", "--output", "{dir}/out"],
    ["inspect", "{dir}/none"],
    ["inspect", "{dir}/empty"],
    ["inspect"],
    ["plan", "{dir}/none"],
    ["plan", "{dir}/bad.jsonl"],
    ["plan", "minimax-m2", "--layers", "2,2"],
    ["plan", "minimax-m2", "--layers", "99999999999999999999"],
    ["serve", "{dir}/none"],
    ["serve", "{dir}/broken"],
    ["serve", "{dir}", "--layers", "x"],
    ["speculators"],
    ["speculators", "{dir}/none.py"],
    ["speculators", "nosuch"],
    ["verify", "{dir}/none"],
    ["verify", "{dir}/empty"],
    ["verify", "{dir}/good.jsonl"],
    ["nosuch"],
    [],
]


@pytest.mark.parametrize("words", BAD_INPUT, ids=" ".join)
def test_bad_input_gives_one_line_and_exit_code_2(
    words: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bad.jsonl").write_text("[]")
    (tmp_path / "good.jsonl").write_text('{"token_ids": [1]}\n')
    (tmp_path / "empty").mkdir()
    for name, content in (("broken", "{"), ("empty-object", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["hsx"])
    try:
        code = cli.main([word.format(dir=tmp_path) for word in words])
    except SystemExit as left:
        code = left.code
    printed = capfd.readouterr()
    assert code == 2, printed
    assert printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err
