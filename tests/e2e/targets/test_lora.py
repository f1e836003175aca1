"""Concurrent requests of two adapters (LoRA) and of none: each file has the right rows.

A row of an adapter equals the row of the model with the merged adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import run_engine, tokens
from lora_adapters import RANK, merge, write_adapter
from oracle import Oracle, Reference, Served
from releases import only_with
from session import NOT_EXTRACTED, WITH_OUTPUT, EngineSession, Request

from vllm_ascend_hsx import HiddenStatesError, load
from vllm_ascend_hsx.checkpoint import Checkpoint, fingerprint
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

pytestmark = only_with("<0.26", "adapters are not tested with them")

CHUNK, BLOCK = 64, 128
LAYER_IDS = (4, 0, 2)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NONE, A, B, AGAIN = "", "a", "b", "a, trained further"  # AGAIN has A's name and id
IDS = {A: 1, B: 2}
PROMPTS = {
    "short": tokens(10),
    "chunked": tokens(CHUNK + 9),
    "longer-than-a-block": tokens(BLOCK + 30),
    "in-turn": tokens(BLOCK + 40),
}


class Target(NamedTuple):
    """A target, and the layers that the adapters change."""

    build: Callable[[Path], Path]
    modules: tuple[str, ...]
    engine: dict[str, Any]


TARGETS = {
    "qwen3": Target(build_qwen3, (*ATTENTION, "gate_proj", "up_proj", "down_proj"), {}),
    # vllm-ascend refuses adapters together with expert parallelism (lora/fused_moe.py:56).
    "minimax-m2-tp2": Target(
        build_minimax_m2,
        ATTENTION,
        {"tensor_parallel_size": 2, "fully_sharded_loras": True, "max_lora_rank": 16},
    ),
}


class Run(NamedTuple):
    """Results of an engine.

    Attributes:
        served: each request and the adapter.
        in_flight: requests of B while it is loaded again: one with all rows computed before, and
            one with some rows computed after.
        cached: requests that were not extracted and read the prefix cache, by adapter.
        in_turn: requests of one prompt, added one after the other: A, NONE, B, and again.
        models: directory of the reference model for each adapter.
        weights: fingerprint of each adapter.
    """

    session: EngineSession
    served: list[tuple[str, Request]]
    cached: dict[str, Request]
    in_turn: list[Request]
    in_flight: list[Request]
    models: dict[str, Path]
    weights: dict[str, str]

    def path(self, request: Request) -> Path:
        (path,) = self.session.paths(request)
        return path

    def of(self, whose: str) -> list[Request]:
        return [request for each, request in self.served if each == whose]


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("minimax-m2-tp2", marks=pytest.mark.long)]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory, target = tmp_path_factory.mktemp("lora"), TARGETS[request.param]
    model = target.build(directory / "model")
    adapters = {
        A: write_adapter(directory / "a", model, target.modules, 1),
        B: write_adapter(directory / "b", model, target.modules, 2),
    }
    models = {
        NONE: model,
        **{
            name: merge(directory / f"merged-{name}", model, path)
            for name, path in adapters.items()
        },
    }
    weights = {name: fingerprint_of(path) for name, path in adapters.items()}
    options = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": RANK,
        "max_num_batched_tokens": CHUNK,
        **target.engine,
    }
    session = EngineSession(directory / "engine", model, layer_ids=LAYER_IDS, **options)

    def lora_request(name: str) -> dict[str, Any]:
        return {"lora_name": name, "lora_int_id": IDS[name], "lora_path": str(adapters[name])}

    def add(whose: str, prompt: str, sampling: dict[str, Any], **lora: Any) -> Request:
        name = A if whose == AGAIN else whose
        given = {"lora": {**lora_request(name), **lora}} if name else {}
        return session.add(
            PROMPTS[prompt],
            {"max_tokens": 6, **sampling},
            name=f"{whose or 'none'}-{prompt}",
            **given,
        )

    served = []
    with session:
        for prompt in ("short", "chunked", "longer-than-a-block"):
            served += [(whose, add(whose, prompt, WITH_OUTPUT)) for whose in (A, NONE, B)]
            session.step()  # the three share it, and the previous ones decode beside the next
        session.drain()
        cached = {whose: add(whose, "longer-than-a-block", NOT_EXTRACTED) for whose in (B, NONE, A)}
        session.drain()
        for whose in (A, NONE, B) * 2:
            served.append((whose, add(whose, "in-turn", WITH_OUTPUT)))
            session.drain()
            tell(session)
        in_turn = [request for _, request in served[-6:]]
        write_adapter(adapters[A], model, target.modules, 3)
        models[AGAIN], weights[AGAIN] = (
            merge(directory / "merged-again", model, adapters[A]),
            fingerprint_of(adapters[A]),
        )
        served += [
            (AGAIN, add(AGAIN, "chunked", WITH_OUTPUT, load_inplace=True)),
            (NONE, add(NONE, "chunked", WITH_OUTPUT)),
        ]
        session.drain()
        for _ in range(3):  # the prefix cache has blocks of both weights under one hash
            served.append((AGAIN, add(AGAIN, "in-turn", WITH_OUTPUT)))
            session.drain()
            tell(session)
        in_flight = [add(B, "short", {}), add(B, "chunked", WITH_OUTPUT)]
        session.step(3)  # both have their prompts' rows
        session.call("load_adapter", **lora_request(B), load_inplace=True)  # with the same weights
        session.step()
        write_adapter(adapters[B], model, target.modules, 4)
        session.call("load_adapter", **lora_request(B), load_inplace=True)
        session.drain()
        tell(session)
    return Run(session, served, cached, in_turn, in_flight, models, weights)


def tell(session: EngineSession) -> None:
    """Run steps in which workers learn of ended requests, and the scheduler of their files."""
    for _ in range(2):
        session.add(PROMPTS["short"], {"max_tokens": 6, **NOT_EXTRACTED}, name="not-extracted")
        session.drain()
        for request in session.requests.values():
            for path in session.paths(request):
                wait_until_released(path.with_name(path.name + LOCK_SUFFIX), 60)


def fingerprint_of(adapter: Path) -> str:
    return fingerprint(
        Checkpoint([adapter / "adapter_model.safetensors"], [adapter / "adapter_config.json"])
    )


def test_each_row_has_its_requests_adapter_and_no_other(run: Run) -> None:
    right: dict[str, list[str]] = {request.id: [] for _, request in run.served}
    verdicts = []
    for whose, model in run.models.items():
        oracle = Oracle(Reference(model, 4, torch.bfloat16), LAYER_IDS)
        for own, request in run.served:
            sequence = tuple(request.sequence())
            verdict = oracle.verdict(
                run.path(request),
                Served(request.id, sequence, 0, 1),
                len(sequence) - 1,
                len(request.prompt),
            )
            if not verdict:
                right[request.id].append(whose)
            elif own == whose:
                verdicts.append(verdict)
    assert not verdicts
    assert right == {request.id: [whose] for whose, request in run.served}


def test_rows_of_different_adapters_differ(run: Run) -> None:
    """Otherwise a row of another adapter, or of none, could pass as right."""
    rows = {
        whose: load(
            run.path(run.of(whose)[1 if len(run.of(whose)) > 1 else 0])
        ).hidden_states.float()
        for whose in run.models
    }
    length = len(PROMPTS["chunked"])
    for whose, own in rows.items():
        for other in set(rows) - {whose}:
            difference = (own[:length, [0, 2]] - rows[other][:length, [0, 2]]).norm(dim=-1) / own[
                :length, [0, 2]
            ].norm(dim=-1)
            assert difference.min() > 0.1, f"{whose!r} and {other!r}"


def test_a_file_names_its_adapter_and_the_weights_that_were_loaded(run: Run) -> None:
    assert len(set(run.weights.values())) == 3
    for whose, request in run.served:
        metadata = load(run.path(request)).metadata
        expected = (
            (None, None) if whose == NONE else (A if whose == AGAIN else whose, run.weights[whose])
        )
        assert (metadata.get("lora"), metadata.get("lora_weights")) == expected, request.id


def test_readers_distinguish_adapters_and_weights_under_one_name(
    run: Run,
) -> None:
    found = {
        whose: [examine(run.path(request)) for request in run.of(whose)] for whose in run.models
    }
    assert all(each.problem is None for several in found.values() for each in several)
    kinds = {whose: {each.kind for each in several} for whose, several in found.items()}
    assert [len(several) for several in kinds.values()] == [1] * 4
    assert len(set.union(*kinds.values())) == 3
    assert kinds[A] == kinds[AGAIN]
    assert len({each.weights for several in found.values() for each in several}) == 4


def test_the_prefix_cache_keeps_adapters_apart(run: Run) -> None:
    for whose, request in run.cached.items():
        assert request.num_cached_tokens == BLOCK
        assert request.tokens == run.of(whose)[2].tokens
    assert len({tuple(request.tokens) for request in run.cached.values()}) == 3


def test_only_requests_without_adapter_copy_prefix_rows(run: Run) -> None:
    """Cached blocks identify an adapter by name, but not the weights."""
    assert [request.reused for request in run.in_turn] == [0, 0, 0, 0, BLOCK, 0]
    assert [request.reused for request in run.of(AGAIN)] == [0] * 4


def test_a_request_fails_if_other_weights_are_loaded_before_its_last_row(run: Run) -> None:
    before, after = run.in_flight
    prompt = tuple(before.prompt)
    oracle = Oracle(Reference(run.models[B], 4, torch.bfloat16), LAYER_IDS)
    assert not oracle.verdict(
        run.path(before), Served(before.id, prompt, 0, 1), len(prompt), len(prompt)
    )
    assert load(run.path(before)).metadata["lora_weights"] == run.weights[B]
    with pytest.raises(
        HiddenStatesError,
        match="adapter 'b' was reloaded with other weights before the last row of this request",
    ):
        load(run.path(after))


@pytest.mark.long
def test_defect_24_adapters_that_are_not_fully_sharded_reach_the_kernel_with_more_columns_than_their_rank(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    parallel = {"enable_lora": True, "max_lora_rank": RANK, "tensor_parallel_size": 2}
    broken = run_engine(tmp_path / "upstream", tiny_qwen3, [], extract=False, **parallel)
    assert re.search(
        rf"sgmv_expand: weight: shape \(1, 1, \d+, {RANK}\) must be \[adapters, \d+, {2 * RANK}\]",
        broken.log,
    )
    refused = run_engine(tmp_path / "ours", tiny_qwen3, [], **parallel)
    assert (
        "fully_sharded_loras=False makes vllm-ascend compute wrong adapter outputs"
        in (refused.error or "") + refused.log
    )
    assert "Starting to load model" not in refused.log
