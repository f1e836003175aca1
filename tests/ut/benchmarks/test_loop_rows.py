"""Stories of the loop, and the kinds of wrong rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.loop.corpus import (
    BOS_ID,
    EOS_ID,
    PROMPT_TOKENS,
    VOCABULARY,
    decode,
    encode,
    stories,
)
from benchmarks.loop.rows import (
    WRONG,
    file_of,
    of_other_requests,
    read_rows,
    rotated,
    shifted,
    write_rows,
    write_wrong,
)
from benchmarks.loop.target import VOCAB_SIZE

LENGTHS = (5, 2, 9)


@pytest.fixture
def rows() -> list[torch.Tensor]:
    """Rows of three requests. The value of a row encodes request and position."""
    return [
        torch.arange(n).view(n, 1, 1).expand(n, 4, 8).to(torch.bfloat16) + 10 * request
        for request, n in enumerate(LENGTHS)
    ]


def values(rows: torch.Tensor) -> list[int]:
    return [int(row[0, 0]) for row in rows]


def test_words_of_a_story_are_known_and_fit_the_model() -> None:
    assert len(VOCABULARY) <= VOCAB_SIZE
    for story in stories(200, seed=0):
        assert (story[0], story[-1]) == (BOS_ID, EOS_ID)
        assert encode(decode(story[1:-1])) == story[1:-1]


def test_prompt_introduces_both_people_and_ends_with_a_line() -> None:
    for story in stories(50, seed=0):
        prompt = decode(story[:PROMPT_TOKENS])
        assert prompt.count(" has a ") == 2
        assert prompt.endswith(" .")


def test_held_out_stories_differ_from_training_stories() -> None:
    assert stories(3, seed=2) == stories(3, seed=2)
    assert not {tuple(story) for story in stories(500, seed=2)} & {
        tuple(story) for story in stories(64, seed=3)
    }


def test_shifted_rows_belong_to_the_previous_position(rows: list[torch.Tensor]) -> None:
    assert list(map(values, shifted(rows))) == [
        [0, 0, 1, 2, 3],
        [10, 10],
        [20, 20, 21, 22, 23, 24, 25, 26, 27],
    ]


def test_rows_of_other_requests_include_none_of_the_same_request(rows: list[torch.Tensor]) -> None:
    assert list(map(values, of_other_requests(rows))) == [
        [10, 11, 20, 21, 22],
        [20, 21],
        [0, 1, 2, 3, 4, 10, 11, 0, 1],
    ]


def test_rows_in_another_basis_keep_their_norms_and_angles() -> None:
    before = [torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    after = rotated(before)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one @ one.mT, other @ other.mT, atol=1e-4)
        assert (one - other).norm(dim=-1).min() > 0.5 * one.norm(dim=-1).min()


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_rows_are_written_with_the_right_tokens(
    kind: str, rows: list[torch.Tensor], tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    for index, each in enumerate(rows):
        write_rows(right, index, each, torch.arange(len(each)) + index)
    write_wrong(kind, right, wrong, len(rows))
    assert sorted(path.name for path in wrong.iterdir()) == [
        file_of(wrong, index).name for index in range(3)
    ]
    for index, (found, token_ids) in enumerate(read_rows(wrong, len(rows))):
        assert token_ids.tolist() == list(range(index, index + LENGTHS[index]))
        assert torch.equal(found, WRONG[kind](rows)[index])
        assert not torch.equal(found, rows[index])


def test_stories_differ_from_each_other() -> None:
    assert all(one != other for one, other in pairwise(stories(50, seed=0)))
