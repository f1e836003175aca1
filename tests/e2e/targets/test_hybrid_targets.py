"""Hybrid targets, GatedDeltaNet and full attention with experts: rows and KV cache are right.

In bfloat16: vllm-ascend 0.23.0's kernels for GatedDeltaNet accept no other dtype. The Mamba cache
modes are `align` with prefix caching and `none` without; no model with GatedDeltaNet supports
`all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import prefix_scenarios as prefixes
import pytest
import scenarios
import torch
from harness import compare_file, run_engine, tokens
from launch import FLASHCOMM, START_SECONDS, tiny_server
from oracle import Reference
from releases import only_with
from session import WITH_OUTPUT
from stage import Stage, Stages
from tiny_hybrid import build_qwen3_5, build_qwen3_5_moe, build_qwen3_next, regret
from tiny_model_claims import (
    TOLERANCE,
    assert_experts_are_chosen_evenly_and_alike,
    assert_rows_lie_apart,
)

from vllm_ascend_hsx.demo.reference import _load, reference_hidden_states

LAYER_IDS = (4, 0, 2, 1)  # not ascending: the file has the user's order
NUM_LAYERS = 4
BLOCK = 128  # tokens, with keys as large as a state of GatedDeltaNet


class Target(NamedTuple):
    """A hybrid model.

    Attributes:
        build: builds it in a directory.
        engine: required EngineArgs. flags: the same on the command line.
        prefix: prefix of layer names.
        sequence_parallel: True if vllm-ascend starts it with sequence parallelism.
        experts: True if it has experts.
    """

    build: Callable[[Path], Path]
    engine: dict[str, Any]
    flags: tuple[str, ...]
    prefix: str
    sequence_parallel: bool
    experts: bool = True

    @property
    def environ(self) -> dict[str, str]:
        return FLASHCOMM if self.sequence_parallel else {}


# The server helper enables expert parallelism.
_DENSE_FLAGS = ("--no-enable-expert-parallel", "--language-model-only")
TARGETS = {
    # vllm 0.23.0 registers the variant with a vision tower. With sequence parallelism vllm-ascend
    # passes it embeddings (ops/linear_op.py:470): without the tower it does not start.
    "qwen3_5_moe": Target(
        build_qwen3_5_moe,
        {"language_model_only": True},
        ("--language-model-only",),
        "language_model.model",
        False,
    ),
    "qwen3_5": Target(
        build_qwen3_5,
        {"language_model_only": True},
        _DENSE_FLAGS,
        "language_model.model",
        False,
        experts=False,
    ),
    "qwen3_next": Target(build_qwen3_next, {}, (), "model", True),
}
# With aligned states a chunk is a block, and waits for a step with space for a whole one.
STEP = BLOCK + 64
ENGINES: dict[str, dict[str, Any]] = {
    "align": {"max_num_batched_tokens": STEP},
    "none": {
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    },
    # 16 blocks; per 128 tokens a request takes one for keys and three for states.
    "tiny-align": {"max_num_batched_tokens": STEP, "num_gpu_blocks_override": 17},
    "tiny-none": {
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 17,
    },
}
MODES = {"align": "align", "none": "none", "tiny-align": "align", "tiny-none": "none"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: target.build(directory / name) for name, target in TARGETS.items()}


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5_moe",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_5", "qwen3_next")),
    ],
)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def prompts_of_several_blocks(stage: Stage) -> None:
    """A state is passed from block to block, also if a chunk ends within a block."""
    stage.add(tokens(3 * BLOCK + 17), name="four-blocks")
    stage.add(tokens(BLOCK), name="one-block")
    stage.add(tokens(2 * BLOCK + 1), name="a-token-in-the-third")
    stage.add(tokens(BLOCK - 3), name="into-the-next", max_tokens=12, expect="output")


def preempted_while_they_decode(stage: Stage) -> None:
    """Their states are lost, and computed again from the first token on."""
    before = len(stage.session.preemptions)
    added = [
        stage.add(
            tokens(120 + index), name=f"decoding-{index}", expect="output", max_tokens=40 + index
        )
        for index in range(5)
    ]
    stage.drain()
    assert any(phase == "decode" for _, phase in scenarios.phases(stage, before))
    assert [len(each.tokens) for each in added] == [40 + index for index in range(5)]


SCENARIOS: dict[str, tuple[Callable[[Stage], None], ...]] = {
    "align": (
        scenarios.prompts_around_the_chunk,
        scenarios.decodes_beside_new_prefills,
        scenarios.many_short_prompts_in_one_step,
        prompts_of_several_blocks,
        prefixes.repeated_and_extended_prompts,
        prefixes.cached_states_are_those_that_were_computed,
        prefixes.rows_of_a_prefix_are_copied,
        prefixes.more_is_cached_than_there_are_rows_of,
        prefixes.repeated_prompts_at_the_same_time,
        scenarios.everything_is_preempted_at_once,
        scenarios.aborted_while_its_prompt_is_computed,
        scenarios.rows_of_generated_tokens,
        scenarios.several_completions_of_a_prompt,
    ),
    "none": (
        scenarios.prompts_around_the_chunk,
        scenarios.decodes_beside_new_prefills,
        prompts_of_several_blocks,
        scenarios.rows_of_generated_tokens,
        scenarios.aborted_while_it_decodes,
    ),
    "tiny-align": (preempted_while_they_decode, scenarios.a_prompt_of_the_greatest_length),
    "tiny-none": (preempted_while_they_decode, scenarios.a_prompt_of_the_greatest_length),
}
# Fewer scenarios cover the differences of the others: Qwen3-Next in projections, rotation and
# bfloat16 states, the dense Qwen3.5 without experts.
OF_THE_OTHERS: dict[str, tuple[Callable[[Stage], None], ...]] = {
    "align": (
        scenarios.decodes_beside_new_prefills,
        prompts_of_several_blocks,
        prefixes.cached_states_are_those_that_were_computed,
        scenarios.everything_is_preempted_at_once,
    ),
    "none": (scenarios.prompts_around_the_chunk, scenarios.rows_of_generated_tokens),
}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(model, NUM_LAYERS, torch.bfloat16) for name, model in models.items()}


def cases() -> Iterator[Any]:
    """Return cases in an order that starts each engine once."""
    for name, played_on in (
        ("qwen3_5_moe", SCENARIOS),
        ("qwen3_5", OF_THE_OTHERS),
        ("qwen3_next", OF_THE_OTHERS),
    ):
        for engine, played in played_on.items():
            for play in played:
                marks = (
                    pytest.mark.long
                    if name != "qwen3_5_moe" or engine in ("none", "tiny-none")
                    else ()
                )
                yield pytest.param(
                    name, engine, play, id=f"{name}-{engine}-{play.__name__}", marks=marks
                )


@pytest.mark.parametrize(("name", "engine", "play"), cases())
def test_files_are_right_in_scenario(
    stages: Stages,
    references: dict[str, Reference],
    name: str,
    engine: str,
    play: Callable[[Stage], None],
) -> None:
    options = {"layer_ids": LAYER_IDS, **TARGETS[name].engine, **ENGINES[engine]}
    stage = stages.get(f"{name}-{engine}", references[name], **options)
    facts, prefix = stage.session.facts, TARGETS[name].prefix
    assert facts["mamba_cache_mode"] == MODES[engine]
    # Attention and states share the KV cache with blocks of their own; the drafter has none.
    assert facts["hybrid_kv_cache_manager"]
    states = [[f"{prefix}.layers.{layer}.linear_attn"] for layer in range(3)]
    assert facts["kv_groups"] == [[f"{prefix}.layers.3.self_attn.attn"], *states]
    play(stage)
    stage.check()


# Compared with a server without extraction


def with_output(action: list[Any]) -> list[Any]:
    if action[0] != "add":
        return action
    return [*action[:3], {**action[3], **WITH_OUTPUT}]


GENERATING = [
    ["add", "decoding", tokens(20), {"max_tokens": 30}],
    ["step", 5],
    ["add", "beside", tokens(120), {"max_tokens": 4}],
    ["step", 3],
    ["add", "later", tokens(300), {"max_tokens": 4}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["drain"],
]


def test_kv_cache_and_text_are_as_without_extraction(
    target: str, models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"max_num_batched_tokens": STEP, "layer_ids": LAYER_IDS, **TARGETS[target].engine}
    without = run_engine(tmp_path / "without", models[target], GENERATING, extract=False, **options)
    extracting = run_engine(
        tmp_path / "with", models[target], [with_output(action) for action in GENERATING], **options
    )
    assert without.error is None, without.error
    assert extracting.error is None, extracting.error
    assert extracting.texts == without.texts
    assert extracting.result["kv_groups"] == without.result["kv_groups"]
    assert (
        extracting.result["hybrid_kv_cache_manager"] and without.result["hybrid_kv_cache_manager"]
    )
    block_bytes = without.result["kv_bytes"] // without.result["num_gpu_blocks"]
    assert extracting.result["kv_bytes"] == extracting.result["num_gpu_blocks"] * block_bytes
    slots, hidden, itemsize = 2, 256, 2
    staging = slots * STEP * len(LAYER_IDS) * hidden * itemsize
    taken = (without.result["num_gpu_blocks"] - extracting.result["num_gpu_blocks"]) * block_bytes
    # The profiled activation peak differs, too: the target returns the aux layers.
    assert 0 <= taken <= staging + staging // slots + (4 << 20)


def test_rows_are_right_with_tensor_and_expert_parallelism(
    target: str, models: dict[str, Path], tmp_path: Path
) -> None:
    lengths = (1, 7, BLOCK + 1, 2 * BLOCK + 40)
    script = [
        ["add", "decoding", tokens(10), {"max_tokens": 8}],
        ["step", 2],
        *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in lengths),
        ["drain"],
    ]
    run = run_engine(
        tmp_path,
        models[target],
        script,
        layer_ids=LAYER_IDS,
        environ=TARGETS[target].environ,
        tensor_parallel_size=2,
        enable_expert_parallel=TARGETS[target].experts,
        max_num_batched_tokens=STEP,
        **TARGETS[target].engine,
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for request_id in ("decoding", *(f"r{length}" for length in lengths)):
        comparison = run.compare(request_id)
        assert comparison.matches, f"{request_id}: {comparison}"


def test_rows_are_right_with_data_and_tensor_parallelism_over_http(
    target: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = models[target]
    options = {"extra": TARGETS[target].flags, "environ": TARGETS[target].environ}
    options |= {"data_parallel": 2, "tensor_parallel": 2, "max_num_batched_tokens": STEP}
    with tiny_server(tmp_path, model, LAYER_IDS, **options) as server:
        server.wait_ready(START_SECONDS)

        def complete(prompt: list[int], **body: Any) -> Any:
            common = {
                "model": str(model),
                "prompt": prompt,
                "temperature": 0,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            answer = httpx.post(
                f"{server.url}/v1/completions", json={**common, **body}, timeout=120
            )
            answer.raise_for_status()
            return answer.json()

        generating = {"max_tokens": 9, "kv_transfer_params": {"include_output_tokens": True}}
        jobs = [
            (tokens(length), {"max_tokens": 1}) for length in (1, 7, 64, BLOCK + 1, 2 * BLOCK + 40)
        ]
        jobs += [(tokens(length, seed=2), generating) for length in (9, BLOCK - 4)]
        try:
            alone = tokens(201)  # while the other DP rank is idle
            found = [(alone, complete(alone, max_tokens=1))]
            with ThreadPoolExecutor(len(jobs)) as pool:
                answers = pool.map(lambda job: complete(job[0], **job[1]), jobs)
                found += [
                    (prompt, answer) for (prompt, _), answer in zip(jobs, answers, strict=True)
                ]
        except httpx.HTTPError as error:
            raise AssertionError(f"{error!r}\n{server.log_tail()}") from error
        for prompt, answer in found:
            rows = prompt + answer["choices"][0]["token_ids"][:-1]
            comparison = compare_file(
                Path(answer["kv_transfer_params"]["hidden_states_path"]), model, rows, LAYER_IDS
            )
            assert comparison.matches, f"{len(prompt)} tokens: {comparison}"


# Upstream


FEW_BLOCKS = {
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 24,
}


@pytest.mark.long
@only_with("<0.26", "hidden states have blocks of their own")
def test_defects_3_and_4_upstream_writes_hidden_states_over_the_targets_own(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The rows go to blocks of the first group, although other groups keep states and keys there.

    A request that decodes while prompts arrive continues with overwritten states.
    """
    model, options = models["qwen3_5_moe"], {**TARGETS["qwen3_5_moe"].engine, **FEW_BLOCKS}
    broken = run_engine(
        tmp_path / "upstream",
        model,
        [["real_events"], *GENERATING],
        ours=False,
        late=False,
        **options,
    )
    right = run_engine(
        tmp_path / "ours", model, [with_output(action) for action in GENERATING], **options
    )
    assert broken.error is None, broken.error
    assert right.error is None, right.error
    assert broken.compare(
        "decoding"
    ).matches  # these rows were written before anything was overwritten
    assert regret(model, broken, "decoding") > 0.5
    assert not broken.compare("beside").matches
    for name in ("decoding", "beside", "later"):
        assert regret(model, right, name) < 0.05, name
        assert right.compare(name).matches, name


