"""Storage hangs: plain requests continue, extracted ones wait or fail, as `slow_storage` says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import tokens
from oracle import Reference
from session import EngineSession, Request
from stage import Stage

from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX

LAYER_IDS = (1, 2, 4)
RING_BYTES = 128 << 10  # 42 rows
CHUNK = 64
OPTS_OUT = {"hidden_states": False}


@pytest.fixture(scope="module", params=["wait", "fail"])
def stage(
    request: pytest.FixtureRequest, float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with EngineSession(
        tmp_path_factory.mktemp("slow"),
        float32_qwen3,
        max_num_batched_tokens=CHUNK,
        layer_ids=LAYER_IDS,
        dtype="float32",
        connector_options={"slow_storage": request.param, "pinned_ring_bytes": RING_BYTES},
    ) as session:
        stage = Stage(session, Reference(float32_qwen3, 4, torch.float32))
        stage.param = request.param
        session.call("opens", "be_patient")
        yield stage


def test_plain_requests_continue_while_storage_hangs(stage: Stage) -> None:
    plain = stage.add(tokens(20), name="plain", params=OPTS_OUT, expect="nothing", max_tokens=120)
    stage.until_mid_decode(plain)
    stage.session.call("hold_writes")
    admitted = stage.add(tokens(60), name="admitted")  # more than the ring holds
    held = stage.add(
        tokens(20, seed=1), name="held", expect="prompt" if stage.param == "wait" else "failed"
    )
    beside = stage.add(
        tokens(20, seed=2), name="beside", params=OPTS_OUT, expect="nothing", max_tokens=5
    )
    before = len(plain.tokens)
    stage.step(40)
    assert len(plain.tokens) >= before + 38
    assert admitted.finished
    assert beside.finished
    if stage.param == "fail":
        # After two seconds without an answer it is refused instead of being held.
        deadline = time.monotonic() + 60
        while not held.finished and time.monotonic() < deadline:
            if plain.finished:
                plain = stage.add(
                    tokens(20), name="plain", params=OPTS_OUT, expect="nothing", max_tokens=120
                )
            stage.step()
        assert (
            held.kv_transfer_params["hidden_states_error"] == "the storage did not answer for 2 s"
        )
    else:
        assert not held.finished
    stage.session.call("release_writes")
    stage.drain()
    assert held.finished
    if stage.param == "fail":
        (path,) = stage.session.paths(held)
        stage.session.call("catch_up")  # writers leave the reason beside the path
        assert path.with_name(path.name + ERROR_SUFFIX).exists()
    stage.check()


def test_oversized_prompt_waits_or_fails_with_the_reason(stage: Stage) -> None:
    stage.settle_in()
    plain = stage.add(tokens(20), name="plain", params=OPTS_OUT, expect="nothing", max_tokens=120)
    stage.until_mid_decode(plain)
    stage.session.call("hold_writes")
    large = stage.add(
        tokens(5 * CHUNK), name="large", expect="prompt" if stage.param == "wait" else "failed"
    )
    if stage.param == "wait":
        stage.session.call("release_writes_when_a_step_waits")
    before = len(plain.tokens)
    stage.step(20)
    assert len(plain.tokens) >= before + 18
    if stage.param == "fail":
        stage.until(lambda: large.finished)
        reason = large.kv_transfer_params["hidden_states_error"]
        assert "slow_storage is 'fail'" in reason or "did not answer for 2 s" in reason
        stage.session.call("release_writes")
    stage.drain()
    stage.check()
    again = stage.add(tokens(5 * CHUNK, seed=3), name="again")
    stage.drain()
    stage.check()
    assert again.finished


def test_held_request_is_admitted_although_nothing_else_runs(stage: Stage) -> None:
    stage.session.call("hold_writes")
    first = stage.add(tokens(60), name="first")
    plain = stage.add(tokens(5), name="plain", params=OPTS_OUT, expect="nothing", max_tokens=6)
    stage.until(lambda: plain.finished)  # a step's rows are reported with the next one
    assert first.finished
    held = stage.add(tokens(20, seed=1), name="held")
    stage.step(3)
    assert not held.finished
    stage.session.call("release_writes")
    stage.until(lambda: held.finished)
    stage.check()


def test_hanging_open_delays_one_step_and_later_requests_are_refused(
    stage: Stage,
) -> None:
    """As with a stopped FUSE server, or an unreachable NFS server."""
    plain = stage.add(tokens(20), name="plain", params=OPTS_OUT, expect="nothing", max_tokens=120)
    stage.until_mid_decode(plain)
    stage.session.call("opens", "hold", storage_timeout=1.0)
    for number in range(6):
        refused = stage.add(tokens(20, seed=number), name=f"refused {number}", expect="failed")
        step_until_finished(stage, refused)
        reason = refused.kv_transfer_params["hidden_states_error"]
        assert reason == "the storage did not answer for 1 s" or (
            stage.param == "fail" and "slow_storage is 'fail'" in reason
        )
    before = len(plain.tokens)
    stage.step(20)
    assert len(plain.tokens) >= before + 18
    assert stage.session.call("opens", "release") == 1, "steps that waited for files"
    extracted = stage.add(tokens(20, seed=9), name="extracted")
    step_until_finished(stage, extracted)
    assert "hidden_states_error" not in extracted.kv_transfer_params
    stage.drain()
    stage.check()


def step_until_finished(stage: Stage, request: Request) -> None:
    """Step for as long as the request may be held back; steps in which it is held do not count."""
    deadline = time.monotonic() + 60
    while not request.finished and time.monotonic() < deadline:
        stage.step()
    assert request.finished
