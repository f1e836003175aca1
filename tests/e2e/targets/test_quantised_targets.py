"""Targets quantised by msmodelslim, and targets with a rotated residual stream (QuaRot).

A rotated target computes X Q instead of X. Files have X, or X Q with `rotation: keep`.

Rounding decides the int8 value of an element. So two right implementations of a quantised target
differ by more than two of a target in bfloat16: rows are compared with the same integers
(tests/e2e/models/quantised/reference.py) and twice the usual tolerance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import KIMI_K25, dress_as_kimi_k25
from harness import Run, run_engine, tokens
from launch import FLASHCOMM
from quantised.modelslim import (
    DESCRIPTION,
    ROTATION,
    WEIGHTS,
    Choose,
    dynamic,
    int4_experts,
    mixed,
    plain,
    write_modelslim,
)
from quantised.reference import quantised_hidden_states, rotation_of
from releases import only_with
from safetensors.torch import load_file
from session import WITH_OUTPUT
from test_graph_modes import COMPILER, ENVIRON
from tiny_deepseek_v3 import build_deepseek_v3
from tiny_model_claims import TOLERANCE
from tiny_qwen3_moe import build_bfloat16_qwen3_moe
from tiny_vision import dress_as_qwen3_vl_moe
from transformers import AutoModelForCausalLM

from vllm_ascend_hsx import load
from vllm_ascend_hsx.demo.reference import compare, reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3

LAYER_IDS = (4, 0, 1, 2)
LAST, EMBEDDING, FIRST = 0, 1, 2  # indexes of layers 4, 0 and 1
CHUNK = 64
QUANTISED = 2 * TOLERANCE  # between right implementations of a quantised target
LOST = 0.1  # by quantising: single rows up to 8 %, on average 3 to 5 % in the last layer
LOST_TO_INT4 = 2 * LOST  # up to 13 % measured
SCRIPT = [
    ["add", "decoding", tokens(10), {"max_tokens": 12, **WITH_OUTPUT}],
    ["add", "greedy", tokens(7), {"max_tokens": 101, "temperature": 0.0, **WITH_OUTPUT}],
    ["step", 3],
    ["add", "one-token", tokens(1), {"max_tokens": 2}],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 2}],
    ["step", 1],
    ["add", "chunked", tokens(2 * CHUNK + 9), {"max_tokens": 1}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["drain"],
]
REQUESTS = [action[1] for action in SCRIPT if action[0] == "add"]


class Target(NamedTuple):
    """A checkpoint, and the options for serving.

    Attributes:
        build: builds the unquantised model. choose: see write_modelslim.
        engine: EngineArgs beside the quantisation.
        int8_cache: with an int8 KV cache (C8).
        script: script for the engine.
        exact: True if attention sums in the order of the reference.
        lost: see LOST.
        dress: converts the checkpoint to the served one, with the same rows.
    """

    build: Callable[[Path], Path]
    choose: Choose
    rotated: bool
    engine: dict[str, Any]
    environ: dict[str, str]
    int8_cache: bool = False
    script: Sequence[Sequence[Any]] = SCRIPT
    exact: bool = True
    lost: float = LOST
    dress: Callable[[Path, Path], Path] = lambda checkpoint, _: checkpoint


PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
TEXT_ONLY = {"language_model_only": True}
FULL_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
    "additional_config": COMPILER,
}
KIMI = {**TEXT_ONLY, **KIMI_K25.engine, **FULL_GRAPHS}
TARGETS = {
    "qwen3": Target(build_qwen3, mixed, False, {}, {}),
    "qwen3-quarot": Target(build_qwen3, mixed, True, {}, {}),
    "minimax-m2": Target(build_minimax_m2, mixed, False, PARALLEL, {}),
    "minimax-m2-quarot-sequence-parallel": Target(
        build_minimax_m2, mixed, True, PARALLEL, FLASHCOMM
    ),
    # Experts, the shared one and latent attention are quantised; kernels sum in another order.
    "deepseek-v3": Target(build_deepseek_v3, dynamic, False, {}, {}, exact=False),
    "deepseek-v3-parallel": Target(build_deepseek_v3, mixed, False, PARALLEL, {}, exact=False),
    # Only routed experts are int4, as in the tutorials, whose commands have full graphs.
    "deepseek-v3-int4": Target(
        build_deepseek_v3, int4_experts, False, {}, {}, exact=False, lost=LOST_TO_INT4
    ),
    "deepseek-v3-int4-quarot-parallel": Target(
        build_deepseek_v3, int4_experts, True, PARALLEL, {}, exact=False, lost=LOST_TO_INT4
    ),
    "kimi-k25-int4-graphs": Target(
        build_deepseek_v3,
        int4_experts,
        False,
        KIMI,
        ENVIRON,
        exact=False,
        lost=LOST_TO_INT4,
        dress=dress_as_kimi_k25,
    ),
    "deepseek-v3-quarot": Target(build_deepseek_v3, mixed, True, {}, {}, exact=False),
    # vllm-ascend turns queries and keys of Qwen3-VL by angles in bfloat16.
    "qwen3-vl-moe-quarot": Target(
        build_bfloat16_qwen3_moe,
        mixed,
        True,
        TEXT_ONLY,
        {},
        exact=False,
        dress=dress_as_qwen3_vl_moe,
    ),
}
SHORT_RUN = ("qwen3-quarot", "deepseek-v3-int4")
SHORT_RUN_UNDONE = ("qwen3-quarot", "minimax-m2-quarot-sequence-parallel")
ROTATED = [name for name, target in TARGETS.items() if target.rotated]


class Served(NamedTuple):
    """Results of an engine with a checkpoint.

    Attributes:
        source: the model before it was quantised and rotated.
        exact: True if sums equal the reference's until differences in attention spread.
        lost: see LOST.
    """

    source: Path
    checkpoint: Path
    rotated: bool
    run: Run
    exact: bool = True
    lost: float = LOST

    def rows(self, request_id: str) -> torch.Tensor:
        """Return the extracted rows."""
        return self.run.rows(request_id)["hidden_states"]

    def turned_back(self, request_id: str) -> torch.Tensor:
        """Return the extracted rows in the basis of `source`, float32."""
        rows = self.rows(request_id).float()
        return rows @ rotation_of(self.checkpoint).t() if self.rotated else rows


def serve(directory: Path, target: Target, source: Path, **engine: Any) -> Served:
    checkpoint = write_modelslim(
        source,
        directory / "checkpoint",
        target.choose,
        rotated=target.rotated,
        int8_cache=target.int8_cache,
    )
    options = {
        "quantization": "ascend",
        "connector_options": {"rotation": "keep"},
        **target.engine,
        **engine,
    }
    served = target.dress(checkpoint, directory / "dressed")
    run = run_engine(
        directory / "run",
        served,
        target.script,
        layer_ids=LAYER_IDS,
        max_num_batched_tokens=CHUNK,
        environ=target.environ,
        **options,
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    # Each of several ranks rounds a share of a sum to bfloat16.
    return Served(
        source,
        checkpoint,
        target.rotated,
        run,
        target.exact and options.get("tensor_parallel_size", 1) == 1,
        target.lost,
    )


def long_but(names: Iterable[str], short: Collection[str]) -> list[Any]:
    """Return the names as parameters; only some of them are in the short run."""
    return [each if each in short else pytest.param(each, marks=pytest.mark.long) for each in names]


@pytest.fixture(scope="module", params=long_but(TARGETS, SHORT_RUN))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory, target = tmp_path_factory.mktemp("quantised"), TARGETS[request.param]
    return serve(directory, target, target.build(directory / "source"))


@pytest.fixture(scope="module", params=long_but(ROTATED, SHORT_RUN_UNDONE))
def undone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A rotated target with default options."""
    directory, target = tmp_path_factory.mktemp("undone"), TARGETS[request.param]
    return serve(directory, target, target.build(directory / "source"), connector_options={})