@pytest.mark.long
@only_with(">=0.26", "rows go to blocks of the first group")
def test_defects_3_and_4_are_fixed_rows_have_their_own_kv_cache_group(
    models: dict[str, Path], tmp_path: Path
) -> None:
    beside = [
        ["add", f"beside-{index}", tokens(100 + 37 * index), {"max_tokens": 20}]
        for index in range(3)
    ]
    script = [["real_events"], *GENERATING[:2], *beside, *GENERATING[3:], ["step", 2]]
    theirs = run_engine(
        tmp_path,
        models["qwen3_5_moe"],
        script,
        ours=False,
        late=False,
        **TARGETS["qwen3_5_moe"].engine,
        **FEW_BLOCKS,
    )
    assert theirs.error is None and ["cache_only_layers.4"] in theirs.result["kv_groups"], (
        theirs.error
    )
    for name in theirs.requests:
        assert theirs.compare(name).matches, (
            name,
            theirs.compare(name),
        )  # read from the blocks of their own group
        assert regret(models["qwen3_5_moe"], theirs, name) < 0.2, (
            name
        )  # the defect made it more than 0.5


@pytest.mark.long
@only_with("<0.26", "it starts")
def test_upstream_refuses_qwen3_next_although_its_model_collects(
    models: dict[str, Path], tmp_path: Path
) -> None:
    broken = run_engine(
        tmp_path, models["qwen3_next"], [["drain"]], ours=False, late=False, **FEW_BLOCKS
    )
    assert broken.error is not None
    assert (
        "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"
        in broken.error
    )


