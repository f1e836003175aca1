"""An invalid path or number gives one line with option, value and bounds, and exit code 2."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_npu_emulator.settings import parse_npus, parse_size
from vllm_ascend_hsx.cli import demo, generate, inspect, plan, verify
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.protocol.arguments import LONGEST_S

DAY = float(LONGEST_S)
TIB = float(1 << 40)
GENERATE = ["generate", "--data", "{dir}/none.jsonl", "--output", "{dir}/out"]
PLAN = ["plan", "minimax-m2"]
# Smallest and largest number of (command, option). A smallest of None means any above 0.
WHOLE = {
    (*GENERATE, "--concurrency"): (1, 1000),
    (*GENERATE, "--max-retries"): (0, 1000),
    (*GENERATE, "--max-consecutive-errors"): (1, 10**9),
    (*GENERATE, "--limit"): (1, 10**12),
    (*GENERATE, "--world-size"): (1, 10**6),
    (*GENERATE, "--rank"): (0, 10**6 - 1),
    (*GENERATE, "--include-output-tokens", "--max-tokens"): (1, 2**31 - 1),
    **{(*PLAN, option): (1, 4096) for option in ("--tp", "--dp")},
    **{(*PLAN, option): (1, 10**9) for option in ("--max-num-batched-tokens", "--prompt-tokens")},
    (*PLAN, "--staging-slots"): (1, 8),
    **{
        ("demo", "--device", "npu", "--model", ".", option): (1, 4096)
        for option in ("--data-parallel-size", "--tensor-parallel-size")
    },
    ("inspect", "{dir}", "--limit"): (1, 10**9),
    ("verify", "{dir}", "--jobs"): (1, 1024),
    ("emulate", "--npus"): (1, 64),
}
FLOATS = {
    (*GENERATE, "--request-timeout"): (None, DAY),
    (*GENERATE, "--retry-delay"): (None, DAY),
    (*PLAN, "--prefill-speed"): (None, 1e12),
    ("demo", "--start-timeout"): (None, DAY),
    ("demo", "--request-timeout"): (None, DAY),
}
SIZES = {
    **{(*PLAN, option): (0, TIB) for option in ("--kv-memory", "--ring")},
    ("emulate", "--hbm"): (256 << 20, TIB),
}
NOT_NUMBERS = [
    "nan",
    "inf",
    "1e300",
    "1e30",
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    "-1",
    "True",
    "",
    "0x10",
    "1 000",
    "many",
]


ESCAPE = "\x1b[31m"


@pytest.mark.parametrize(
    "arguments",
    [
        ["clean", ".", "--errors-older-than", f"1{ESCAPE}d"],
        *(
            [name, f"--{ESCAPE}"]
            for name in ("demo", "doctor", "generate", "inspect", "plan", "status", "verify")
        ),
        ["verify", ".", "--jobs", ESCAPE],
        ["generate", "--data", ".", "--output", ESCAPE, "--limit", f"{ESCAPE}1"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_errors_escape_control_characters(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert "\x1b" not in said.out + said.err
    assert "\\x1b[31m" in said.err or "required" in said.err


def ids(case: tuple[str, ...]) -> str:
    return f"{case[0]} {case[-1]}"


def refusal(
    case: tuple[str, ...], value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the last line of the error."""
    arguments = [word.replace("{dir}", str(folder)) for word in case]
    tail = ["--", "true"] if case[0] == "emulate" else []
    try:
        words = [*arguments[:-1], f"{arguments[-1]}={value}", *tail]
        code = (
            main(words) if case[0] != "demo" else demo.parse_arguments(words[1:])
        )  # the command would start a server
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    assert code == 2, printed
    assert "Traceback" not in printed.err
    return printed.err.splitlines()[-1]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: value[:12] or "nothing")
