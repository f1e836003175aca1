"""DeepSeek-V3.2 and GLM-5, whose attention reads 2048 selected tokens (DSA): rows are right.

Layers of GLM-5.2 share the selection of the previous layer.

In bfloat16: CANN's kernels of the indexer and of sparse attention do not accept float32. The
indexer drops tokens only from prompts of more than 2048 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_sparse
import torch
from harness import Run, run_engine, tokens
from releases import only_on_v1
from session import WITH_OUTPUT
from test_graph_modes import REQUESTS as GRAPH_REQUESTS
from test_graph_modes import forwards
from test_graph_modes import run as run_with_graphs
from tiny_model_claims import TOLERANCE
from tiny_sparse import (
    DEEPSEEK_V32,
    GLM_5,
    GLM_52,
    SELECTED,
    Indexer,
    SparseForCausalLM,
    build_sparse,
    load_sparse,
    prompt,
)

from vllm_ascend_hsx.demo.reference import Comparison, compare, hidden_states_of

LAYERS = 2
LAYER_IDS = (2, 0, 1)
CHUNK = 512
LONG = prompt(SELECTED + 150)
ENGINE = {"max_model_len": 2560, "max_num_batched_tokens": CHUNK}

SCRIPT = [
    ["add", "decoding", tokens(10), {"max_tokens": 8, **WITH_OUTPUT}],
    ["step", 3],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 2}],
    ["add", "one-token", tokens(1), {"max_tokens": 2}],
    ["step", 1],
    ["add", "longer-than-the-selection", LONG, {"max_tokens": 6, **WITH_OUTPUT}],
    ["add", "one-past-a-chunk", tokens(CHUNK + 1), {"max_tokens": 1}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["settle"],
    ["add", "copied", LONG + prompt(SELECTED + 40)[SELECTED:], {"max_tokens": 1}],
    ["drain"],
]
REQUESTS = [action[1] for action in SCRIPT if action[0] == "add"]


@pytest.fixture(
    scope="module",
    params=[
        DEEPSEEK_V32,
        *(pytest.param(each, marks=pytest.mark.long) for each in (GLM_5, GLM_52)),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sparse(
        tmp_path_factory.mktemp("models") / request.param, request.param, layers=LAYERS
    )


@pytest.fixture(scope="module")
def reference(model: Path) -> SparseForCausalLM:
    return load_sparse(model)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_engine(tmp_path_factory.mktemp("run"), model, SCRIPT, layer_ids=LAYER_IDS, **ENGINE)
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    return run


def compared(run: Run, request_id: str, reference: SparseForCausalLM) -> Comparison:
    """Compare the request's file with the reference."""
    rows = run.rows(request_id)
    assert rows["token_ids"].tolist() == run.sequence(request_id)
    return compare(
        rows["hidden_states"], hidden_states_of(reference, run.sequence(request_id), run.layer_ids)
    )


@pytest.mark.parametrize("request_id", REQUESTS)
def test_file_holds_the_rows_of_its_own_request(
    run: Run, reference: SparseForCausalLM, request_id: str
) -> None:
    comparison = compared(run, request_id, reference)
    assert comparison.matches, comparison


def test_rows_of_cached_tokens_are_copied(run: Run) -> None:
    assert run.requests["copied"]["num_cached_tokens"] == 2176  # blocks of 128 tokens
    assert run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 2176


PARALLEL: dict[str, dict[str, Any]] = {
    "TP=2 with expert parallelism": {},
    "sequence parallelism": {"additional_config": {"enable_flashcomm1": True}},
    "DSA context parallelism": {
        "additional_config": {"enable_flashcomm1": True, "enable_dsa_cp": True}
    },
}
ON_RANKS = [
    ["add", "decoding", tokens(10), {"max_tokens": 6}],
    ["step", 2],
    *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in (1, 7, 101)),
    ["add", "long", prompt(SELECTED + 60), {"max_tokens": 3, **WITH_OUTPUT}],
    ["drain"],
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["drain"],
]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "TP=2 with expert parallelism",
        "sequence parallelism",
        pytest.param(
            "DSA context parallelism",
            marks=only_on_v1("V2 refuses it, and names what to use instead"),
        ),
    ],
)
def test_rows_are_right_on_two_ranks(
    model: Path, reference: SparseForCausalLM, tmp_path: Path, name: str
) -> None:
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    run = run_engine(
        tmp_path, model, ON_RANKS, layer_ids=LAYER_IDS, **ENGINE, **parallel, **PARALLEL[name]
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for request_id in ("decoding", "r1", "r7", "r101", "long"):
        comparison = compared(run, request_id, reference)
        assert comparison.matches, f"{request_id}: {comparison}"


@pytest.mark.long
def test_rows_are_right_in_replays_of_full_graphs(
    model: Path, reference: SparseForCausalLM, tmp_path: Path
) -> None:
    done, (events,) = run_with_graphs(tmp_path, model, "FULL_DECODE_ONLY", layer_ids=LAYER_IDS)
    assert done.error is None, f"{done.error}\n{done.log[-4000:]}"
    assert ("FULL", 2) in forwards(events)
    for request_id in GRAPH_REQUESTS:
        comparison = compared(done, request_id, reference)
        assert comparison.matches, f"{request_id}: {comparison}"


# The tiny model: properties without which the comparisons above would prove too little.


@pytest.mark.long
def test_rows_without_the_right_selection_are_far_from_the_right_ones(
    model: Path, reference: SparseForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relative_difference() -> torch.Tensor:
        other = hidden_states_of(reference, LONG, [1, LAYERS])
        return (other - rows).norm(dim=-1) / rows.norm(dim=-1)

    rows = hidden_states_of(reference, LONG, [1, LAYERS])
    with monkeypatch.context() as patched:
        patched.setattr(tiny_sparse, "SELECTED", len(LONG))
        of_all = relative_difference()
    monkeypatch.setattr(
        Indexer,
        "scores",
        lambda _self, hidden, *_: torch.arange(len(hidden)).expand(len(hidden), -1).float(),
    )
    of_the_last = relative_difference()
    for difference in (of_all, of_the_last):
        assert not difference[:SELECTED].any()
        assert difference[SELECTED:].median() > 4 * TOLERANCE
        assert (difference[SELECTED:] > TOLERANCE).float().mean() > 0.9


@pytest.mark.long
def test_rows_agree_in_both_precisions(model: Path, reference: SparseForCausalLM) -> None:
    rows = hidden_states_of(reference, LONG, [LAYERS])
    rounded = hidden_states_of(load_sparse(model, torch.bfloat16), LONG, [LAYERS]).float()
    assert ((rounded - rows).norm(dim=-1) / rows.norm(dim=-1)).max() < TOLERANCE / 2