# The tiny models: properties without which the comparisons above would prove too little.


def test_rows_of_different_tokens_and_layers_lie_farther_apart_than_the_tolerance(
    target: str, models: dict[str, Path]
) -> None:
    assert_rows_lie_apart(models[target], tokens(300))


def test_row_depends_on_earlier_states(target: str, models: dict[str, Path]) -> None:
    # Replacing the first block simulates a wrong state.
    first, second = tokens(2 * BLOCK)[:BLOCK], tokens(2 * BLOCK)[BLOCK:]
    rows, other = (
        reference_hidden_states(models[target], [*each, *second], [1, 4])
        for each in (first, tokens(BLOCK, seed=1))
    )
    far = ((rows - other).norm(dim=-1) / rows.norm(dim=-1))[BLOCK:]
    # Only in the layers of states, and for long.
    assert (far[:16] > 2 * TOLERANCE).all()
    assert (far[:96].amax(-1) > 2 * TOLERANCE).float().mean() > 0.9


@pytest.mark.parametrize("name", [name for name, each in TARGETS.items() if each.experts])
def test_experts_are_chosen_evenly_and_alike_in_both_precisions(
    name: str, models: dict[str, Path]
) -> None:
    assert_experts_are_chosen_evenly_and_alike(models[name], tokens(400))


def test_reference_has_the_requested_precision(target: str, models: dict[str, Path]) -> None:
    # transformers loads a model with a text part in the checkpoint's dtype, regardless of the
    # requested one.
    for dtype in (torch.float32, torch.bfloat16):
        assert reference_hidden_states(models[target], tokens(3), [4], dtype).dtype is dtype
        assert {
            parameter.dtype for parameter in _load(str(models[target]), dtype).parameters()
        } == {dtype}
