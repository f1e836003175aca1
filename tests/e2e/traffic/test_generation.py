"""Text and number of steps are as on a server without extraction."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run, run_engine, tokens

SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5},
    "nucleus": {"temperature": 1.1, "top_p": 0.9, "top_k": 50, "seed": 6},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 8},
    "bias": {"temperature": 1.0, "logit_bias": {"17": 8.0, "18": -100}, "seed": 9},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "seed": 7,
    },
}
NAMES = [f"{name}-{length}" for name in SAMPLINGS for length in (11, 30)]
# Prompts arrive while others decode. Every second request does not extract.
SCRIPT = [
    action
    for index, name in enumerate(NAMES)
    for action in (
        [
            "add",
            name,
            tokens(int(name.split("-")[1]), seed=index),
            {
                "max_tokens": 40,
                **SAMPLINGS[name.split("-")[0]],
                "extra_args": {
                    "kv_transfer_params": {
                        "hidden_states": index % 2 == 0,
                        "include_output_tokens": index % 4 == 0,
                    }
                },
            },
        ],
        ["step", 1 + index % 3],
    )
] + [["drain"]]


@pytest.fixture(scope="module")
def plain(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_engine(
        tmp_path_factory.mktemp("plain"),
        float32_qwen3,
        SCRIPT,
        extract=False,
        dtype="float32",
        async_scheduling=True,
    )
    assert run.error is None, run.error
    assert len({tuple(run.requests[name]["tokens"]) for name in NAMES}) == len(NAMES)
    return run


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_the_same_tokens_are_generated_in_the_same_number_of_steps(
    plain: Run, float32_qwen3: Path, tmp_path: Path, async_scheduling: bool
) -> None:
    run = run_engine(
        tmp_path, float32_qwen3, SCRIPT, dtype="float32", async_scheduling=async_scheduling
    )
    assert run.error is None, run.error
    for name in NAMES:
        assert run.requests[name]["tokens"] == plain.requests[name]["tokens"], name
        assert run.requests[name]["steps"] == plain.requests[name]["steps"], name


def test_parameters_that_vllm_refuses_with_drafts_have_their_effect(plain: Run) -> None:
    biased = [
        token
        for name in NAMES
        if name.startswith("bias")
        for token in plain.requests[name]["tokens"]
    ]
    assert biased.count(17) > len(biased) // 4
    assert 18 not in biased


@pytest.mark.long
def test_defect_22_upstreams_drafts_change_the_text(
    plain: Run, float32_qwen3: Path, tmp_path: Path
) -> None:
    taken = [
        name for name in NAMES if not name.startswith(("min_p", "bias"))
    ]  # vLLM refuses the others
    script = [action for action in SCRIPT if action[0] != "add" or action[1] in taken]
    run = run_engine(
        tmp_path,
        float32_qwen3,
        script,
        ours=False,
        late=False,
        dtype="float32",
        async_scheduling=True,
    )
    assert run.error is None, run.error
    assert any(run.requests[name]["tokens"] != plain.requests[name]["tokens"] for name in taken)