@pytest.mark.parametrize("case", [*WHOLE, *FLOATS, *SIZES], ids=ids)
def test_number_outside_the_bounds_is_refused_with_option_value_and_bounds(
    case: tuple[str, ...], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(case, value, tmp_path, capsys)
    assert f"{case[-1]}" in line
    assert repr(value if len(value) <= 40 else value[:40] + "...") in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("case", "bounds"),
    {**WHOLE, **FLOATS}.items(),
    ids=lambda case: ids(case) if isinstance(case[0], str) else "",
)
def test_value_just_outside_a_bound_is_refused(
    case: tuple[str, ...],
    bounds: tuple[float | None, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    least, most = bounds
    for value in (
        "0" if least is None else str(least - 1),
        str(most + 1) if isinstance(most, int) else repr(most * 1.001),
    ):
        line = refusal(case, value, tmp_path, capsys)
        assert f"'{value}'" in line
        assert f"{most:.15g}" in line


def accepted(case: tuple[str, ...], value: object, folder: Path) -> None:
    """Only the options are parsed; the command does not run."""
    words = [*(word.replace("{dir}", str(folder)) for word in case[1:-1]), f"{case[-1]}={value}"]
    if case[0] == "emulate":
        parse_npus("", str(value)) if case[-1] == "--npus" else parse_size("", str(value))
        return
    if case[-1] == "--rank":
        words += ["--world-size", "1000000"]
    modules = {
        "demo": demo,
        "generate": generate,
        "inspect": inspect,
        "plan": plan,
        "verify": verify,
    }
    modules[case[0]].parse_arguments(words)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("case", "bounds"),
    {**WHOLE, **FLOATS, **SIZES}.items(),
    ids=lambda case: ids(case) if isinstance(case[0], str) else "",
)
def test_bounds_themselves_are_accepted(
    case: tuple[str, ...], bounds: tuple[float | None, float], tmp_path: Path
) -> None:
    least, most = bounds
    for value in (most, 1e-9 if least is None else least):
        accepted(case, int(value) if float(value).is_integer() else value, tmp_path)


def test_too_many_emulated_npus_are_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    words = ["demo", "--data-parallel-size", "9", "--tensor-parallel-size", "8"]
    command = [sys.executable, "-m", "vllm_ascend_hsx.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert (
        "--data-parallel-size x --tensor-parallel-size=72 is more than the 64 NPUs of an emulated"
        in done.stderr.replace("\n", " ")
    )


@pytest.mark.parametrize(
    "words",
    [
        "--max-num-batched-tokens 1000000000",
        "--prompt-tokens 1000000000 --prefill-speed 1000000000000",
        "--kv-memory 1024GiB --ring 1024GiB",
        "--kv-memory 0",
        "--dp 4096",
        "--max-num-batched-tokens 1",
    ],
)
def test_any_number_within_the_bounds_gives_a_plan_or_a_refusal(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*PLAN, *words.split()])
    assert (code, bool(capsys.readouterr().out)) in ((0, True), (2, False))


def name_of(case: tuple[str, ...]) -> str:
    return case[-1].removeprefix("--").replace("-", "_")


OF_A_RUN = {
    name_of(case): bounds for case, bounds in {**WHOLE, **FLOATS}.items() if case[0] == "generate"
}


@pytest.mark.parametrize(("name", "bounds"), OF_A_RUN.items())
def test_options_have_the_same_bounds_in_python(
    name: str, bounds: tuple[float | None, float]
) -> None:
    least, most = bounds
    more = (
        {"world_size": 10**6}
        if name == "rank"
        else {"include_output": True}
        if name == "max_tokens"
        else {}
    )
    Options("", Path(), **{name: most}, **more)
    for value in (
        math.nan,
        math.inf,
        -1,
        most + 1,
        10**400,
        True,
        0 if least is None else least - 1,
    ):
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} .*: give a"):
            Options("", Path(), **{name: value}, **more)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ([*GENERATE, "--data"], "--data/--preprocessed-data"),
        ([*GENERATE, "--output"], "--output"),
        (["serve", "M", "--out"], "--out"),
        (["clean"], "directory"),
        (["verify"], "directory"),
        (["inspect"], "FILE|DIR"),
        (["inspect", "F", "--plot"], "--plot"),
        (["doctor", "--out"], "--out"),
    ],
)
def test_empty_path_is_refused(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, ""])
    assert left.value.code == 2
    assert f"argument {option}: the value is empty; give a path" in capsys.readouterr().err
