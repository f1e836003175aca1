"""`python -m benchmarks.loop`: output and exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.loop import __main__
from benchmarks.loop.drafts import EAGLE3
from benchmarks.loop.results import OURS, PLAIN, TRANSFORMERS, Kind, Results, Trained
from benchmarks.loop.rows import SHIFTED, WRONG
from benchmarks.loop.run import Loop

RIGHT = {OURS: 20, TRANSFORMERS: 20, SHIFTED: 1}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """Record the loops that run. Each returns ten drafts of three tokens for each kind of rows."""
    found: list[Loop] = []

    def run(self: Loop) -> Results:
        found.append(self)
        return Results(
            0.5,
            [
                Trained(EAGLE3, rows, PLAIN, 0, 1.0, 1.0, 10, 30, accepted)
                for rows, accepted in RIGHT.items()
            ],
        )

    monkeypatch.setattr(Loop, "run", run)
    return found


def test_lengths_are_shown_and_exit_code_is_zero(
    ran: list[Loop], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["--output", str(tmp_path)]) == 0
    output, progress = (" ".join(text.split()) for text in capsys.readouterr())
    assert f"continue with --output {tmp_path}" in progress
    assert "3.00" in output
    assert "1.10" in output
    assert "make as good a draft as rows of transformers" in output
    assert ran[0].emulated(3)["NPU_EMULATOR_NPUS"] == "3"


def test_wrong_rows_with_full_acceptance_are_named_and_exit_code_is_one(
    ran: list[Loop],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RIGHT, SHIFTED, 20)
    assert __main__.main(["--output", str(tmp_path)]) == 1
    assert f"the drop with rows {SHIFTED} (3.00)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "seeds", "wrong"), [([], 1, 1), (["--seeds", "3"], 3, len(WRONG))]
)
def test_more_than_one_seed_adds_kinds_of_wrong_rows(
    arguments: list[str], seeds: int, wrong: int, ran: list[Loop], tmp_path: Path
) -> None:
    __main__.main(["--output", str(tmp_path), *arguments])
    plan = ran[0].plan
    assert len(set(plan)) == len(plan)
    for rows in (OURS, TRANSFORMERS, SHIFTED):
        assert [seed for kind, seed in plan if kind == Kind(EAGLE3, rows)] == list(range(seeds))
    assert len({kind.rows for kind, _ in plan} & WRONG.keys()) == wrong


def test_missing_speculators_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(name: str) -> Any:
        return None if name == "speculators" else object()

    monkeypatch.setattr(__main__, "find_spec", lacking)
    assert __main__.main([]) == 1
    assert "missing packages: speculators; they train the drafts" in " ".join(
        capsys.readouterr().err.split()
    )
