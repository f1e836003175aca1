"""The order of steps, the sizes of servers, and the written report."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from documents import blocks, page, rows

from vllm_ascend_hsx.cli import hardware_report
from vllm_ascend_hsx.report import document
from vllm_ascend_hsx.report.context import Context, DoesNotFitError, Sizes, choose_sizes
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, Result
from vllm_ascend_hsx.report.run import run_all
from vllm_ascend_hsx.report.runner import run_step
from vllm_ascend_hsx.report.steps import STEPS, Step, rows_run

NAMES = [step.name for step in STEPS]
LINES = [line.key for step in STEPS for line in step.lines]
GIB = 1 << 30
SIZES = {"tensor_parallel": 2, "data_parallel": 1, "expert_parallel": True}
FIGURES = {
    "requests_per_s": 2.0,
    "prompt_tokens_per_s": 500.0,
    "step_ms": 5.0,
    "steps": 3,
    "unread": 0,
}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path / "models" / "tiny", tmp_path, emulated=True)


def good(step: Step, context: Context) -> list[Result]:
    return [
        Result(line.key, HELD, f"good {line.key}", dict(SIZES) if line.key == "sizes" else {})
        for line in step.lines
    ]


def run(context: Context, how: Any, chosen: Sequence[str] = NAMES) -> dict[str, Result]:
    results = run_all(context, chosen, lambda step: None, lambda step, found: None, how)
    assert [result.line for result in results] == LINES
    return {result.line: result for result in results}


def test_step_sees_findings_of_earlier_steps(context: Context) -> None:
    seen: dict[str, Sizes] = {}

    def note(step: Step, context: Context) -> list[Result]:
        seen[step.name] = context.sizes
        return good(step, context)

    assert {result.outcome for result in run(context, note).values()} == {HELD}
    assert (seen["npus"], seen["parallel"]) == (Sizes(1, 1, False), Sizes(2, 1, True))


@pytest.mark.parametrize(
    "mistake", ["sys.exit(7)", "import time; time.sleep(600)"], ids=["fails", "hangs"]
)
@pytest.mark.parametrize("name", NAMES)
def test_failed_or_hanging_step_affects_only_dependent_steps(
    name: str, mistake: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: Step, context: Context) -> list[Result]:
        if step.name != name:
            return good(step, context)
        told, log = context.output / "told", context.output / "log"
        command = [sys.executable, "-c", f"import sys; {mistake}"]
        # A busy machine may take seconds to start a failing process.
        return run_step(
            step, command, told, log, limit_s=60.0 if "exit" in mistake else 1.0, stop_s=0.5
        )

    found = run(context, broken)
    reason = (
        "the step ended with exit code 7"
        if "exit" in mistake
        else "the step was stopped at its limit of 1 s"
    )
    by_name = {step.name: step for step in STEPS}
    lost = {line.key for line in by_name[name].lines}
    for step in STEPS:
        if step.name == name:
            assert {(found[line.key].outcome, found[line.key].found) for line in step.lines} == {
                (BROKE, reason)
            }
        elif lost & set(step.needs):
            lost |= {line.key for line in step.lines}
            assert {found[line.key].outcome for line in step.lines} == {NOT_RUN}
            assert all(reason in found[line.key].found for line in step.lines)
        else:
            assert {found[line.key].outcome for line in step.lines} == {HELD}


def test_excluded_steps_are_not_run_and_say_so(context: Context) -> None:
    found = run(context, good, ["software", "parallel"])
    assert {found[key].found for key in ("npus", "copies", "plan")} == {"excluded by --steps"}
    assert found["software"].outcome == HELD
    assert found["parallel"].found == "needs 'sizes': excluded by --steps"


def test_interrupted_command_reports_the_lines_so_far(context: Context) -> None:
    def interrupted(step: Step, context: Context) -> list[Result]:
        if step.name == "parallel":
            raise KeyboardInterrupt
        return good(step, context)

    with pytest.raises(KeyboardInterrupt):
        run(context, interrupted)
    lines = {
        each["line"]: each
        for each in json.loads((context.output / "hardware-report.json").read_text())["lines"]
    }
    assert (lines["one NPU"]["outcome"], lines["stop"]["outcome"]) == (HELD, NOT_RUN)
    assert lines["stop"]["found"] == "the command ended before this step"


# Sizes

DENSE = {"num_attention_heads": 32}
MOE = {"num_attention_heads": 48, "num_local_experts": 256}


@pytest.mark.parametrize(
    ("config", "weights", "npus", "free", "sizes"),
    [
        (DENSE, 16, 1, 60, Sizes(1, 1, False)),
        (DENSE, 16, 2, 60, Sizes(2, 1, False)),
        (DENSE, 16, 8, 60, Sizes(2, 2, False)),
        (DENSE, 140, 8, 60, Sizes(4, 2, False)),
        (MOE, 430, 16, 60, Sizes(8, 2, True)),
        (MOE, 215, 8, 60, Sizes(4, 2, True)),
        (MOE, 300, 8, 60, Sizes(4, 2, True)),
        ({"num_attention_heads": 3}, 1, 4, 60, Sizes(1, 2, False)),
    ],
    ids=[
        "one NPU",
        "two",
        "eight",
        "large",
        "MoE",
        "half the MoE",
        "a MoE whose experts two DP ranks share",
        "odd heads",
    ],
)
def test_smallest_fitting_tp_is_chosen_with_two_dp_ranks_if_possible(
    config: dict[str, Any], weights: int, npus: int, free: int, sizes: Sizes
) -> None:
    assert choose_sizes(config, weights * GIB, npus, free * GIB) == sizes


def test_user_sizes_are_used_or_refused_by_name() -> None:
    assert choose_sizes(DENSE, GIB, 8, 60 * GIB, 8, 1) == Sizes(8, 1, False)
    assert choose_sizes(DENSE, GIB, 8, 60 * GIB, data_parallel=4) == Sizes(2, 4, False)
    with pytest.raises(
        DoesNotFitError, match="weights of 1,000.0 GiB do not fit on 8 NPUs with 60.0 GiB free each"
    ):
        choose_sizes(MOE, 1000 * GIB, 8, 60 * GIB)
    with pytest.raises(DoesNotFitError, match=r"DP=4 x TP=4 needs 16 NPUs, but there are 8"):
        choose_sizes(DENSE, GIB, 8, 60 * GIB, 4, 4)


# The document


def every_line() -> list[Result]:
    found = {key: Result(key, HELD, "as expected") for key in LINES}
    found["npus"] = Result("npus", MEASURED, "2 | 3 NPUs", {"npu_smi": "```not yours```"})
    for name, rate in (("off", 4.0), ("hsx", 3.0)):
        found[name] = Result(
            name, MEASURED, "fast", {"prefill-bound": FIGURES | {"requests_per_s": rate}}
        )
    found["KV cache, hsx"] = Result("KV cache, hsx", MEASURED, "", {"tokens": 123456})
    found["vllm"] = Result("vllm", BROKE, "did not\nstart", log="Traceback")
    return list(found.values())


def test_the_markdown_has_every_line_the_servers_figures_and_the_logs(context: Context) -> None:
    text = document.markdown(context, every_line())
    assert all(f"| {line.what} |" in text for step in STEPS for line in step.lines)
    assert "**The NPUs are emulated on a CPU" in text
    assert "| vllm-ascend-hsx | prefill-bound | 3.00 | 75.0% | 500 | 5.00 | 123,456 |" in text
    assert "| throughput with vLLM's own connector | did not hold | did not start |" in text
    assert (
        "<details><summary>throughput with vLLM's own "
        "connector</summary>\n\n```text\nTraceback\n```"
    ) in text
    assert "2 \\| 3 NPUs" in text and "````text\n```not yours```" in text


def test_report_names_neither_machine_nor_directories(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("socket.gethostname", lambda: "node-17")
    found = [
        *every_line()[:-1],
        Result(
            "plan",
            BROKE,
            f"{context.output}/logs and {context.model} on node-17",
            log="/home/somebody/x",
        ),
    ]
    for path in document.write(context, found):
        text = path.read_text()
        assert "OUTPUT/logs and MODELS/tiny on HOST" in text and "~/x" in text
        assert str(context.output) not in text and "somebody" not in text


def test_json_figures_equal_those_of_the_lines(context: Context) -> None:
    document.write(context, every_line())
    content = json.loads((context.output / "hardware-report.json").read_text())
    assert [each["line"] for each in content["lines"]] == LINES
    assert content["lines"][LINES.index("KV cache, hsx")]["data"] == {"tokens": 123456}


# The page


def test_the_checklist_names_the_step_that_runs_each_row() -> None:
    table = {
        int(row[0]): row[-1].strip("`")
        for row in rows(page("operations.md"))
        if row[0].isdecimal() and len(row) == 5  # other tables of the page have other columns
    }
    assert {number: step for number, step in table.items() if step} == rows_run()
    assert len(table) == document.CHECKLIST_ROWS


def test_every_report_command_of_the_checklist_names_the_step_of_its_row() -> None:
    for row in rows(page("operations.md")):
        if row[0].isdecimal() and "hsx hardware-report" in row[1]:
            words = shlex.split(row[1].strip("`"))
            steps = hardware_report.parse_arguments(words[2:]).steps
            assert steps == ("npus", row[-1].strip("`"))


def test_operations_page_has_the_command_and_every_step() -> None:
    (command,) = blocks("operations.md", "report")
    words = shlex.split(command)
    assert words[:2] == ["hsx", "hardware-report"]
    assert hardware_report.parse_arguments(words[2:]).steps == tuple(NAMES)
    table = page("operations.md").partition("| step |")[2].partition("\n\n")[0]
    assert [
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1])
    ] == NAMES


# The command


def test_machine_without_npus_gets_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        hardware_report, "npu_is_emulated", lambda: False
    )  # the emulator is on the tests' path
    assert hardware_report.main(["--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this machine has no NPUs" in line and "hsx emulate -- hsx hardware-report" in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def on_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_report, "count_npus", lambda: 2)


@pytest.mark.usefixtures("on_npus")
def test_unusable_input_is_named_before_any_step_runs(
    tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "report").touch()
    for arguments, message in (
        (
            ["--model", str(tmp_path)],
            f"--model='{tmp_path}' has no config.json. Give the directory of a downloaded model.",
        ),
        (
            ["--model", str(tiny_qwen3), "--output", str(tmp_path / "used")],
            "is not empty. Give a new directory",
        ),
        (
            ["--model", str(tiny_qwen3), "--output", str(tmp_path / "used" / "report")],
            "cannot be a directory",
        ),
    ):
        assert hardware_report.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_unknown_step_is_refused_with_the_known_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        hardware_report.parse_arguments(["--steps", "software,nonsense"])
    assert "'nonsense' is not a step; choose from software, environment" in capsys.readouterr().err


@pytest.mark.usefixtures("on_npus")
def test_exit_code_is_1_if_a_line_did_not_hold(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_but(broken: str) -> Any:
        def work(step: Step, context: Context, limit_s: float | None) -> list[Result]:
            return [
                Result(line.key, BROKE if line.key == broken else HELD, "") for line in step.lines
            ]

        return work

    for broken, code in (("nothing", 0), ("stop", 1)):
        monkeypatch.setattr("vllm_ascend_hsx.report.run.run_process", all_but(broken))
        assert (
            hardware_report.main(["--model", str(tiny_qwen3), "--output", str(tmp_path / broken)])
            == code
        )
