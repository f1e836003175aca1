"""An error is one line on stderr, whatever the arguments and names of files contain."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from vllm_ascend_hsx.cli import (
    clean,
    demo,
    doctor,
    generate,
    hardware_report,
    inspect,
    plan,
    serve,
    status,
    verify,
)
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.cli.output import make_console
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.protocol.errors import UserError

ODD = "a\x1b[31m\nb"
RUN = ["generate", "--data", "{dir}/rows.jsonl", "--output", "{dir}/out"]
REFUSED = [
    ["generate", "--data", ODD, "--output", "{dir}/out"],
    ["generate", "--data", "{dir}/rows.jsonl", "--output", f"{{dir}}/rows.jsonl/{ODD}"],
    [*RUN, "--endpoint", ODD],
    [*RUN, "--endpoint", f"@{ODD}"],
    [*RUN, "--map-path", ODD],
    [*RUN, "--map-path", f"{ODD}={ODD}"],
    [*RUN, "--column", ODD],
    [*RUN, "--order", ODD],
    ["plan", ODD],
    ["plan", "minimax-m2", "--layers", ODD],
    ["serve", "{dir}", "--out", "{dir}", "--layers", ODD],
    ["serve", "{dir}", "--option", f"{ODD}=1"],
    ["doctor", "--model", ODD],
    ["demo", "--output", f"{{dir}}/rows.jsonl/{ODD}"],
    ["demo", "--device", "npu", "--model", ODD],
    ["hardware-report", "--steps", ODD],
    ["verify", ODD],
    ["verify", "{dir}/empty"],
    ["inspect", ODD],
    ["inspect", "{dir}/empty"],
    ["clean", ODD],
    ["status", ODD],
    ["speculators", f"{ODD}.py"],
    [ODD],
]


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(" ".join(words)))
def test_an_error_is_one_line_on_stderr(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [1]}\n')
    (tmp_path / "empty").mkdir()
    try:
        code = main([word.format(dir=tmp_path) for word in words])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    assert code == 2, printed
    assert "\x1b" not in printed.out + printed.err
    assert printed.out in ("", f"{tmp_path}/rows.jsonl: 1 rows\n")
    lines = [
        line
        for line in printed.err.splitlines()
        if line.startswith("hsx") and not line.endswith(" ...")
    ]
    assert len(lines) == 1 and printed.err.endswith(f"{lines[0]}\n")


def test_each_invalid_row_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\nb.jsonl"
    path.write_text('{"token_ids": []}\n{"token_ids": [-1]}\n')
    assert main(["generate", "--data", str(path), "--output", str(tmp_path / "out")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert [line.startswith("  ") for line in lines] == [False, True, True]


def test_doctor_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._announce(make_console(stderr=True), ODD)
    doctor.show(make_console(), [Finding("storage", ODD, "problem", ODD, ODD)])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "a\\x1b[31m\\nb" in printed.err


MODULES = (clean, demo, doctor, generate, hardware_report, inspect, plan, serve, status, verify)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def options_of(name: str, capsys: pytest.CaptureFixture[str], taking: str) -> list[str]:
    """Return the options in the help of a command that take a value, or that take none."""
    with pytest.raises(SystemExit):
        COMMANDS[name].parse_arguments(["--help"])
    return re.findall(rf"^  (--[a-z-]+){taking}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    "name", sorted({*COMMANDS} - {"status"})
)  # the command has no option with a value
def test_two_dashes_are_not_a_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(name, capsys, r" [^ ]")
    assert options
    for option in options:
        with pytest.raises(SystemExit) as left:
            COMMANDS[name].parse_arguments(["x", f"{option}=--"])
        assert left.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert option in error and "'--' is not a value" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_misspelt_option_gets_a_suggestion(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in options_of(name, capsys, ""):
        typed = f"{option}x"
        with pytest.raises(SystemExit) as left:
            COMMANDS[name].parse_arguments([typed])
        assert left.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert typed in error and "did you mean --" in error


def test_values_abbreviations_and_words_after_two_dashes_are_not_misspelt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.parse_arguments(["--tensor-par", "1", "--", "--tensr"]).serve_options == ["--tensr"]
    assert plan.parse_arguments(["-- a model"]).model == "-- a model"
    with pytest.raises(SystemExit) as left:
        plan.parse_arguments(["--help", "--nosuch"])
    assert left.value.code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_parser_refuses_any_words_without_a_traceback(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-h", *options_of(name, capsys, "")]
    chosen = random.Random(0)
    values = ["", "-", "--", "---", "x", "-1", "=", "@", "\n", "\udcff", "--=--", "-x", "--x", "1"]
    for _ in range(1000):
        pairs = [f"{chosen.choice(options)}={chosen.choice(values)}" for _ in range(5)]
        words = [chosen.choice([*options, *values, *pairs]) for _ in range(chosen.randint(1, 5))]
        try:
            COMMANDS[name].parse_arguments(words)
        except SystemExit as left:
            assert left.code in (0, 2), words
        except (InputError, UserError):
            continue
