"""Model runner V2 of vllm-ascend 0.30: rows, text and collectives are right on it, too.

Scenarios and comparisons are imported from the tests of V1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import prefix_scenarios as prefixes
import pytest
import scenarios as play
import test_any_traffic as traffic
import test_data_parallel as parallel
import test_generation as generation
import test_scenarios as table
import torch
from depth import depth
from harness import run_engine
from oracle import Reference
from releases import only_with
from stage import Stage, Stages

pytestmark = only_with(">=0.30", "model runner V2 takes no speculator for this method")
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
RUNNER = "vllm_ascend.worker.v2.model_runner"
# One per step, busy or idle, before the target's forward pass.
METADATA: parallel.Collective = ("all_reduce", (6, 2), "torch.int32")

# For each engine of test_scenarios.py: the scenarios to run.
PLAYED: dict[str, tuple[Callable[[Stage], None], ...]] = {
    "async": (
        play.prompts_around_the_chunk,
        play.decodes_beside_new_prefills,
        play.many_short_prompts_in_one_step,
        prefixes.repeated_and_extended_prompts,
        prefixes.rows_of_a_prefix_are_copied,
        prefixes.the_prefix_cache_is_reset,
        play.everything_is_preempted_at_once,
        play.aborted_while_its_prompt_is_computed,
        play.rows_of_generated_tokens,
        play.several_completions_of_a_prompt,
        play.stopped_by_a_string,
        play.structured_outputs,
        play.log_probabilities,
        play.some_opt_out,
        play.asleep_and_awake,
        play.another_engine_in_the_process,
    ),
    "sync": (
        play.decodes_beside_new_prefills,
        play.rows_of_generated_tokens,
        play.urgent_requests_overtake,
    ),
    "tiny": (
        play.prompts_around_the_chunk,
        play.preempted_while_its_prompt_is_computed,
        play.preempted_while_they_decode,
        play.aborted_after_it_was_preempted,
    ),
}


@pytest.fixture(scope="module")
def reference(float32_qwen3: Path) -> Reference:
    return Reference(float32_qwen3, table.NUM_LAYERS, torch.float32)


@pytest.mark.parametrize(
    ("engine", "played"),
    [
        pytest.param(engine, each, id=f"{engine}-{each.__name__}")
        for engine, plays in PLAYED.items()
        for each in plays
    ],
)
def test_files_are_right_in_scenario(
    stages: Stages, reference: Reference, engine: str, played: Callable[[Stage], None]
) -> None:
    options = {
        "max_num_batched_tokens": play.CHUNK,
        "layer_ids": table.LAYER_IDS,
        **table.ENGINES[engine],
    }
    stage = stages.get(engine, reference, environ=V2, **options)
    assert stage.session.call("runner") == RUNNER
    played(stage)
    stage.check()


def test_text_and_steps_are_as_without_extraction(float32_qwen3: Path, tmp_path: Path) -> None:
    options = {"dtype": "float32", "async_scheduling": True, "environ": V2}
    plain = run_engine(
        tmp_path / "plain", float32_qwen3, generation.SCRIPT, extract=False, **options
    )
    assert plain.error is None, plain.error
    # The worker learns with the next step that a request with generated tokens has ended.
    run = run_engine(
        tmp_path / "extracting", float32_qwen3, [*generation.SCRIPT, ["settle"]], **options
    )
    assert run.error is None, run.error
    for index, name in enumerate(generation.NAMES):
        assert run.requests[name]["tokens"] == plain.requests[name]["tokens"], name
        assert run.requests[name]["steps"] == plain.requests[name]["steps"], name
        if index % 2 == 0:
            assert run.compare(name).matches, (name, run.compare(name))


@pytest.mark.timeout(1500)
def test_any_traffic_leaves_right_files_and_nothing_else(
    float32_qwen3: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    engine = {**traffic.ENGINES["cramped"], "environ": V2}
    with traffic.start_stage(tmp_path, float32_qwen3, torch.float32, **engine) as stage:
        traffic.play_traffic(stage, depth(40), asked=request.config.getoption("traffic_runs"))


def test_busy_and_idle_data_parallel_ranks_agree_and_write_the_rows_of_their_requests(
    tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    served = parallel.serve_requests(tmp_path, tiny_minimax_m2, V2)
    for name in served.answers:
        parallel.check_file(served, name)
    parallel.check_collectives(served.trace, METADATA)
