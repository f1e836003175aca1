"""Sleep levels 1 and 2, and weights that are loaded while the engine runs.

vllm-ascend's own CaMemAllocator unmaps the emulated device memory. Memory that it does not copy to
the host comes back without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import tokens
from launch import START_SECONDS
from quantised.modelslim import mixed, write_modelslim
from quantised.reference import quantised_hidden_states, rotation_of
from releases import installed_is, only_with
from session import EngineError, EngineSession, Request
from tiny_model_claims import TOLERANCE
from tiny_qwen3_moe import build_qwen3_moe

from vllm_ascend_hsx import load
from vllm_ascend_hsx.checkpoint import Checkpoint, find_checkpoint, fingerprint
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3
from vllm_ascend_hsx.protocol.weights import WeightVersion

LAYER_IDS = (4, 0, 1, 2)
CHUNK = 64
PROMPT = tokens(3 * CHUNK + 9)
LONGER = [*PROMPT, *tokens(40, seed=1)]
EXACT = 1e-5  # in float32
SLEEP_MODE = {
    "enable_sleep_mode": True,
    "additional_config": {"weight_nz_mode": 0},
    "max_num_batched_tokens": CHUNK,
}
PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
V2_RUNS = only_with(">=0.30", "model runner V2 takes no speculator for this method")


class Lab:
    """An engine in sleep mode, and two checkpoints of the target.

    Args:
        session: has loaded the first checkpoint.
        rows: [tokens, layers, hidden] of a checkpoint, by an independent implementation.
        tolerance: largest relative error of a row.
        checkpoints: the checkpoints.
    """

    def __init__(
        self,
        session: EngineSession,
        rows: Callable[[Path, Sequence[int]], torch.Tensor],
        tolerance: float,
        checkpoints: Sequence[Path],
    ) -> None:
        self.session = session
        self._rows = rows
        self._tolerance = tolerance
        self._checkpoints = checkpoints
        self._loaded = 0
        self._changes = 0

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.session.call("sleep", level, mode)

    def wake_up(self, *tags: str) -> None:
        self.session.call("wake_up", list(tags) or None)

    def load(self) -> None:
        """Load the weights that the engine had."""
        self.change("load_weights", str(self._checkpoints[self._loaded]))

    def change(self, action: str, *args: str) -> None:
        """Call the workers."""
        self.session.call(action, *args)
        self._changes += 1

    def load_others(self) -> None:
        self._loaded = 1 - self._loaded
        self.load()

    def request(self, prompt: Sequence[int]) -> Request:
        """Serve a request, and compare rows and version with the loaded weights."""
        request = self.session.add(prompt, {"max_tokens": 1})
        self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """Do the same with an added request."""
        self.session.drain()
        (path,) = self.session.paths(request)
        states = load(path, START_SECONDS)
        rows = states.hidden_states.float()
        expected = self._rows(self._checkpoints[self._loaded], request.prompt).float()
        errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.max() < self._tolerance, errors
        # Functions of a test have loaded other weights than at the start.
        known = (
            ""
            if self._changes
            else fingerprint(require(find_checkpoint(self._checkpoints[0], "auto")))
        )
        assert states.weight_versions == [WeightVersion(self._changes, "", known)]
        assert request.kv_transfer_params is not None
        assert request.kv_transfer_params["weight_versions"] == [[self._changes, ""]]


def level_1(lab: Lab) -> None:
    lab.sleep(1)
    lab.wake_up()


def level_1_by_tags(lab: Lab) -> None:
    lab.sleep(1)
    lab.wake_up("weights")
    lab.wake_up("kv_cache")


def level_1_and_other_weights(lab: Lab) -> None:
    lab.sleep(1)
    lab.wake_up()
    lab.load_others()


def level_2_and_the_same_weights(lab: Lab) -> None:
    lab.sleep(2)
    lab.wake_up("weights")
    lab.load()
    lab.wake_up("kv_cache")


def level_2_and_other_weights(lab: Lab) -> None:
    lab.sleep(2)
    lab.wake_up("weights")
    lab.load_others()
    lab.wake_up("kv_cache")


def level_2_and_other_weights_in_the_middle_of_a_prompt(lab: Lab) -> None:
    request = lab.session.add(PROMPT, {"max_tokens": 1})
    lab.session.step(2)
    assert not request.finished
    lab.sleep(2, "keep")
    lab.wake_up("weights")
    lab.load_others()
    lab.wake_up("kv_cache")
    lab.finish(request)


def level_2_and_weights_that_were_kept(lab: Lab) -> None:
    lab.change("keep_weights")
    lab.sleep(2)
    lab.wake_up()
    lab.change("put_weights_back")


def a_reset_of_the_prefix_cache(lab: Lab) -> None:
    assert lab.session.call("reset_prefix_cache")


def require(checkpoint: Checkpoint | None) -> Checkpoint:
    assert checkpoint is not None
    return checkpoint


Event = Callable[[Lab], None]
LEVEL_1: tuple[Event, ...] = (level_1, level_1_by_tags)
LEVEL_2: tuple[Event, ...] = (
    level_2_and_the_same_weights,
    level_2_and_other_weights,
    level_1_and_other_weights,
    level_2_and_other_weights_in_the_middle_of_a_prompt,
)


def plain_rows(checkpoint: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return reference_hidden_states(checkpoint, token_ids, LAYER_IDS)


def turned_back_rows(checkpoint: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return (
        quantised_hidden_states(checkpoint, token_ids, LAYER_IDS).float()
        @ rotation_of(checkpoint).t()
    )


def rotated(build: Callable[..., Path], directory: Path, *, seed: int) -> Path:
    """Write a quantised and rotated checkpoint. The rotation is the same for all seeds."""
    return write_modelslim(
        build(directory.with_name(f"{directory.name}-source"), seed=seed),
        directory,
        mixed,
        rotated=True,
    )


class Target(NamedTuple):
    """Checkpoints of one target, their options, and their test actions; see Lab."""

    build: Callable[..., Path]
    rows: Callable[[Path, Sequence[int]], torch.Tensor]
    tolerance: float
    engine: dict[str, Any]
    events: tuple[Event, ...]


# vLLM's reload_weights refuses MiniMax-M2: a parameter's loader is a functools.partial
# (model_executor/model_loader/reload/layerwise.py:140 in 0.23.0).
TARGETS = {
    "dense": Target(
        partial(build_qwen3, dtype="float32"),
        plain_rows,
        EXACT,
        {"dtype": "float32"},
        LEVEL_1 + LEVEL_2,
    ),
    "moe": Target(
        build_qwen3_moe,
        plain_rows,
        EXACT,
        {"dtype": "float32"},
        LEVEL_2 if installed_is("<0.26") else LEVEL_1 + LEVEL_2,
    ),
    "rotated": Target(
        partial(rotated, build_qwen3),
        turned_back_rows,
        2 * TOLERANCE,
        {"quantization": "ascend"},
        LEVEL_1 + LEVEL_2,
    ),
    "rotated-moe-parallel": Target(
        partial(rotated, build_minimax_m2),
        turned_back_rows,
        2 * TOLERANCE,
        {"quantization": "ascend", **PARALLEL},
        (*LEVEL_1, level_2_and_weights_that_were_kept),
    ),
}
SHORT_RUN = ("rotated",)


@pytest.mark.parametrize(
    "environ", [pytest.param({}, id="V1"), pytest.param(V2, id="V2", marks=V2_RUNS)]
)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(each, id=name, marks=() if name in SHORT_RUN else pytest.mark.long)
        for name, each in TARGETS.items()
    ],
)
def test_rows_are_those_of_the_loaded_weights(
    target: Target, environ: dict[str, str], tmp_path: Path
) -> None:
    """Regardless of earlier requests. The prefix cache is not reset when weights are loaded."""
    checkpoints = [target.build(tmp_path / f"checkpoint-{seed}", seed=seed) for seed in range(2)]
    with EngineSession(
        tmp_path / "run",
        checkpoints[0],
        layer_ids=LAYER_IDS,
        environ=environ,
        **SLEEP_MODE,
        **target.engine,
    ) as session:
        lab = Lab(session, target.rows, target.tolerance, checkpoints)
        assert lab.request(PROMPT).reused == 0
        assert lab.request(LONGER).reused > 0
        for happens in (*target.events, a_reset_of_the_prefix_cache):
            happens(lab)
            assert lab.request(PROMPT).reused == 0, happens.__name__
            lab.request(LONGER)
        assert lab.request(LONGER).reused > 0


@only_with("<0.26", "wake_up leaves experts as the kernels need them")
@pytest.mark.long
@pytest.mark.parametrize("extract", [True, False], ids=["extracted", "plain"])
def test_upstream_a_moe_of_float_weights_cannot_wake_up_without_loading_weights(
    extract: bool, tmp_path: Path
) -> None:
    """NPUWorker.wake_up transposes the experts (worker.py:254 in 0.23.0), but sleep did not."""
    model = build_qwen3_moe(tmp_path / "checkpoint")
    with EngineSession(
        tmp_path / "run", model, extract=extract, dtype="float32", **SLEEP_MODE
    ) as session:
        session.call("sleep", 1)
        session.call("wake_up")
        session.add(PROMPT, {"max_tokens": 1})
        with pytest.raises(EngineError, match=r"npu_grouped_matmul: weight: shape .* does not fit"):
            session.drain()
