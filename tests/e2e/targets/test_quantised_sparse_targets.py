"""DeepSeek-V3.2, GLM-5 and GLM-5.2 in W8A8, and with int8 caches (C8): rows are right.

Attention has static scales, as in msmodelslim's recipes (lab_practice/deepseek_v3_2 and glm_5). So
vllm-ascend computes everything before attention with one operator (MLAPO), by default.

Rows are compared with the same integers. Two right implementations differ by at most 3.6 % in these
rows, and the tolerance of test_quantised_targets.py is twice that. Rows with a mistake differ more
(test_rows_with_a_mistake_are_far). The indexer drops tokens only from prompts of more than 2048
tokens (test_sparse_targets.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import Run, run_engine, tokens
from quantised.modelslim import (
    DYNAMIC,
    FLOAT,
    WEIGHTS,
    Choose,
    int4_experts,
    mixed,
    write_modelslim,
)
from quantised.reference import quantised_hidden_states, rotation_of
from releases import installed_is, only_on_v1
from safetensors.torch import load_file, save_file
from test_quantised_targets import LOST, LOST_TO_INT4, QUANTISED, errors
from test_sparse_targets import ENGINE, LAYER_IDS, LAYERS, ON_RANKS, PARALLEL, REQUESTS, SCRIPT
from tiny_model_claims import TOLERANCE
from tiny_sparse import DEEPSEEK_V32, GLM_5, GLM_52, SparseForCausalLM, build_sparse, load_sparse

from vllm_ascend_hsx.demo.reference import hidden_states_of

LAST, FIRST = 0, 2  # indexes of layers 2 and 1
TILE = 128  # elements of a latent with one scale
Script = Sequence[Sequence[Any]]


def static(weight: str) -> str:
    """Quantise like the recipe for DeepSeek-V3.2: queries of the indexer stay unchanged."""
    return FLOAT if ".indexer." in weight else mixed(weight)


def dynamic(weight: str) -> str:
    return FLOAT if ".indexer." in weight else DYNAMIC


def caches(*, latents: bool = False, indexer: bool = False, blocks: bool = False) -> dict[str, Any]:
    """Return the engine arguments for int8 caches of latents, and of the indexer's keys.

    With `blocks` keys are stored by runs of slots, 0.30's default on producers.
    """
    if installed_is(">=0.30"):
        of_indexer = {"attention_config": {"indexer_kv_dtype": "int8"}} if indexer else {}
        return {**({"kv_cache_dtype": "int8"} if latents else {}), **of_indexer}
    return {
        "additional_config": {
            "enable_sparse_sfa_c8": latents,
            "enable_sparse_li_c8": indexer,
            "c8_enable_reshape_optim": blocks,
        }
    }


def load_with_int8_latents(
    directory: str | Path, *arguments: Any, tiles: int = 0, **options: Any
) -> SparseForCausalLM:
    """Return the reference, with latents rounded as in the cache.

    The scales are taken from a tile `tiles` earlier.
    """

    def as_cached(_module: torch.nn.Module, _inputs: Any, latents: torch.Tensor) -> torch.Tensor:
        tiled = latents.double().unflatten(-1, (-1, TILE))
        scale = tiled.abs().amax(-1, keepdim=True) / 127
        return ((tiled / scale).round() * scale.roll(tiles, -2)).flatten(-2).to(latents.dtype)

    model = load_sparse(directory, *arguments, **options)
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(as_cached)
    return model


class Target(NamedTuple):
    """A checkpoint, and the options for serving.

    Attributes:
        family: family of the unquantised model.
        choose: see write_modelslim.
        engine: engine arguments.
        load: loads the reference.
        rotated: with a rotated residual stream (QuaRot), as in the recipe for GLM-5.
        lost: largest error of a row by quantisation.
    """

    family: str
    choose: Choose
    engine: Mapping[str, Any]
    load: Callable[..., SparseForCausalLM] = load_sparse
    rotated: bool = False
    lost: float = LOST


SHORT_RUN = "DeepSeek-V3.2, int8 latents"
TARGETS = {
    "DeepSeek-V3.2": Target(DEEPSEEK_V32, static, {}),
    "DeepSeek-V3.2 without MLAPO": Target(
        DEEPSEEK_V32, static, {"additional_config": {"enable_mlapo": False}}
    ),
    "DeepSeek-V3.2 with dynamic scales": Target(DEEPSEEK_V32, dynamic, {}),
    "DeepSeek-V3.2, int8 keys of the indexer": Target(DEEPSEEK_V32, static, caches(indexer=True)),
    SHORT_RUN: Target(DEEPSEEK_V32, static, caches(latents=True), load_with_int8_latents),
    "GLM-5, rotated": Target(GLM_5, mixed, {}, rotated=True),
    "GLM-5, experts of int4": Target(GLM_5, int4_experts, {}, rotated=True, lost=LOST_TO_INT4),
    "GLM-5, int8 caches": Target(
        GLM_5, mixed, caches(latents=True, indexer=True), load_with_int8_latents
    ),
    "GLM-5.2, int8 caches": Target(
        GLM_52, mixed, caches(latents=True, indexer=True, blocks=True), load_with_int8_latents
    ),
}

INT8_LATENTS = [name for name, target in TARGETS.items() if target.load is load_with_int8_latents]


class Served(NamedTuple):
    """Results of an engine with a checkpoint. The source is the unquantised model."""

    source: Path
    checkpoint: Path
    run: Run
    target: Target

    def errors(self, request_id: str, load: Callable[..., SparseForCausalLM]) -> torch.Tensor:
        """Return the relative error of each row, [tokens, layers]."""
        expected = quantised_hidden_states(
            self.checkpoint, self.run.sequence(request_id), LAYER_IDS, load=load
        )
        return errors(self.run.rows(request_id)["hidden_states"], expected)


def long_but(short: str, names: Iterable[str]) -> list[Any]:
    """Return the names as parameters; only one of them is in the short run."""
    return [name if name == short else pytest.param(name, marks=pytest.mark.long) for name in names]


def serve(directory: Path, target: Target, script: Script = SCRIPT, **engine: Any) -> Served:
    source = build_sparse(directory / "source", target.family, layers=LAYERS)
    checkpoint = write_modelslim(
        source, directory / "checkpoint", target.choose, rotated=target.rotated, load=load_sparse
    )
    options = {
        "quantization": "ascend",
        "connector_options": {"rotation": "keep"},
        **ENGINE,
        **target.engine,
        **engine,
    }
    run = run_engine(directory / "run", checkpoint, script, layer_ids=LAYER_IDS, **options)
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    return Served(source, checkpoint, run, target)


@pytest.fixture(scope="module", params=long_but(SHORT_RUN, TARGETS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("quantised-sparse"), TARGETS[request.param])


@pytest.mark.parametrize("request_id", REQUESTS)
def test_rows_are_those_of_the_quantised_weights_and_caches(
    served: Served, request_id: str
) -> None:
    assert served.run.rows(request_id)["token_ids"].tolist() == served.run.sequence(request_id)
    found = served.errors(request_id, served.target.load)
    assert found.max() < QUANTISED
    assert found.mean(0).max() < TOLERANCE


@pytest.mark.parametrize("served", long_but(SHORT_RUN, INT8_LATENTS), indirect=True, scope="module")
def test_rows_are_nearest_to_the_int8_latents_rows(served: Served) -> None:
    found, other = (
        served.errors("longer-than-the-selection", load)[:, FIRST]
        for load in (served.target.load, load_sparse)
    )
    assert (found < other).float().mean() > 0.7  # by chance half of the rows would be nearer


def test_rows_are_near_the_unquantised_models_rows(served: Served) -> None:
    rows = served.run.rows("decoding")["hidden_states"].float()
    rows = rows @ rotation_of(served.checkpoint).t() if served.target.rotated else rows
    found = errors(
        rows,
        hidden_states_of(load_sparse(served.source), served.run.sequence("decoding"), LAYER_IDS),
    )
    assert found.max() < served.target.lost


def test_rows_of_a_prefix_are_copied(served: Served) -> None:
    assert served.run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 2176


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TARGETS if "int8 caches" in name])
@pytest.mark.parametrize(
    "parallel",
    [
        "sequence parallelism",
        pytest.param(
            "DSA context parallelism",
            marks=only_on_v1("V2 refuses it, and names what to use instead"),
        ),
    ],
)
def test_rows_over_int8_caches_are_right_on_two_ranks(
    name: str, parallel: str, tmp_path: Path
) -> None:
    target = TARGETS[name]
    config = {
        **target.engine.get("additional_config", {}),
        **PARALLEL[parallel]["additional_config"],
    }
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "additional_config": config}
    served = serve(tmp_path, target, ON_RANKS, **ranks)
    for request_id in (action[1] for action in ON_RANKS if action[0] == "add"):
        assert served.errors(request_id, target.load).max() < QUANTISED, request_id


# Mistakes that the comparisons above detect.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes")
    source = build_sparse(directory / "source", DEEPSEEK_V32, layers=LAYERS)
    return write_modelslim(source, directory / "checkpoint", static, load=load_sparse)


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def mean(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, tensor.mean())


OTHER_TILES = partial(load_with_int8_latents, tiles=1)
# The end of the names of tensors, their replacement, and the loader of the reference.
MISTAKES = {
    "latents with scales of other tiles": ("", torch.clone, OTHER_TILES),
    "products without a bias": (".kv_a_proj_with_mqa.quant_bias", zero, load_with_int8_latents),
    "latent queries without an offset": (".q_b_proj.input_offset", zero, load_with_int8_latents),
    "one scale for all columns": (".kv_a_proj_with_mqa.deq_scale", mean, load_with_int8_latents),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_rows_with_a_mistake_are_far(checkpoint: Path, tmp_path: Path, mistake: str) -> None:
    ending, change, load = MISTAKES[mistake]
    wrong = Path(shutil.copytree(checkpoint, tmp_path / "wrong"))
    tensors = {
        name: change(tensor) if name.endswith(ending) else tensor
        for name, tensor in load_file(wrong / WEIGHTS).items()
    }
    save_file(tensors, wrong / WEIGHTS, metadata={"format": "pt"})
    right = quantised_hidden_states(checkpoint, tokens(300), LAYER_IDS, load=load_with_int8_latents)
    found = errors(quantised_hidden_states(wrong, tokens(300), LAYER_IDS, load=load), right)
    assert found[:, LAST].median() > 1.5 * QUANTISED
