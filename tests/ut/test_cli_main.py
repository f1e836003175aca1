"""`hsx`: which command does what, and what a mistyped one is told."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vllm_ascend_hsx.cli import main as cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in cli.COMMANDS)


def test_no_command_shows_the_usage_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: hsx COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulat"]) == 2
    assert capsys.readouterr().err == f"hsx: there is no command 'emulat'; choose one of: {', '.join(cli.COMMANDS)}\n"


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_ascend_hsx import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hsx {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_leads_to_a_function(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_command_gets_the_arguments_after_its_name_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("vllm_ascend_hsx.cli.demo.main", lambda argv: seen.append(argv) or 3)
    assert cli.main(["demo", "--layers", "1,2"]) == 3
    assert seen == [["--layers", "1,2"]]


def test_help_needs_neither_torch_nor_vllm() -> None:
    code = "import sys; from vllm_ascend_hsx.cli.main import main; main(['--help']); print({'torch', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.endswith("set()\n")


def test_vllm_finds_the_plugin_and_the_shell_finds_hsx() -> None:
    (plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.value.startswith("vllm_ascend_hsx")]
    assert plugin.value == "vllm_ascend_hsx.plugin:register"
    assert callable(plugin.load())
    (script,) = [p for p in entry_points(group="console_scripts") if p.name == "hsx"]
    assert script.load() is cli.main