def errors(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each row, [tokens, layers]."""
    difference: torch.Tensor = (rows.float() - expected.float()).norm(
        dim=-1
    ) / expected.float().norm(dim=-1)
    return difference


@pytest.mark.parametrize("request_id", REQUESTS)
def test_rows_are_those_of_the_quantised_weights(served: Served, request_id: str) -> None:
    rows, expected = (
        served.rows(request_id),
        quantised_hidden_states(served.checkpoint, served.run.sequence(request_id), LAYER_IDS),
    )
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows[:, EMBEDDING], expected[:, EMBEDDING])
    found = errors(rows, expected)
    assert found.max() < QUANTISED
    if served.exact:
        assert (found[:, FIRST] == 0).float().mean() > 0.5  # bit for bit
    else:
        assert found[:, FIRST].median() < TOLERANCE / 2


@pytest.mark.parametrize("request_id", REQUESTS)
def test_rows_turned_back_are_near_the_unquantised_models_rows(
    served: Served, request_id: str
) -> None:
    expected = reference_hidden_states(served.source, served.run.sequence(request_id), LAYER_IDS)
    found = errors(served.turned_back(request_id), expected)
    assert found.max() < served.lost
    assert found[:, FIRST:].mean() < TOLERANCE * served.lost / LOST
    assert found[:, EMBEDDING].max() < (TOLERANCE / 10 if served.rotated else 1e-9)


def test_each_row_is_nearest_to_its_own_reference_row(served: Served) -> None:
    expected = reference_hidden_states(served.source, served.run.sequence("chunked"), LAYER_IDS)
    rows = served.turned_back("chunked")
    for layer in set(range(len(LAYER_IDS))) - {EMBEDDING}:  # where equal tokens have equal rows
        distances = torch.cdist(rows[:, layer], expected[:, layer])
        assert torch.equal(distances.argmin(1), torch.arange(len(rows)))


def test_rows_of_a_rotated_target_are_not_those_of_the_model(served: Served) -> None:
    """A draft trained on them without the rotation is trained in another basis."""
    found = errors(
        served.rows("chunked"),
        reference_hidden_states(served.source, served.run.sequence("chunked"), LAYER_IDS),
    )
    assert found.min() > 0.5 if served.rotated else found.max() < served.lost


def test_metadata_marks_rotated_rows(served: Served) -> None:
    assert load(served.run.path("chunked")).metadata.get("basis") == (
        "rotated" if served.rotated else None
    )


# In the model's own basis


def test_rows_are_in_the_models_own_basis_and_no_worse_than_its_quantised_weights(
    undone: Served,
) -> None:
    ours, without_extraction = [], []
    for request_id in REQUESTS:
        rows, sequence = undone.rows(request_id), undone.run.sequence(request_id)
        expected = (
            quantised_hidden_states(undone.checkpoint, sequence, LAYER_IDS).float()
            @ rotation_of(undone.checkpoint).t()
        )
        assert rows.dtype == torch.bfloat16
        assert errors(rows, expected).max() < QUANTISED
        of_source = reference_hidden_states(undone.source, sequence, LAYER_IDS)
        ours.append(errors(rows, of_source))
        without_extraction.append(errors(expected, of_source))
    assert torch.cat(ours).max() < undone.lost
    assert torch.cat(ours).mean() < 1.05 * torch.cat(without_extraction).mean()


def test_metadata_marks_rows_in_the_models_own_basis(undone: Served) -> None:
    assert load(undone.run.path("chunked")).metadata["basis"] == "model"


def predicted(source: Path, rows: torch.Tensor) -> torch.Tensor:
    """Return the token that the source's norm and head predict from each last state."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        tokens: torch.Tensor = model.lm_head(model.model.norm(rows.float())).argmax(-1)
    return tokens


def test_models_own_head_predicts_the_served_token_from_the_last_state(
    undone: Served,
) -> None:
    rows, request = undone.rows("greedy")[:, LAST], undone.run.requests["greedy"]
    first = len(request["prompt"]) - 1
    tokens = torch.tensor(request["tokens"])
    # Rounding decides between tokens with similar scores: at most two of 101 differed.
    assert (predicted(undone.source, rows)[first:] == tokens).float().mean() >= 0.97
    rotated = rows.float() @ rotation_of(undone.checkpoint)
    assert (predicted(undone.source, rotated)[first:] == tokens).float().mean() < 0.5


# Rotated, and not quantised


def test_rotated_float_target_loads_as_quantised_with_float_layers(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    served = serve(tmp_path, Target(build_qwen3, plain, True, {}, {}), tiny_qwen3)
    for request_id in REQUESTS:
        comparison = compare(
            served.turned_back(request_id).bfloat16(),
            reference_hidden_states(tiny_qwen3, served.run.sequence(request_id), LAYER_IDS),
        )
        assert comparison.matches, f"{request_id}: {comparison}"


def test_turning_back_is_exact_in_float32(float32_qwen3: Path, tmp_path: Path) -> None:
    """vLLM refuses float32 with vllm-ascend's quantisation, so the rotation is not described."""
    target = Target(build_qwen3, plain, True, {}, {})
    checkpoint = write_modelslim(
        float32_qwen3, tmp_path / "checkpoint", target.choose, rotated=True
    )
    refused = run_engine(
        tmp_path / "refused", checkpoint, [], dtype="float32", quantization="ascend"
    )
    assert refused.error is not None
    assert "torch.float32 is not supported for quantization method ascend" in refused.error
    (checkpoint / DESCRIPTION).unlink()
    run = run_engine(
        tmp_path / "run",
        checkpoint,
        SCRIPT,
        layer_ids=LAYER_IDS,
        max_num_batched_tokens=CHUNK,
        dtype="float32",
    )
    assert run.error is None, run.error
    served = Served(float32_qwen3, checkpoint, True, run)
    for request_id in REQUESTS:
        expected = reference_hidden_states(float32_qwen3, run.sequence(request_id), LAYER_IDS)
        torch.testing.assert_close(
            served.rows(request_id), expected @ rotation_of(checkpoint), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(served.turned_back(request_id), expected, atol=1e-4, rtol=0)


# Rotated, and not declared


def undeclared(source: Path, directory: Path) -> tuple[Path, torch.Tensor]:
    """Write a rotated checkpoint that does not declare it, and return the rotation, too."""
    checkpoint = write_modelslim(source, directory, mixed, rotated=True)
    rotation = rotation_of(checkpoint)
    shutil.rmtree((checkpoint / ROTATION).parent)
    description = json.loads((checkpoint / DESCRIPTION).read_text())
    (checkpoint / DESCRIPTION).write_text(json.dumps(description | {"optional": {}}))
    return checkpoint, rotation


@pytest.mark.parametrize(
    "late",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["by its files", "once it is loaded"],
)
def test_undeclared_rotation_is_refused_before_the_first_request(
    tiny_qwen3: Path, tmp_path: Path, late: bool
) -> None:
    checkpoint, _ = undeclared(tiny_qwen3, tmp_path / "checkpoint")
    if late:  # files that only vLLM reads
        torch.save(load_file(checkpoint / WEIGHTS), checkpoint / "pytorch_model.bin")
        (checkpoint / WEIGHTS).unlink()
    refused = run_engine(tmp_path / "run", checkpoint, [], quantization="ascend")
    assert refused.error is not None
    assert (
        "is rotated (QuaRot) but does not declare it: all weights of its final norm are equal"
        in refused.error
    )
    assert "kv_connector_extra_config.rotation='keep'" in refused.error
    assert ("Loading weights took" in refused.log) == late


@pytest.mark.long
def test_rows_of_an_undeclared_rotation_are_kept_on_demand(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    checkpoint, rotation = undeclared(tiny_qwen3, tmp_path / "checkpoint")
    options = {"quantization": "ascend", "connector_options": {"rotation": "keep"}}
    run = run_engine(
        tmp_path / "run",
        checkpoint,
        SCRIPT,
        layer_ids=LAYER_IDS,
        max_num_batched_tokens=CHUNK,
        **options,
    )
    assert run.error is None, run.error
    assert load(run.path("chunked")).metadata["basis"] == "rotated"
    turned_back = run.rows("chunked")["hidden_states"].float() @ rotation.t()
    found = errors(
        turned_back, reference_hidden_states(tiny_qwen3, run.sequence("chunked"), LAYER_IDS)
    )
    assert found.max() < LOST


# With an int8 KV cache (C8)

# Each request, and the position from which on the tokens attend to the cache: a whole prompt
# attends to computed keys and values, a later chunk and a generated token to int8.
CACHED_FROM = {"decoding": 40, "chunked": CHUNK, "running": 20, "beside-a-decode": 17}
OVER_THE_CACHE: list[list[Any]] = [
    ["add", "decoding", tokens(40), {"max_tokens": 24, **WITH_OUTPUT}],
    ["drain"],
    ["add", "chunked", tokens(2 * CHUNK + 9), {"max_tokens": 1}],
    ["drain"],
    ["add", "running", tokens(20), {"max_tokens": 24, **WITH_OUTPUT}],
    ["step", 3],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 2}],
    ["drain"],
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["drain"],
]
INT8_CACHES = {
    "qwen3": Target(build_qwen3, mixed, False, {}, {}, True, OVER_THE_CACHE),
    "minimax-m2-quarot": Target(build_minimax_m2, mixed, True, PARALLEL, {}, True, OVER_THE_CACHE),
}


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("minimax-m2-quarot", marks=pytest.mark.long)]
)
def over_the_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    directory, target = tmp_path_factory.mktemp("int8-cache"), INT8_CACHES[request.param]
    return serve(directory, target, target.build(directory / "source"))


@only_with("<0.26", "an int8 KV cache is not tested with them")
def test_rows_follow_from_the_int8_caches_keys_and_values(over_the_cache: Served) -> None:
    own, without = [], []
    for request_id, cached_from in CACHED_FROM.items():
        sequence, rows = over_the_cache.run.sequence(request_id), over_the_cache.rows(request_id)
        found = errors(
            rows,
            quantised_hidden_states(over_the_cache.checkpoint, sequence, LAYER_IDS, cached_from),
        )
        assert found.max() < QUANTISED, request_id
        own.append(found[cached_from:, FIRST])
        without.append(
            errors(rows, quantised_hidden_states(over_the_cache.checkpoint, sequence, LAYER_IDS))[
                cached_from:, FIRST
            ]
        )
    nearer = (torch.cat(own) < torch.cat(without)).float().mean()
    assert nearer > 0.9, (
        f"{nearer}: {torch.cat(own).mean()} from the cache, {torch.cat(without).mean()} from "
        "what was computed"
    )
