"""From a target to drafts that vllm-ascend accepts, following docs/loop.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_hsx.cli import demo
from vllm_ascend_hsx.demo.loop.drafts import EAGLE3
from vllm_ascend_hsx.demo.loop.results import OURS, Kind, Results
from vllm_ascend_hsx.demo.loop.run import KINDS


@pytest.mark.long
def test_our_rows_make_as_good_a_draft_as_those_of_transformers_and_wrong_rows_a_worse_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--loop", "--output", str(tmp_path / "loop")]) == 0
    results = Results.read(tmp_path / "loop" / "results.json")
    assert results.kinds == list(KINDS)
    ours = results.of(Kind(EAGLE3, OURS), 0)
    assert ours is not None
    # Half of a story's words follow from earlier words.
    assert ours.length > 2
    output = capsys.readouterr().out
    assert f"{ours.length:.2f}" in output
