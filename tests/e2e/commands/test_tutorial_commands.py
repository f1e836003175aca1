"""Rotated W8A8 targets, served with the quick start's variants of vllm-ascend's tutorials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from documents import blocks, parse_serve
from harness import tokens
from launch import START_SECONDS, ForkedServer, process_environment, smaller
from quantised.modelslim import mixed, write_modelslim
from quantised.reference import rows_in_the_models_basis
from tiny_model_claims import TOLERANCE

from vllm_ascend_hsx import load
from vllm_ascend_hsx.demo.server import free_port

LAYER_IDS = (2, 0, 4)
PROMPTS = [tokens(length, seed=length) for length in (3, 40, 150)]


class Shown(NamedTuple):
    """A command of the quick start, and the changes for tests.

    Attributes:
        soc: generation of the NPUs, the end of the command's name.
        sizes: values that replace the command's. npus: number that these need.
    """

    soc: str
    npus: int
    sizes: dict[str, str]


A2 = Shown("a2", 2, {"--tensor-parallel-size": "2"})
A3 = Shown(
    "a3", 4, {"--tensor-parallel-size": "2", "--data-parallel-size": "2"}
)  # experts by fused MC2


class Served(NamedTuple):
    url: str
    name: str
    checkpoint: Path


@pytest.fixture(
    scope="module",
    params=[pytest.param(A2, id="a2"), pytest.param(A3, id="a3", marks=pytest.mark.long)],
)
def served(
    request: pytest.FixtureRequest, tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The command for an A2, with TP=2 instead of 8; the command for an A3, with DP=2 x TP=2."""
    form: Shown = request.param
    directory = tmp_path_factory.mktemp("tutorial")
    checkpoint = write_modelslim(tiny_minimax_m2, directory / "checkpoint", mixed, rotated=True)
    shown = parse_serve(blocks("serve.md", f"serve minimax-m2.7-w8a8-{form.soc}")[0])
    command = smaller(shown, checkpoint, directory / "hidden_states", LAYER_IDS, **form.sizes)
    port = free_port()
    environment = process_environment(npus=form.npus, soc=form.soc)
    with ForkedServer(
        [*command, "--port", str(port)],
        port=port,
        log=directory / "server.log",
        environment=environment,
    ) as server:
        server.wait_ready(START_SECONDS)
        yield Served(server.url, shown.options["--served-model-name"], checkpoint)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_rows_are_in_the_models_own_basis(served: Served, prompt: list[int]) -> None:
    body = {"model": served.name, "prompt": prompt, "max_tokens": 1}
    answer = (
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    )
    states = load(answer["kv_transfer_params"]["hidden_states_path"], timeout=60, verify=True)
    assert states.metadata["basis"] == "model"
    expected = rows_in_the_models_basis(served.checkpoint, prompt, LAYER_IDS)
    found = states.hidden_states.float()
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 2 * TOLERANCE
