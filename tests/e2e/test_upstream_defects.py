"""What vLLM's connector gets wrong on the same stack, seen to fail there and to be right with ours.

The numbers are those of the list of defects in docs/design.md. "Upstream" is vllm 0.23.0's ExampleHiddenStatesConnector and
vllm-ascend 0.23.0's proposer, unmodified, with our plugin not loaded.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import Run, run_engine, tokens

SINGLE = [["add", "single", tokens(20), {"max_tokens": 1}], ["drain"]]
DECODE_AND_PREFILL = [
    ["add", "decoding", tokens(10), {"max_tokens": 12}],
    ["step", 3],
    ["add", "new", tokens(17), {"max_tokens": 1}],
    ["drain"],
]
ALL_ROWS_IN_ORDER = (1, 2, 4)


def upstream(directory: Path, model: Path, script: list, **options: object) -> Run:
    return run_engine(directory, model, script, ours=False, **options)


def ours(directory: Path, model: Path, script: list, **options: object) -> Run:
    run = run_engine(directory, model, script, **options)
    assert run.error is None, run.error
    return run


def test_control_upstream_is_right_in_the_simplest_case_without_late_mode(tiny_qwen3: Path, tmp_path: Path) -> None:
    # Without this, the failures below could be faults of the harness.
    run = upstream(tmp_path, tiny_qwen3, [["real_events"], *SINGLE], late=False)
    assert run.error is None, run.error
    comparison = run.compare("single")
    assert comparison.matches, comparison


def test_defect_1_placeholder_events_order_nothing(tiny_qwen3: Path, tmp_path: Path) -> None:
    broken = upstream(tmp_path / "upstream", tiny_qwen3, SINGLE)
    assert broken.error is not None or not broken.compare("single").matches
    right = ours(tmp_path / "ours", tiny_qwen3, SINGLE).compare("single")
    assert right.matches, right


def test_defect_2_padding_slots_overwrite_the_last_block() -> None:
    from vllm.model_executor.models.extract_hidden_states import basic_cache

    cache = torch.zeros(4, 2, 1, 1)
    basic_cache(torch.full((3, 1, 1), 7.0), cache, torch.tensor([0, -1, -1]))
    assert cache[3, 1].item() == 7.0  # a row of somebody's request


def test_defect_5_a_new_prompt_gets_the_rows_of_a_running_decode(tiny_qwen3: Path, tmp_path: Path) -> None:
    broken = upstream(tmp_path / "upstream", tiny_qwen3, [["real_events"], *DECODE_AND_PREFILL], late=False)
    assert broken.error is None, broken.error
    assert not broken.compare("new").matches
    right = ours(tmp_path / "ours", tiny_qwen3, DECODE_AND_PREFILL).compare("new")
    assert right.matches, right


@pytest.mark.parametrize("layer_ids", [(2, 99), (4, 2)])
def test_defect_7_layer_ids_are_not_checked(tiny_qwen3: Path, tmp_path: Path, layer_ids: tuple[int, ...]) -> None:
    broken = upstream(tmp_path / "upstream", tiny_qwen3, [["real_events"], *SINGLE], layer_ids=layer_ids, late=False)
    right = run_engine(tmp_path / "ours", tiny_qwen3, SINGLE, layer_ids=layer_ids)
    if 99 in layer_ids:
        assert "99" not in (broken.error or "")  # it is not told that there is no such layer
        assert right.error is not None
        assert re.search(r"eagle_aux_hidden_state_layer_ids=\[2, 99\] has id 99, which the target does not have", right.error + right.log)
    else:
        assert broken.error is None, broken.error
        assert not broken.compare("single").matches
        assert right.error is None, right.error
        comparison = right.compare("single")
        assert comparison.matches, comparison


def test_defect_9_the_next_step_overwrites_what_the_copy_reads(tiny_qwen3: Path, tmp_path: Path) -> None:
    # Real events this time: what remains is the slot mapping, a buffer that the next step fills while the copy stream may read it.
    script = [["real_events"]]
    for index in range(6):
        script += [["add", f"r{index}", tokens(30 + index), {"max_tokens": 1}], ["step", 1]]
    broken = upstream(tmp_path / "upstream", tiny_qwen3, [*script, ["drain"]])
    assert broken.error is not None or not all(broken.compare(f"r{index}").matches for index in range(6))
    right = ours(tmp_path / "ours", tiny_qwen3, [*script[1:], ["drain"]])
    comparisons = [right.compare(f"r{index}") for index in range(6)]
    assert all(comparison.matches for comparison in comparisons), comparisons


def test_defect_14_a_slash_in_the_request_id_stops_the_engine(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = [["real_events"], ["add", "a/b", tokens(9), {"max_tokens": 1}], ["drain"]]
    broken = upstream(tmp_path / "upstream", tiny_qwen3, script, late=False)
    assert broken.error is not None
    assert "No such file or directory" in broken.error
    right = ours(tmp_path / "ours", tiny_qwen3, script[1:])
    assert right.path("a/b").parent == right.storage
    comparison = right.compare("a/b")
    assert comparison.matches, comparison
