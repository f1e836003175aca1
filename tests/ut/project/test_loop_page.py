"""docs/loop.md shows what was measured, by the command that it names."""

from __future__ import annotations

import shlex

import loop_page
import pytest
from documents import blocks, page

from benchmarks.loop.drafts import EAGLE3, OPTIONS, OPTIONS_OF_TARGET
from benchmarks.loop.results import OURS, Kind, Results
from benchmarks.loop.run import Sizes, plan_of
from benchmarks.loop.target import LAYERS
from vllm_ascend_hsx.cli import demo

TEXT = page("loop.md")


@pytest.fixture(scope="module")
def measured() -> Results:
    return Results.read(loop_page.DATA)


def test_the_table_is_the_one_that_is_made_of_what_was_measured(measured: Results) -> None:
    assert loop_page.page(TEXT, measured) == TEXT


def test_what_was_measured_is_what_the_command_with_three_seeds_trains(measured: Results) -> None:
    assert {(each.kind, each.seed) for each in measured.trained} == set(plan_of(3))
    assert measured.problems() == []


def test_the_draft_of_ours_that_single_ones_compare_with_is_named(measured: Results) -> None:
    ours = measured.of(Kind(EAGLE3, OURS), 0)
    assert ours is not None
    assert f"the first seed, with which our rows give {ours.length:.2f}" in " ".join(TEXT.split())
    assert {
        each.seed
        for kind in measured.kinds
        for each in measured.drafts(kind)
        if len(measured.drafts(kind)) == 1
    } == {0}


def test_the_command_is_one_that_hsx_accepts() -> None:
    (command,) = blocks("loop.md", "loop")
    words = shlex.split(command)
    assert words[:2] == ["hsx", "demo"]
    assert demo.parse_arguments(words[2:]).loop


def test_the_sizes_are_those_of_the_command() -> None:
    text = " ".join(TEXT.split())
    assert LAYERS == 4
    assert f"rows of {Sizes.stories} stories" in text
    assert f"continues {Sizes.held_out} stories" in text


def test_what_drafts_are_trained_with_is_named() -> None:
    text = " ".join(TEXT.split())
    for words in (*OPTIONS.values(), *OPTIONS_OF_TARGET.values()):
        assert " ".join(words) in text


def test_a_new_table_takes_the_place_of_the_old_one_alone(measured: Results) -> None:
    changed = loop_page.page(TEXT, Results(0.0, measured.trained[:1]))
    assert len(changed.splitlines()) < len(TEXT.splitlines())
    assert loop_page.page(changed, measured) == TEXT
