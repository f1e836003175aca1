"""The loop of benchmarks/loop/README.md: train, extract, train drafts, count accepted tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loop.__main__ import main
from benchmarks.loop.drafts import EAGLE3
from benchmarks.loop.results import OURS, Kind, Results
from benchmarks.loop.run import KINDS


@pytest.mark.long
def test_our_rows_make_as_good_a_draft_as_rows_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "loop")]) == 0
    results = Results.read(tmp_path / "loop" / "results.json")
    assert results.kinds == list(KINDS)
    ours = results.of(Kind(EAGLE3, OURS), 0)
    assert ours is not None
    # Half of a story's words follow from earlier words.
    assert ours.length > 2
    output = capsys.readouterr().out
    assert f"{ours.length:.2f}" in output
