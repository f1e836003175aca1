"""Loads of the benchmarks: rows, the steps that compute them, and prompts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu

from benchmarks.pipeline import conversations
from benchmarks.pipeline.rows import (
    MINIMAX_M2,
    TINY,
    Load,
    Source,
    assert_files_are_right,
    token_ids,
)

STEP_TOKENS = 32
SOURCE_TOKENS = 96


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(TINY, SOURCE_TOKENS, torch.device("npu:0"))


@pytest.mark.parametrize("evenly", [False, True])
@pytest.mark.parametrize(
    ("tokens", "requests", "in_flight"), [(8, 6, 2), (48, 3, 1), (33, 4, 4), (5, 40, 40)]
)
def test_every_row_is_in_exactly_one_step(
    tokens: int, requests: int, in_flight: int, evenly: bool
) -> None:
    load = Load(tokens, requests, in_flight, SOURCE_TOKENS, STEP_TOKENS, evenly)
    seen = np.zeros((requests, tokens), int)
    for wave in load.waves:
        for step in wave:
            assert step.num_rows <= max(STEP_TOKENS, in_flight)
            assert step.source + step.num_rows <= SOURCE_TOKENS
            row = 0
            for span in step.spans:
                assert span.row == row
                row += span.num_rows
                seen[load.ids.index(span.request_id), span.first : span.first + span.num_rows] += 1
    assert (seen == 1).all()


def test_prompts_fill_steps_like_vllms_scheduler() -> None:
    load = Load(20, 4, 4, SOURCE_TOKENS, STEP_TOKENS)
    ((first, second, third),) = load.waves
    a, b, c, d = load.ids
    assert [(span.request_id, span.first, span.num_rows) for span in first.spans] == [
        (a, 0, 20),
        (b, 0, 12),
    ]
    assert first.begins == [a, b]
    assert [(span.request_id, span.first, span.num_rows) for span in second.spans] == [
        (b, 12, 8),
        (c, 0, 20),
        (d, 0, 4),
    ]
    assert second.begins == [c, d]
    assert [(span.request_id, span.first, span.num_rows) for span in third.spans] == [(d, 4, 16)]


def test_rows_are_finite_and_distinct(source: Source) -> None:
    assert torch.isfinite(source.host).all()
    assert len({bytes(source.bytes_of(row, 1)) for row in range(SOURCE_TOKENS)}) == SOURCE_TOKENS
    assert torch.equal(source.device.cpu(), source.host)


def test_rows_have_the_size_of_minimax_m2_with_four_layers() -> None:
    assert MINIMAX_M2.row_bytes == 4 * 3072 * 2


def test_wrong_row_or_wrong_token_is_an_error(source: Source) -> None:
    rows = source.host[:3]
    right = {"hidden_states": rows.clone(), "token_ids": torch.from_numpy(token_ids(3))}
    assert_files_are_right([(right, rows)])
    with pytest.raises(AssertionError, match="rows"):
        assert_files_are_right([({**right, "hidden_states": source.host[1:4]}, rows)])
    with pytest.raises(AssertionError, match="token ids"):
        assert_files_are_right([({**right, "token_ids": torch.arange(3)}, rows)])


def test_turns_of_a_conversation_extend_each_other_after_a_common_prefix() -> None:
    scale = conversations.Scale(conversations=3, turns=4, system=20, least=5, most=9)
    prompts = conversations.prompts_of(scale, range(3))
    assert prompts == conversations.prompts_of(scale, range(3)) != sorted(prompts)
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    by_length = sorted(prompts, key=len)
    chains = [
        [each for each in by_length if each[20:25] == list(said)]
        for said in {tuple(prompt[20:25]) for prompt in prompts}
    ]
    assert [len(chain) for chain in chains] == [4, 4, 4]
    for chain in chains:
        assert 25 <= len(chain[0]) <= 29
        assert all(
            after[: len(turn)] == turn and 5 <= len(after) - len(turn) <= 9
            for turn, after in itertools.pairwise(chain)
        )
    (warm_up,) = {tuple(prompt[:20]) for prompt in conversations.prompts_of(scale, range(-2, 0))}
    assert warm_up != tuple(prompts[0][:20])
