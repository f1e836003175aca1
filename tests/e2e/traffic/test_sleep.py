"""Sleep levels 1 and 2, and weights that are loaded again while the engine runs.

vllm-ascend's own CaMemAllocator unmaps the emulated device memory. Memory that it does not copy to
the host comes back without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import tokens
from launch import START_SECONDS
from releases import only_with
from session import EngineSession, Request
from tiny_model_claims import TOLERANCE

from vllm_ascend_hsx import load
from vllm_ascend_hsx.demo.quantised.modelslim import mixed, write_modelslim
from vllm_ascend_hsx.demo.quantised.reference import quantised_hidden_states, rotation_of
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3

LAYER_IDS = (4, 0, 1, 2)
CHUNK = 64
PROMPT = tokens(3 * CHUNK + 9)
LONGER = [*PROMPT, *tokens(40, seed=1)]
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
V2_ONLY_WITH = only_with(">=0.30", "model runner V2 takes no speculator for this method")


class Target(NamedTuple):
    """Checkpoints of one target, and how they are served.

    Attributes:
        build: makes one in a directory, by seed.
        rows: [tokens, layers, hidden] of a checkpoint, by an independent implementation.
        tolerance: largest relative error of a row.
    """

    build: Callable[[Path, int], Path]
    rows: Callable[[Path, Sequence[int]], torch.Tensor]
    tolerance: float
    engine: dict[str, Any]


def rotated(directory: Path, seed: int) -> Path:
    source = build_qwen3(directory.with_name(f"{directory.name}-source"), seed=seed)
    return write_modelslim(source, directory, mixed, rotated=True)


def plain_rows(checkpoint: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return reference_hidden_states(checkpoint, token_ids, LAYER_IDS)


def turned_back_rows(checkpoint: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return quantised_hidden_states(checkpoint, token_ids, LAYER_IDS).float() @ rotation_of(checkpoint).t()


TARGETS = {
    "dense": Target(lambda path, seed: build_qwen3(path, dtype="float32", seed=seed), plain_rows, 1e-5, {"dtype": "float32"}),
    "moe": Target(lambda path, seed: build_minimax_m2(path, seed=seed), plain_rows, TOLERANCE, {}),
    "rotated": Target(rotated, turned_back_rows, 2 * TOLERANCE, {"quantization": "ascend"}),
}


class Lab:
    """An engine in sleep mode, and two checkpoints of its target."""

    def __init__(self, session: EngineSession, target: Target, checkpoints: Sequence[Path]) -> None:
        self.session = session
        self.checkpoints = checkpoints
        self.loaded = checkpoints[0]
        self._target = target

    def sleep(self, level: int) -> None:
        self.session.call("sleep", level)

    def wake_up(self, *tags: str) -> None:
        self.session.call("wake_up", list(tags) or None)

    def load(self, number: int) -> None:
        self.loaded = self.checkpoints[number]
        self.session.call("reload_weights", str(self.loaded))

    def request(self, prompt: Sequence[int]) -> Request:
        """Serve a request, and compare its rows with those of the loaded weights."""
        request = self.session.add(prompt, {"max_tokens": 1})
        self.session.drain()
        (path,) = self.session.paths(request)
        rows = load(path, START_SECONDS).hidden_states.float()
        expected = self._target.rows(self.loaded, prompt).float()
        errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.max() < self._target.tolerance, errors
        return request


def level_1(lab: Lab) -> None:
    lab.sleep(1)
    lab.wake_up()


def level_1_by_tags(lab: Lab) -> None:
    lab.sleep(1)
    lab.wake_up("weights")
    lab.wake_up("kv_cache")


def level_2_and_the_same_weights(lab: Lab) -> None:
    lab.sleep(2)
    lab.wake_up("weights")
    lab.load(0)
    lab.wake_up("kv_cache")


def level_2_and_other_weights(lab: Lab) -> None:
    lab.sleep(2)
    lab.wake_up("weights")
    lab.load(1)
    lab.wake_up("kv_cache")


def other_weights_while_awake(lab: Lab) -> None:
    lab.load(1 - lab.checkpoints.index(lab.loaded))


STORY = (level_1, level_1_by_tags, level_2_and_the_same_weights, level_2_and_other_weights, other_weights_while_awake)


@pytest.mark.parametrize("environ", [pytest.param({}, id="V1"), pytest.param(V2, id="V2", marks=V2_ONLY_WITH)])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_rows_are_those_of_the_weights_that_are_loaded(target: Target, environ: dict[str, str], tmp_path: Path) -> None:
    checkpoints = [target.build(tmp_path / f"checkpoint-{seed}", seed) for seed in range(2)]
    options = {"enable_sleep_mode": True, "additional_config": {"weight_nz_mode": 0}, "max_num_batched_tokens": CHUNK}
    with EngineSession(tmp_path / "run", checkpoints[0], layer_ids=LAYER_IDS, environ=environ, **options, **target.engine) as session:
        lab = Lab(session, target, checkpoints)
        lab.request(PROMPT)
        for happens in STORY:
            happens(lab)
            assert lab.request(PROMPT).reused == 0, happens.__name__
            print(happens.__name__, lab.request(LONGER).reused)
