"""Results of the loop: verdict, table, and counts from a server's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loop.acceptance import Acceptance, parse
from benchmarks.loop.drafts import EAGLE3
from benchmarks.loop.page import DATA, PAGE, page
from benchmarks.loop.results import (
    OURS,
    PLAIN,
    QUAROT,
    TRANSFORMERS,
    Kind,
    Results,
    Trained,
    markdown,
)
from benchmarks.loop.rows import SHIFTED
from vllm_ascend_hsx.demo import DemoError


def results(**lengths: list[float]) -> Results:
    """Return results with these lengths; each entry has 100 drafts of three tokens."""
    names = {"ours": OURS, "theirs": TRANSFORMERS, "wrong": SHIFTED}
    trained = [
        Trained(EAGLE3, names[kind], PLAIN, seed, 0.5, 10.0, 100, 300, round(100 * (length - 1)))
        for kind, several in lengths.items()
        for seed, length in enumerate(several)
    ]
    return Results(0.4, trained)


@pytest.mark.parametrize(
    ("lengths", "good"),
    [
        ({"ours": [3.0], "theirs": [3.05], "wrong": [1.2]}, True),
        ({"ours": [3.1, 2.9], "theirs": [2.9, 3.1], "wrong": [1.2, 1.3]}, True),
        ({"ours": [2.0], "theirs": [3.0], "wrong": [1.2]}, False),
        ({"ours": [3.0], "theirs": [3.0], "wrong": [3.0]}, False),
        ({"ours": [3.0], "theirs": [2.9], "wrong": [3.2]}, False),
    ],
    ids=[
        "right",
        "several seeds",
        "ours are worse",
        "wrong rows are equally good",
        "wrong rows are better",
    ],
)
def test_verdict_requires_ours_as_good_as_transformers_and_wrong_rows_worse(
    lengths: dict[str, list[float]], good: bool
) -> None:
    assert (results(**lengths).problems() == []) == good


def test_stored_results_are_found_by_kind_and_seed(tmp_path: Path) -> None:
    before = results(ours=[3.0, 2.0], theirs=[2.5])
    before.write(tmp_path / "results.json")
    after = Results.read(tmp_path / "results.json")
    assert after == before
    assert after.of(Kind(EAGLE3, OURS), 1) == before.trained[1]
    assert after.of(Kind(EAGLE3, TRANSFORMERS), 1) is None
    assert after.of(Kind("dflash", OURS), 1) is None
    assert after.of(Kind(EAGLE3, OURS, QUAROT), 1) is None
    assert Results.read(tmp_path / "none.json").trained == []


def test_table_has_a_line_for_each_kind() -> None:
    *_, ours, wrong = markdown(results(ours=[3.0, 2.0], wrong=[1.3])).splitlines()
    assert ours == "| eagle3 | of hsx generate | bfloat16 | 2 | 2.50 | 2.00 to 3.00 | 50% | 0.50 |"
    assert (
        wrong
        == "| eagle3 | shifted by one position | bfloat16 | 1 | 1.30 | 1.30 to 1.30 | 10% | 0.50 |"
    )


def test_page_has_the_recorded_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, Results.read(DATA)) == text


def test_acceptance_counts_are_summed_over_engines() -> None:
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="m"}} {value}'
        for name, value in (("drafts", 10.0), ("draft_tokens", 30.0), ("accepted_tokens", 15.0))
        for engine in range(2)
    ]
    counts = parse("".join(f"{line}\n" for line in lines))
    assert counts == Acceptance(20, 60, 30)
    assert Trained(EAGLE3, OURS, PLAIN, 0, 1.0, 1.0, *counts).length == 2.5


def test_metrics_without_drafts_are_an_error() -> None:
    with pytest.raises(DemoError, match="drafted nothing"):
        parse('vllm:num_requests_running{engine="0"} 1.0\n')
