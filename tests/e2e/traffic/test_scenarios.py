"""Every scenario on engines that have served the previous ones, on one NPU in late mode.

After each, Stage.check compares files with the oracle: nothing else is visible or left inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import prefix_scenarios as prefixes
import pytest
import scenarios as play
import torch
from oracle import Reference
from stage import Stage, Stages

LAYER_IDS = (4, 1, 2)  # not ascending: the file has the user's order
NUM_LAYERS = 4
ROW_BYTES = len(LAYER_IDS) * 256 * 4

MODELS = {
    "qwen3": ("float32_qwen3", torch.float32),
    "minimax_m2": ("tiny_minimax_m2", torch.bfloat16),
}
ENGINES: dict[str, dict[str, Any]] = {
    "async": {"async_scheduling": True},
    "sync": {
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "enable_prompt_embeds": True,
    },
    # Six blocks for requests, one staging slot, and a ring smaller than a step.
    "tiny": {
        "num_gpu_blocks_override": 7,
        "connector_options": {
            "staging_slots": 1,
            "pinned_ring_bytes": 20 * ROW_BYTES,
            "num_writer_threads": 2,
        },
    },
}


class Scenario(NamedTuple):
    play: Callable[[Stage], None]
    engines: tuple[str, ...] = ("async",)


EVERY = ("async", "sync", "tiny")
BOTH = ("async", "sync")
SCENARIOS = (
    Scenario(play.prompts_around_the_chunk, EVERY),
    Scenario(play.prompts_one_after_the_other),
    Scenario(play.decodes_beside_new_prefills, EVERY),
    Scenario(play.many_short_prompts_in_one_step, BOTH),
    Scenario(play.a_prompt_of_the_greatest_length, EVERY),
    Scenario(prefixes.repeated_and_extended_prompts, EVERY),
    Scenario(prefixes.repeated_prompts_at_the_same_time, BOTH),
    Scenario(prefixes.rows_of_a_prefix_are_copied, EVERY),
    Scenario(prefixes.more_is_cached_than_there_are_rows_of, BOTH),
    Scenario(prefixes.the_source_of_a_prefix_is_removed),
    Scenario(prefixes.a_file_is_published_just_now, BOTH),
    Scenario(prefixes.preempted_after_a_copied_prefix, ("tiny",)),
    Scenario(prefixes.the_prefix_cache_is_reset),
    Scenario(play.preempted_while_its_prompt_is_computed, ("tiny",)),
    Scenario(play.preempted_while_they_decode, ("tiny",)),
    Scenario(play.everything_is_preempted_at_once, BOTH),
    Scenario(play.aborted_after_it_was_preempted, ("tiny",)),
    Scenario(play.aborted_before_it_is_scheduled, EVERY),
    Scenario(play.aborted_while_its_prompt_is_computed, EVERY),
    Scenario(play.aborted_while_it_decodes, EVERY),
    Scenario(play.aborted_although_it_has_stop_strings, BOTH),
    Scenario(play.aborted_samples, BOTH),
    Scenario(play.aborted_after_it_has_finished, BOTH),
    Scenario(play.one_token_and_many, BOTH),
    Scenario(play.rows_of_generated_tokens, EVERY),
    Scenario(play.several_completions_of_a_prompt, BOTH),
    Scenario(play.streamed, BOTH),
    Scenario(play.stopped_by_a_string, BOTH),
    Scenario(play.stopped_by_a_token, BOTH),
    Scenario(play.structured_outputs, BOTH),
    Scenario(play.log_probabilities, BOTH),
    Scenario(play.some_opt_out),
    Scenario(play.hostile_request_ids),
    Scenario(play.params_that_make_no_sense),
    Scenario(play.prompts_without_token_ids, ("sync",)),
    Scenario(play.urgent_requests_overtake, ("sync",)),
    Scenario(play.asleep_and_awake, BOTH),
    Scenario(play.another_engine_in_the_process, BOTH),
)


def cases() -> Iterator[Any]:
    """Return cases in an order that starts each engine once."""
    for model in MODELS:
        for engine in ENGINES:
            for scenario in SCENARIOS:
                if engine in scenario.engines:
                    # The short run has only the model with the most possible mistakes.
                    marks = (
                        ()
                        if model == "minimax_m2" and engine in ("tiny", "async")
                        else pytest.mark.long
                    )
                    yield pytest.param(
                        model,
                        engine,
                        scenario,
                        id=f"{model}-{engine}-{scenario.play.__name__}",
                        marks=marks,
                    )


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Reference]:
    return {
        name: Reference(request.getfixturevalue(model), NUM_LAYERS, dtype)
        for name, (model, dtype) in MODELS.items()
    }


@pytest.mark.parametrize(("model", "engine", "scenario"), cases())
def test_files_are_right_in_scenario(
    stages: Stages, references: dict[str, Reference], model: str, engine: str, scenario: Scenario
) -> None:
    options = {"max_num_batched_tokens": play.CHUNK, "layer_ids": LAYER_IDS, **ENGINES[engine]}
    stage = stages.get(f"{model}-{engine}", references[model], **options)
    scenario.play(stage)
    stage.check()
