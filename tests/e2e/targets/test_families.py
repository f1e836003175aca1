"""Each family of vllm-ascend's support table that the emulated NPU runs: rows are right.

A short run tries two families, different ones each day; a long run tries all of them.
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, LAYERS, Family, build_family, build_outer
from harness import Run, run_engine, tokens
from launch import FLASHCOMM
from releases import installed_is
from session import WITH_OUTPUT
from test_graph_modes import COMPILER, ENVIRON

from vllm_ascend_hsx.compat.collector import Collection
from vllm_ascend_hsx.compat.targets import SHOWN, recorded_architectures

CHUNK = 64
LAYER_IDS = (LAYERS, 0, 2, 1)  # not ascending, with both ends
LONG = tokens(2 * CHUNK + 2)
SCRIPT: list[list[Any]] = [
    ["add", "decoding", tokens(17), {"max_tokens": 8, **WITH_OUTPUT}],
    ["step", 2],
    ["add", "one-token", tokens(1), {"max_tokens": 1}],
    ["add", "two-tokens", tokens(2), {"max_tokens": 2}],
    ["add", "a-chunk", tokens(CHUNK), {"max_tokens": 1}],
    ["add", "chunked", LONG, {"max_tokens": 1}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["settle"],
    ["add", "copied", LONG + tokens(9), {"max_tokens": 1}],
    ["drain"],
]
ON_RANKS = [
    action for action in SCRIPT if action != ["settle"]
]  # an engine in one process can settle
REQUESTS = [action[1] for action in SCRIPT if action[0] == "add"]
SHORT = 2  # families of a short run


def families(experts: bool) -> list[Any]:
    """Return the families of this release; all but a few of each day are `long`."""
    names = [
        name
        for name, each in FAMILIES.items()
        if installed_is(each.versions) and each.experts >= experts
    ]
    first = datetime.date.today().toordinal() * SHORT % len(names)
    short = (
        {names[(first + place) % len(names)] for place in range(SHORT)} if not experts else set()
    )
    return [
        pytest.param(FAMILIES[name], id=name, marks=() if name in short else pytest.mark.long)
        for name in names
    ]


def serve(directory: Path, family: Family, script: list[list[Any]], **options: Any) -> Run:
    """Run an engine with the tiny checkpoint of a family."""
    part = build_family(directory / "part", family)
    model = build_outer(part, directory / "model", family)
    common = {"layer_ids": LAYER_IDS, "max_num_batched_tokens": CHUNK, **family.engine}
    return replace(run_engine(directory / "run", model, script, **common, **options), model=part)


def check(run: Run) -> None:
    """Check the rows of every request."""
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for request in REQUESTS:
        comparison = run.compare(request)
        assert comparison.matches, f"{request}: {comparison}"


@pytest.mark.parametrize("family", families(experts=False))
def test_rows_of_a_family_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    run = serve(tmp_path, family, SCRIPT)
    check(run)
    assert run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 2 * CHUNK


@pytest.mark.parametrize("family", families(experts=True))
def test_rows_are_right_with_tensor_and_expert_parallelism_and_full_graphs(
    family: Family, tmp_path: Path
) -> None:
    run = serve(
        tmp_path,
        family,
        ON_RANKS,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        environ=ENVIRON,
        enforce_eager=False,
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4],
        },
        additional_config=COMPILER,
    )
    check(run)


@pytest.mark.long
@pytest.mark.parametrize("name", ["GLM-4.x", "Mixtral", "GLM-4.7-Flash"])
def test_rows_that_we_collect_are_right_with_sequence_parallelism(
    name: str, tmp_path: Path
) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "environ": FLASHCOMM}
    run = serve(tmp_path, FAMILIES[name], ON_RANKS, **options)
    check(run)


def test_each_family_is_among_the_targets_that_doctor_and_documentation_call_shown() -> None:
    assert {each.architecture for each in FAMILIES.values()} <= set(SHOWN)


def test_families_without_the_interface_of_vllm_are_collected_by_us() -> None:
    # Otherwise the rows above would prove nothing about our collector.
    ours = [
        each.architecture
        for each in FAMILIES.values()
        if recorded_architectures().collected.get(each.architecture) is Collection.OURS
    ]
    assert len(ours) >= (8 if installed_is(">=0.30") else 12)
