"""What vLLM's connector gets wrong on the same stack, seen to fail there and to be right with ours.

The numbers are those of the list of defects in docs/design.md. "Upstream" is vllm 0.23.0's ExampleHiddenStatesConnector and
vllm-ascend 0.23.0's proposer, unmodified, with our plugin not loaded.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Run, run_engine, tokens

SINGLE = [["add", "single", tokens(20), {"max_tokens": 1}], ["drain"]]
DECODE_AND_PREFILL = [
    ["add", "decoding", tokens(10), {"max_tokens": 12}],
    ["step", 3],
    ["add", "new", tokens(17), {"max_tokens": 1}],
    ["drain"],
]


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
    assert broken.error is not None
    # The copy stream reads the slots, and with them the rows, before anything says that they have been written.
    assert re.search(r"NPU stream race: .* that aten::copy_ on the default stream .* wrote, and nothing orders the two", broken.error)
    right = ours(tmp_path / "ours", tiny_qwen3, SINGLE).compare("single")
    assert right.matches, right


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
    # Real events, and no asynchronous scheduling, whose side stream is another story: what remains is the slot mapping, a buffer that
    # the next step fills while the copy stream may still read it.
    steps = [["add", "first", tokens(30), {"max_tokens": 1}], ["step", 1], ["add", "second", tokens(25), {"max_tokens": 1}], ["step", 1]]
    broken = upstream(
        tmp_path / "upstream",
        tiny_qwen3,
        [["real_events"], *steps],
        instruments={"held_writers": True},
        async_scheduling=False,
    )
    assert broken.error is not None
    assert re.search(r"NPU stream race: aten::copy_ on the default stream .*long int.* that aten::[\w.]+ on stream", broken.error), (
        broken.error
    )
    right = ours(tmp_path / "ours", tiny_qwen3, [*steps, ["drain"]], async_scheduling=False)
    for request_id in ("first", "second"):
        comparison = right.compare(request_id)
        assert comparison.matches, comparison


def test_defect_14_a_slash_in_the_request_id_stops_the_engine(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = [["real_events"], ["add", "a/b", tokens(9), {"max_tokens": 1}], ["drain"]]
    broken = upstream(tmp_path / "upstream", tiny_qwen3, script, late=False)
    assert broken.error is not None
    assert "No such file or directory" in broken.error
    right = ours(tmp_path / "ours", tiny_qwen3, script[1:])
    assert right.path("a/b").parent == right.storage
    comparison = right.compare("a/b")
    assert comparison.matches, comparison
