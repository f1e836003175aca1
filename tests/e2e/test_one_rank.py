"""One NPU, dense Qwen3 and MiniMax-M2, late mode: each file holds exactly the rows of its own request."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run, run_engine, tokens

LAYER_IDS = (4, 1, 2)  # not ascending: the file has the user's order
CHUNK = 64
LONG = tokens(3 * CHUNK + 9)

# Arrivals are spread over the steps, so that chunks, decodes and new prompts share batches.
SCRIPT = [
    ["add", "single", tokens(20), {"max_tokens": 1}],
    ["drain"],
    ["add", "decoding", tokens(10), {"max_tokens": 24}],
    ["step", 3],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 2}],
    ["add", "one-token", tokens(1), {"max_tokens": 2}],
    ["step", 1],
    ["add", "chunked", LONG, {"max_tokens": 1}],
    ["add", "behind-a-chunk", tokens(5), {"max_tokens": 1}],
    ["add", "a/b/../../c", tokens(11), {"max_tokens": 1}],
    ["step", 2],
    ["add", "aborted", tokens(200), {"max_tokens": 4}],
    ["step", 1],
    ["abort", "aborted"],
    ["add", "same-prompt-again", LONG, {"max_tokens": 1}],
    ["add", "longer-prompt", LONG + tokens(30), {"max_tokens": 1}],
    ["add", "opts-out", LONG, {"max_tokens": 1, "extra_args": {"kv_transfer_params": {"hidden_states": False}}}],
    ["drain"],
]
EXTRACTED = [action[1] for action in SCRIPT if action[0] == "add" and action[1] not in ("aborted", "opts-out")]


@pytest.fixture(scope="module", params=["tiny_qwen3", "tiny_minimax_m2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    model = request.getfixturevalue(request.param)
    run = run_engine(tmp_path_factory.mktemp("run"), model, SCRIPT, layer_ids=LAYER_IDS, max_num_batched_tokens=CHUNK)
    assert run.error is None, run.error
    return run


@pytest.mark.parametrize("request_id", EXTRACTED)
def test_a_file_holds_the_rows_of_its_own_request(run: Run, request_id: str) -> None:
    comparison = run.compare(request_id)
    assert comparison.matches, comparison


def test_nothing_but_complete_files_is_visible(run: Run) -> None:
    files = {path.name for path in run.storage.iterdir() if not path.name.endswith(".lock")}
    assert files == {run.path(request_id).name for request_id in EXTRACTED}


def test_ordinary_requests_still_hit_the_prefix_cache(run: Run) -> None:
    assert run.requests["opts-out"]["kv_transfer_params"] is None
    assert run.requests["opts-out"]["num_cached_tokens"] >= CHUNK
    assert run.requests["same-prompt-again"]["num_cached_tokens"] == 0


def test_float32_rows_are_exact(float32_qwen3: Path, tmp_path: Path) -> None:
    script = [["add", "chunked", LONG, {"max_tokens": 1}], ["add", "short", tokens(9), {"max_tokens": 3}], ["drain"]]
    run = run_engine(tmp_path, float32_qwen3, script, layer_ids=LAYER_IDS, dtype="float32")
    assert run.error is None, run.error
    differences = [run.compare(request_id).max_abs_difference for request_id in ("chunked", "short")]
    assert max(differences) <= 1e-5


def test_a_ring_smaller_than_a_step_delays_rows_and_loses_none(float32_qwen3: Path, tmp_path: Path) -> None:
    row_bytes = 3 * 256 * 4
    script = [["add", f"r{i}", tokens(50 + 20 * i), {"max_tokens": 2}] for i in range(6)]
    run = run_engine(
        tmp_path,
        float32_qwen3,
        [*script, ["drain"]],
        layer_ids=LAYER_IDS,
        dtype="float32",
        connector_options={"pinned_ring_bytes": 5 * row_bytes, "staging_slots": 1, "num_writer_threads": 2},
    )
    assert run.error is None, run.error
    assert max(run.compare(f"r{i}").max_abs_difference for i in range(6)) <= 1e-5


def test_requests_that_are_preempted_while_they_decode_finish_and_their_files_are_right(float32_qwen3: Path, tmp_path: Path) -> None:
    # Six blocks of 128 tokens for requests that need two or three each. vllm-ascend switches preemption off for a kv_producer, and the
    # server would stand still; see compat.keep_preemption.
    script = [["add", f"r{i}", tokens(100 + 37 * i), {"max_tokens": 60 + 10 * i}] for i in range(5)]
    run = run_engine(
        tmp_path, float32_qwen3, [*script, ["drain"]], layer_ids=LAYER_IDS, dtype="float32", num_gpu_blocks_override=7, timeout=120
    )
    assert run.error is None, run.error
    assert run.result["preemptions"] > 0
    assert all(len(run.requests[f"r{i}"]["tokens"]) == 60 + 10 * i for i in range(5))
    assert max(run.compare(f"r{i}").max_abs_difference for i in range(5)) <= 1e-5


def test_a_setting_that_cannot_be_used_is_refused_before_weights_are_loaded(tiny_qwen3: Path, tmp_path: Path) -> None:
    run = run_engine(tmp_path, tiny_qwen3, SCRIPT, connector_options={"num_writer_thread": 2})
    assert run.error is not None
    assert "kv_connector_extra_config.num_writer_thread=2 is not an option. Did you mean 'num_writer_threads'?" in run.error + run.log
    assert "Starting to load model" not in run.log
