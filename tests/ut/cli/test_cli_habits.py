"""Common behaviour of all commands: result on stdout, progress on stderr, --json, --quiet."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import page, rows
from generate_bench import Bench
from generate_files import token_rows, write_jsonl
from written_files import rows_of, write

from vllm_ascend_hsx.cli import demo, doctor, hardware_report
from vllm_ascend_hsx.cli.main import COMMANDS, main
from vllm_ascend_hsx.demo import hand
from vllm_ascend_hsx.demo.session import Served
from vllm_ascend_hsx.demo.verify import Row
from vllm_ascend_hsx.doctor import patch_points
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.report.result import HELD, Result

# These commands run another program, and the output is that of the program.
PASS_ON = {"emulate", "speculators"}


class Case(NamedTuple):
    """A valid command line, a part of the result, and a part of the progress, if any."""

    words: str
    result: str
    progress: str = ""


CASES = {
    "clean": Case("{dir}/left --dry-run", "would be removed: 2 locks"),
    "demo": Case(
        "--model {dir}/model --no-reference --output {dir}/demo",
        "1 of 1 requests are finite",
        "starting it",
    ),
    "doctor": Case("--model {dir}/model", "no problems", "importing vllm and vllm-ascend"),
    "generate": Case(
        "--data {dir}/data.jsonl --output {dir}/out --dry-run",
        "rows: 1, 0 of them finished",
        "data.jsonl: 1 rows",
    ),
    "hardware-report": Case(
        "--model {dir}/model --output {dir}/report --steps software",
        "2 held",
        "checking versions",
    ),
    "inspect": Case("{dir}/rows", "verified"),
    "plan": Case("minimax-m2", "24,576 bytes"),
    "serve": Case("{dir}/model --dry-run", "--kv-transfer-config"),
    "status": Case("{dir}/ledgers", "0 of 3 rows done"),
    "verify": Case("{dir}/rows", "2 good"),
}
NO_SHORT = ("serve", "-q")  # -q is vLLM's --quantization
REFUSED = {
    "clean": "{dir}/none",
    "demo": "--model {dir}/none",
    "doctor": "--model {dir}/none",
    "generate": "--data {dir}/none.jsonl --output {dir}/out",
    "hardware-report": "--model {dir}/none",
    "inspect": "{dir}/none",
    "plan": "{dir}/none",
    "serve": "{dir}/none",
    "status": "{dir}/none",
    "verify": "{dir}/none",
}
Run = Callable[..., tuple[int, str, str]]


def test_every_command_is_in_the_table() -> None:
    assert {*CASES} | PASS_ON == {*REFUSED} | PASS_ON == {*COMMANDS}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command of the tables with more options. Return exit code, stdout and stderr.

    Servers, checks of the machine and steps of the report are replaced, because they take minutes.
    """
    for name in ("a", "b"):
        write(tmp_path / "rows", name, rows_of(5))
    (tmp_path / "left").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "ledgers").mkdir()
    for name in ("a", "b"):
        (tmp_path / "left" / f"{name}.safetensors.lock").touch()
    (tmp_path / "data.jsonl").write_text('{"token_ids": [1, 2]}\n')
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 62,
        "hidden_size": 64,
        "vocab_size": 512,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    ledger = [
        {"ledger": 3, "request": {}, "world_size": 1, "rank": 0, "id": "0"},
        {"run": {"rows": 3, "invalid": 0}, "time": 1.0},
    ]
    (tmp_path / "ledgers" / "ledger.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in ledger)
    )

    def serve(console: Any, *others: Any) -> Served:
        console.print("starting it")
        return Served([], [Row("a", 1, 0, True, "right")], None)

    monkeypatch.setattr("vllm_ascend_hsx.demo.session._serve", serve)
    monkeypatch.setattr(demo, "_compile_emulator", lambda console: None)
    monkeypatch.setattr(demo, "NEEDED", ())
    monkeypatch.setattr(
        doctor, "check_software", lambda: iter([Finding("software", "vllm", "ok", "0.23.0")])
    )
    monkeypatch.setattr(patch_points, "check_patch_points", lambda right: iter([]))
    monkeypatch.setattr(hardware_report, "npu_is_emulated", lambda: True)
    held = lambda step, context, limit: [Result(line.key, HELD, "") for line in step.lines]  # noqa: E731
    monkeypatch.setattr("vllm_ascend_hsx.report.run.run_process", held)

    def run(name: str, words: str, *options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([name, *options, *(word.format(dir=tmp_path) for word in words.split())])
        except SystemExit as left:
            code = int(left.code or 0)
        printed = capsys.readouterr()
        said = [
            line
            for line in printed.err.splitlines(True)
            if not line.endswith(f"{COMMANDS[name].at_work} ...\n")
        ]
        return code, printed.out, "".join(said)

    return run


def fresh(tmp_path: Path, name: str) -> str:
    """Return the words of a command. A report gets a new directory, because it must be empty."""
    return CASES[name].words.replace(
        "{dir}/report", f"{{dir}}/report-{len(list(tmp_path.iterdir()))}"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_on_stdout_and_progress_on_stderr(
    name: str, run: Run, tmp_path: Path
) -> None:
    code, out, err = run(name, fresh(tmp_path, name))
    assert code == 0, err
    assert CASES[name].result in out
    if CASES[name].progress:
        assert CASES[name].progress in err and CASES[name].progress not in out
    else:
        assert err == ""


def keys_of(command: str) -> set[str]:
    """Return the documented keys of a command's JSON."""
    section = page("operations.md").partition("## In scripts")[2].partition("\n## ")[0]
    documented = dict(rows(section))
    return set(re.findall(r"`(\w+)`", documented[f"`hsx {command}`"]))


def test_json_of_a_run_has_the_documented_keys(bench: Bench) -> None:
    code, printed = bench.run("--json", "-q")
    found = json.loads(printed)
    assert code == 0 and set(found) == keys_of("generate")
    assert (found["total"], found["done"], found["stopped_by"]) == (6, 6, None)
    assert found["endpoints"] == [{"url": bench.server.url, "answered": 6, "failed": 0}]


def test_reasons_of_a_failed_run_are_in_json_and_on_stderr(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.server.behave = lambda seen: 400 if seen.row == 3 else "ok"
    data = write_jsonl(bench.root / "data.jsonl", token_rows(6))
    words = [
        "--data",
        data,
        "--output",
        bench.output,
        "--endpoint",
        bench.server.url,
        "--json",
        "-q",
    ]
    assert main(["generate", *map(str, words)]) == 1
    out, err = capsys.readouterr()
    (failure,) = json.loads(out)["failures"]
    assert failure["row"] == 3 and failure["reason"] in err


def test_json_of_a_demo_that_serves_has_the_documented_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_compile_emulator", lambda console: None)
    monkeypatch.setattr(
        hand,
        "serve_until_interrupted",
        lambda console, server, title, start_s, announce: announce(),
    )
    assert main(["demo", "--serve", "--output", str(tmp_path), "--json", "-q"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == keys_of("demo --serve")


@pytest.mark.parametrize("name", CASES)
def test_json_is_one_object_on_stdout_with_the_documented_keys(
    name: str, run: Run, tmp_path: Path
) -> None:
    documented = keys_of(name if name != "generate" else "generate --dry-run")
    code, out, err = run(name, fresh(tmp_path, name), "--json")
    assert code == 0 and CASES[name].progress in err
    printed = json.loads(out)
    if name == "plan":  # the costs have separate names
        printed = {key: value for key, value in printed.items() if key in documented}
    assert set(printed) == documented
    assert run(name, fresh(tmp_path, name), "--json", "--quiet")[2] == "", (
        "no progress with --quiet"
    )


QUIET = [
    (name, option) for name in CASES for option in ("-q", "--quiet") if (name, option) != NO_SHORT
]


@pytest.mark.parametrize(("name", "option"), QUIET)
def test_successful_quiet_command_prints_nothing(
    name: str, option: str, run: Run, tmp_path: Path
) -> None:
    assert run(name, fresh(tmp_path, name), option) == (0, "", "")


def test_short_q_of_hsx_serve_is_passed_to_vllm(run: Run) -> None:
    code, out, _ = run("serve", "{dir}/model -q ascend --dry-run --json")
    assert code == 0 and json.loads(out)["arguments"][3:5] == ["-q", "ascend"]


@pytest.mark.parametrize("options", [["--quiet"], ["--json"], []])
@pytest.mark.parametrize("name", REFUSED)
def test_errors_go_to_stderr_only(name: str, options: list[str], run: Run) -> None:
    code, out, err = run(name, REFUSED[name], *options)
    assert code == 2
    assert f"hsx {name}: " in err
    assert out == "" or name == "status"  # the command shows the readable files


def test_non_finite_numbers_are_null_in_json(run: Run, tmp_path: Path) -> None:
    states = rows_of(3)
    states[1, 0, 0] = math.nan
    write(tmp_path / "odd", "a", states)
    (found,) = json.loads(run("inspect", "{dir}/odd", "--json")[1])["files"]
    assert found["norms"][0] is None and found["norms"][1] > 0


@pytest.mark.parametrize("name", sorted(PASS_ON))
def test_help_of_wrapper_commands_says_that_they_print_nothing(name: str, run: Run) -> None:
    assert "prints nothing" in " ".join(run(name, "--help")[1].split())
