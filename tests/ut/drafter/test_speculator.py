"""Model runner V2: the rows that the speculator stages, and waits that the runner omits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from releases import only_with

from vllm_ascend_hsx.compat.drafts import copy_no_counts, count_without_speculator
from vllm_ascend_hsx.compat.runner import BatchRow, batch_layout_v2
from vllm_ascend_hsx.config import METHOD


def batch() -> SimpleNamespace:
    return SimpleNamespace(
        req_ids=["a", "b", "c"],
        query_start_loc_np=np.array([0, 3, 4, 9], dtype=np.int32),
        num_computed_tokens_np=np.array([5, 0, 7], dtype=np.int32),
        idx_mapping=torch.tensor([2, 0, 1]),
    )


def test_the_layout_has_the_position_and_the_rows_of_each_request() -> None:
    assert batch_layout_v2(batch()) == [
        BatchRow("a", 5, 3, 0),
        BatchRow("b", 0, 1, 3),
        BatchRow("c", 7, 5, 4),
    ]


def test_batch_without_a_position_for_each_request_is_an_error() -> None:
    short = batch()
    short.num_computed_tokens_np = short.num_computed_tokens_np[:2]
    with pytest.raises(ValueError, match="shorter"):
        batch_layout_v2(short)


def make_speculator(wanted: dict[str, int]) -> Any:
    """Return a speculator as after load_model, without an engine. `given` has the staged rows."""
    from vllm_ascend_hsx.drafter.speculator import HsxSpeculator

    speculator = HsxSpeculator.__new__(HsxSpeculator)
    speculator.staging = SimpleNamespace(wanted=wanted)
    speculator.given = []
    speculator.stage = lambda *arguments: speculator.given.append(arguments)  # type: ignore[method-assign]
    return speculator


def propose(speculator: Any, **options: Any) -> torch.Tensor:
    rows = [torch.zeros(12, 2)]
    return speculator.propose(
        batch(),
        {},
        {},
        None,
        rows,
        None,
        None,
        torch.tensor([[7], [8], [9]]),
        None,
        None,
        None,
        **options,
    )


@only_with(">=0.30", "model runner V2 takes no speculator for this method")
def test_rows_are_staged_and_no_draft_is_proposed() -> None:
    speculator = make_speculator({"a": 8})
    assert propose(speculator).shape == (3, 0)
    ((layout, rows),) = speculator.given
    assert (layout, len(rows)) == (batch_layout_v2(batch()), 1)


@only_with(">=0.30", "model runner V2 takes no speculator for this method")
@pytest.mark.parametrize(
    ("wanted", "options"),
    [({}, {}), ({"a": 8}, {"dummy_run": True})],
    ids=["nothing wanted", "dummy run"],
)
def test_a_step_without_rows_to_extract_stages_nothing(
    wanted: dict[str, int], options: dict[str, Any]
) -> None:
    speculator = make_speculator(wanted)
    assert propose(speculator, **options).shape == (3, 0)
    assert speculator.given == []


@pytest.mark.parametrize("method", [METHOD, "eagle3"])
def test_runner_neither_copies_nor_awaits_counts_without_drafts(method: str) -> None:
    runner, seen = (
        SimpleNamespace(speculative_config=SimpleNamespace(method=method), speculator="ours"),
        [],
    )
    copy_no_counts(lambda self: seen.append("copied"), runner)
    count_without_speculator(
        lambda self, output, ids: seen.append((self.speculator, output, ids)),
        runner,
        "output",
        ["a"],
    )
    assert seen == (
        [(None, "output", ["a"])] if method == METHOD else ["copied", ("ours", "output", ["a"])]
    )
    assert runner.speculator == "ours"
