"""Files name the weights that computed their rows; rows of aborted requests are kept on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from harness import tokens
from launch import START_SECONDS, tiny_server
from releases import installed_is, only_with
from session import EngineSession, Request

import vllm_ascend_hsx
from vllm_ascend_hsx.checkpoint import find_checkpoint, fingerprint
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.demo.tiny_models import build_qwen3
from vllm_ascend_hsx.reader.load import HiddenStates

LAYER_IDS = (4, 0, 2)
CHUNK, BLOCK, MOST_STEPS = 64, 128, 50
PROMPT = tokens(3 * CHUNK + 9)
LONGER = [*PROMPT, *tokens(40, seed=1)]
EXACT = 1e-5  # in float32
GENERATE = {"include_output_tokens": True, "keep_aborted": True}
V2 = pytest.param(
    {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    id="V2",
    marks=only_with(">=0.30", "earlier releases refuse model runner V2"),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return [build_qwen3(directory / str(seed), seed=seed, dtype="float32") for seed in range(2)]


@pytest.fixture(params=[pytest.param({}, id="V1"), V2])
def session(
    checkpoints: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[EngineSession]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_batched_tokens": CHUNK,
        "environ": request.param,
    }
    with EngineSession(tmp_path / "run", checkpoints[0], layer_ids=LAYER_IDS, **options) as session:
        yield session


def fingerprint_of(checkpoint: Path) -> str:
    found = find_checkpoint(checkpoint, "auto")
    assert found is not None
    return fingerprint(found)


def assert_rows(
    rows: torch.Tensor,
    checkpoint: Path,
    token_ids: Sequence[int],
    first: int = 0,
    layers: slice = slice(None),
) -> None:
    """Require rows from position `first` on to equal a checkpoint's rows of these tokens."""
    expected = reference_hidden_states(checkpoint, token_ids, LAYER_IDS)[
        first : first + len(rows), layers
    ]
    errors = (rows[:, layers] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < EXACT, errors


def computed_when_begun(session: EngineSession, request: Request) -> int:
    """Step until a request has begun, and return the number of computed tokens."""
    for _ in range(MOST_STEPS):
        if computed := int(session.call("progress")[request.internal_id]["computed"]):
            return computed
        session.step()
    raise AssertionError(f"the request does not begin:\n{session.log[-4000:]}")


def loaded(session: EngineSession, request: Request) -> tuple[HiddenStates, list[list[Any]]]:
    """Finish a request, and return the file and the versions that the response names."""
    session.settle()
    assert request.kv_transfer_params is not None
    return vllm_ascend_hsx.load(
        session.paths(request)[0], START_SECONDS, verify=True
    ), request.kv_transfer_params["weight_versions"]


def test_files_and_responses_name_the_weights_that_computed_their_rows(
    session: EngineSession, checkpoints: list[Path]
) -> None:
    """The prefix cache is not reset before the end: no row of earlier weights is copied."""
    before, after = checkpoints
    session.call("name_weights", "sft")
    states, told = loaded(session, session.add(PROMPT, {"max_tokens": 1}))
    assert [each[:] for each in states.weight_versions] == [(0, "sft", fingerprint_of(before))]
    assert told == [[0, "sft"]]
    assert_rows(states.hidden_states, before, PROMPT)

    under_way = session.add(
        LONGER,
        {"max_tokens": 4, "extra_args": {"kv_transfer_params": {"include_output_tokens": True}}},
    )
    begun = computed_when_begun(session, under_way)
    assert BLOCK < begun < len(LONGER), "some rows are copied, some are computed"
    session.call("load_weights", str(after))
    session.call("name_weights", "step 1")
    states, told = loaded(session, under_way)
    assert told == [[0, "sft"], [1, "step 1"]]
    assert [[each.number, each.name] for each in states.weight_versions] == told
    assert "weights" not in states.metadata
    everything = [*LONGER, *under_way.tokens]
    assert_rows(states.hidden_states[:begun], before, everything)
    # Embeddings do not depend on earlier computation.
    assert_rows(
        states.hidden_states[-3:],
        after,
        everything[:-1],
        first=len(everything) - 4,
        layers=slice(1, 2),
    )

    for is_reset in (False, True):
        if is_reset:
            assert session.call("reset_prefix_cache")
        for prompt in (PROMPT, LONGER):
            request = session.add(prompt, {"max_tokens": 1})
            states, told = loaded(session, request)
            assert (request.reused > 0) == (is_reset and prompt == LONGER)
            assert told == [[1, "step 1"]]
            assert states.weight_versions == [(1, "step 1", "")]
            assert "weights" not in states.metadata
            assert_rows(states.hidden_states, after, prompt)

    session.call("load_weights", str(before))
    states, told = loaded(session, session.add(PROMPT, {"max_tokens": 1}))
    assert told == [[2, ""]], "the name is that of the weights before"
    assert_rows(states.hidden_states, before, PROMPT)


@only_with(">=0.30", "vllm-ascend's worker has no reload_weights, and vLLM no name of weights")
def test_the_fingerprint_follows_reload_weights_and_the_name_is_vllms(
    session: EngineSession, checkpoints: list[Path]
) -> None:
    for number, checkpoint in enumerate([checkpoints[1], checkpoints[0], checkpoints[0]], 1):
        session.call("reload_weights", str(checkpoint))
        session.call("name_weights", f"step {number}", in_engine=True)
        states, told = loaded(session, session.add(PROMPT, {"max_tokens": 1}))
        assert told == [[number, f"step {number}"]]
        assert states.weight_versions == [(number, f"step {number}", fingerprint_of(checkpoint))]
        assert_rows(states.hidden_states, checkpoint, PROMPT)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not asked for"])
def test_aborted_request_keeps_rows_and_tokens_on_demand(
    session: EngineSession, checkpoints: list[Path], keep: bool
) -> None:
    params = GENERATE if keep else {"include_output_tokens": True}
    in_prompt = session.add(LONGER, {"max_tokens": 1, "extra_args": {"kv_transfer_params": params}})
    assert computed_when_begun(session, in_prompt) < len(LONGER)
    session.abort(in_prompt)
    generating = session.add(
        PROMPT, {"max_tokens": 50, "extra_args": {"kv_transfer_params": params}}
    )
    waiting = session.add(LONGER, {"max_tokens": 1, "extra_args": {"kv_transfer_params": params}})
    session.abort(waiting)
    for _ in range(MOST_STEPS):
        if len(generating.tokens) < 7:
            session.step()
    session.abort(generating)
    session.settle()
    assert not session.paths(waiting)[0].exists(), "no row was computed"
    for request, at_least, prompt_rows in (
        (in_prompt, CHUNK, 0),
        (generating, len(PROMPT) + 6, len(PROMPT)),
    ):
        (path,) = session.paths(request)
        if not keep:
            assert not path.exists()
            continue
        states = vllm_ascend_hsx.load(path, START_SECONDS, verify=True)
        token_ids = states.token_ids.tolist()
        assert len(token_ids) == len(states.hidden_states) >= at_least
        assert token_ids[: len(request.prompt)] == request.prompt[: len(token_ids)]
        assert states.num_prompt_tokens == (prompt_rows or len(token_ids))
        assert states.metadata["aborted"] == "true"
        assert states.weight_versions == [(0, "", fingerprint_of(checkpoints[0]))]
        generated = token_ids[len(request.prompt) :]
        assert request.tokens[: len(generated)] == generated[: len(request.tokens)]
        assert_rows(states.hidden_states, checkpoints[0], token_ids)
    # No request copies rows of an aborted one whose number only the worker knows.
    states, _ = loaded(session, again := session.add(LONGER, {"max_tokens": 1}))
    assert again.reused == 0
    assert_rows(states.hidden_states, checkpoints[0], LONGER)


class Service:
    """A server with the endpoints that RL frameworks call."""

    def __init__(self, server: Server, model: Path, storage: Path) -> None:
        self.server, self.model, self.storage = server, model, storage

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        httpx.post(f"{self.server.url}{path}", json=body, timeout=START_SECONDS).raise_for_status()

    def stream(self, name: str, params: dict[str, Any]) -> Any:
        body = {
            "model": str(self.model),
            "prompt": PROMPT,
            "max_tokens": 280,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        body |= {"return_token_ids": True, "kv_transfer_params": params}
        return httpx.stream(
            "POST",
            f"{self.server.url}/v1/completions",
            json=body,
            headers={"X-Request-Id": name},
            timeout=START_SECONDS,
        )

    def states(self, name: str) -> HiddenStates:
        path = vllm_ascend_hsx.find(self.storage, f"cmpl-{name}")
        return vllm_ascend_hsx.load(path, START_SECONDS, verify=True, response_id=f"cmpl-{name}")


@pytest.fixture(scope="module")
def service(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("service")
    options: dict[str, Any] = {
        "expert_parallel": False,
        "extra": ("--dtype", "float32"),
        "environ": {"VLLM_SERVER_DEV_MODE": "1"},
    }
    with tiny_server(directory, checkpoints[0], LAYER_IDS, **options) as server:
        server.wait_ready(START_SECONDS)
        yield Service(server, checkpoints[0], directory / "hidden_states")


def chunks(response: Any) -> Iterator[list[int]]:
    """Yield the tokens of each part of a streamed completion, and finally how it ended."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            yield choice["token_ids"] or []
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] == "abort"


@pytest.mark.parametrize("how", ["pause", "disconnect"])
def test_http_rows_before_an_abort_are_kept_on_demand_and_found_by_response_id(
    service: Service, how: str
) -> None:
    generated: list[int] = []
    with (
        service.stream(f"kept-{how}", GENERATE) as kept,
        service.stream(f"dropped-{how}", {"include_output_tokens": True}) as dropped,
    ):
        parts, others = chunks(kept), chunks(dropped)
        while len(generated) < 5:
            generated += next(parts)
        assert next(others)
        if how == "pause":
            service.post("/pause?mode=abort")
            generated += [token for part in parts for token in part]
    if how == "pause":
        service.post("/resume")
    states = service.states(f"kept-{how}")
    token_ids = states.token_ids.tolist()
    assert token_ids[: len(PROMPT)] == PROMPT
    assert states.metadata["aborted"] == "true"
    stored = token_ids[len(PROMPT) :]
    assert len(stored) >= 4
    assert stored[: len(generated)] == generated[: len(stored)]
    assert_rows(states.hidden_states, service.model, token_ids)
    with pytest.raises(FileNotFoundError, match="no hidden states"):
        service.states(f"dropped-{how}")


def test_over_http_a_client_names_the_weights(service: Service) -> None:
    calls = {"/collective_rpc": {"method": "set_weight_version", "args": ["step 1"]}}
    if installed_is(">=0.30"):
        calls["/update_weight_version"] = {"new_version": "step 2"}
    for path, body in calls.items():
        service.post(path, body)
        request = {"model": str(service.model), "prompt": PROMPT, "max_tokens": 1}
        response = httpx.post(
            f"{service.server.url}/v1/completions", json=request, timeout=START_SECONDS
        ).json()
        name = body.get("new_version", "step 1")
        params = response["kv_transfer_params"]
        assert params["weight_versions"] == [[0, name]]
        assert vllm_ascend_hsx.load(params["hidden_states_path"]).weight_versions == [
            (0, name, fingerprint_of(service.model))
        ]
