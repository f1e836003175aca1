"""gpt-oss, with sliding-window and full attention in turn: rows are exact in late mode.

vllm-ascend 0.23.0 passes `sliding_window` to CANN as `pre_tokens` (attention/attention_v1.py:1290),
the number of keys before the query's own. A layer with a window of 32 sees 33 keys; vLLM and
transformers count 32. Rows are compared with the target as it is served, with 33.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Run, compare_file, run_engine, tokens
from releases import installed_is
from session import NOT_EXTRACTED, WITH_OUTPUT
from tiny_gpt_oss import WINDOW, build_gpt_oss

from vllm_ascend_hsx.demo.reference import reference_hidden_states

LAYER_IDS = (4, 0, 1, 2, 3)  # not ascending: the file has the user's order
CHUNK = 64
SERVED_WINDOW = WINDOW + 1
LONG = tokens(3 * CHUNK + 9)
SLIDING = ["model.layers.0.attn.attn", "model.layers.2.attn.attn"]
FULL = ["model.layers.1.attn.attn", "model.layers.3.attn.attn"]

SCRIPT = [
    ["add", "chunked", LONG, {"max_tokens": 1}],
    ["drain"],
    # Decodes beyond the window while other requests prefill.
    ["add", "decoding", tokens(20), {"max_tokens": 40, **WITH_OUTPUT}],
    ["step", 3],
    ["add", "one-token", tokens(1), {"max_tokens": 2}],
    ["add", "as-long-as-the-window", tokens(WINDOW), {"max_tokens": 1}],
    ["step", 1],
    ["add", "one-longer", tokens(SERVED_WINDOW), {"max_tokens": 1}],
    ["add", "two-longer", tokens(SERVED_WINDOW + 1), {"max_tokens": 1}],
    ["step", 1],
    ["add", "chunked-beside-a-decode", tokens(150), {"max_tokens": 1}],
    ["add", "same-prompt-again", LONG, {"max_tokens": 1}],
    ["add", "opts-out", LONG, {"max_tokens": 1, **NOT_EXTRACTED}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["settle"],
    ["add", "copied", LONG + tokens(40), {"max_tokens": 1}],
    ["drain"],
]
EXTRACTED = [action[1] for action in SCRIPT if action[0] == "add" and action[1] != "opts-out"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By window: the target, and the same weights with the window that vllm-ascend serves."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    return {
        window: build_gpt_oss(directory / str(window), dtype="float32", window=window)
        for window in (WINDOW, SERVED_WINDOW)
    }


@pytest.fixture(scope="module")
def run(models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_engine(
        tmp_path_factory.mktemp("run"),
        models[WINDOW],
        SCRIPT,
        layer_ids=LAYER_IDS,
        dtype="float32",
        max_num_batched_tokens=CHUNK,
    )
    assert run.error is None, run.error
    return run


@pytest.mark.parametrize("request_id", EXTRACTED)
def test_a_file_holds_exactly_the_rows_that_the_target_computes(
    run: Run, models: dict[int, Path], request_id: str
) -> None:
    comparison = compare_file(
        run.path(request_id), models[SERVED_WINDOW], run.sequence(request_id), LAYER_IDS
    )
    assert comparison.matches, comparison
    assert comparison.max_abs_difference <= 1e-5


def test_generated_tokens_leave_the_window_behind(run: Run) -> None:
    # Otherwise the decode above would not show the effect of a window.
    assert len(run.sequence("decoding")) > 20 + SERVED_WINDOW


def test_sliding_and_full_layers_keep_kv_cache_groups_of_their_own(run: Run) -> None:
    # The hybrid KV cache manager is on, and the layer of the drafter is in no group.
    assert sorted(run.result["kv_groups"]) == sorted([SLIDING, FULL])


def test_requests_hit_the_prefix_cache_as_far_as_rows_are_reusable(run: Run) -> None:
    assert (
        run.requests["opts-out"]["num_cached_tokens"] == 128
    )  # the first block, of 128 tokens, of 201
    assert run.requests["copied"]["num_cached_tokens"] == 128
    assert run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 128


def test_vllm_ascend_sees_one_key_more_than_the_window(run: Run, models: dict[int, Path]) -> None:
    # When this fails, vllm-ascend counts like transformers, and SERVED_WINDOW is WINDOW.
    rows = run.rows("chunked")["hidden_states"]
    window = reference_hidden_states(models[WINDOW], LONG, LAYER_IDS)
    assert (rows[:WINDOW] - window[:WINDOW]).abs().max() <= 1e-5
    sliding = LAYER_IDS.index(1)
    difference = (rows - window)[WINDOW:, sliding].norm(dim=-1) / window[WINDOW:, sliding].norm(
        dim=-1
    )
    assert (difference > 1e-4).all()
    assert torch.equal(rows[:, LAYER_IDS.index(0)], window[:, LAYER_IDS.index(0)])


@pytest.mark.long
def test_defect_12_upstream_does_not_start_before_0_30(
    run: Run, models: dict[int, Path], tmp_path: Path
) -> None:
    # The tensor shared by cache-only and attention layers is unpacked as keys and values
    # (worker/model_runner_v1.py:4542), byte by byte; with a few blocks the host's memory suffices.
    script = [
        ["real_events"],
        ["add", "short", tokens(20), {"max_tokens": 1}],
        ["drain"],
        ["step", 2],
    ]
    options = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 8,
    }
    theirs = run_engine(tmp_path, models[WINDOW], script, ours=False, late=False, **options)
    if installed_is(">=0.30"):
        assert theirs.error is None, theirs.error
        assert theirs.compare("short").matches
    else:
        assert theirs.error is not None
        assert "_reshape_kv_cache_tensors" in theirs.error
        assert "ValueError: too many values to unpack (expected 2)" in theirs.error
    assert run.error is None
