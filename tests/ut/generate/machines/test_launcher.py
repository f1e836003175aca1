"""Rank and world size of `hsx generate` come from a launcher unless they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from generate_bench import Bench

from vllm_ascend_hsx.generate.machines.launcher import LAUNCHERS, Place, place_of
from vllm_ascend_hsx.generate.options import RANK_ROWS
from vllm_ascend_hsx.protocol.errors import UserError

STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
INDEXED = {"JOB_COMPLETION_INDEX": "3"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}

PLACES: dict[str, tuple[Mapping[str, str], int | None, int | None, Place]] = {
    "alone": ({}, None, None, Place()),
    "srun": (STEP, None, None, Place(8, 3, "SLURM_PROCID, SLURM_STEP_NUM_TASKS")),
    "srun-of-an-earlier-slurm": ({**STEP, "SLURM_STEP_NUM_TASKS": ""}, None, None, Place(8, 3, "SLURM_PROCID, SLURM_NTASKS")),
    "the-shell-of-salloc": ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, None,
                            Place(1, 0, "SLURM_PROCID, SLURM_STEP_NUM_TASKS")),
    "a-script-of-sbatch-runs-once": (BATCH, None, None, Place()),
    "kubernetes": (INDEXED, 8, None, Place(8, 3, "JOB_COMPLETION_INDEX")),
    "kubernetes-with-a-variable": ({**INDEXED, "WORLD_SIZE": "8"}, None, None, Place(8, 3, "JOB_COMPLETION_INDEX, WORLD_SIZE")),
    "torchrun": (TORCHRUN, None, None, Place(8, 3, "RANK, WORLD_SIZE")),
    "torchrun-in-srun-with-one-process-each": ({**STEP, **TORCHRUN}, None, None, Place(8, 3, "SLURM_PROCID, SLURM_STEP_NUM_TASKS")),
    "torchrun-in-an-indexed-job": ({**INDEXED, **TORCHRUN}, None, None, Place(8, 3, "JOB_COMPLETION_INDEX, WORLD_SIZE")),
    "given": (STEP, 2, 1, Place(2, 1)),
    "given-contradictions-do-not-matter": ({**STEP, **TORCHRUN, "RANK": "9", "WORLD_SIZE": "x"}, 2, 1, Place(2, 1)),
    "world-size-given": (STEP, 4, None, Place(4, 3, "SLURM_PROCID")),
    "rank-given": (STEP, None, 1, Place(8, 1, "SLURM_STEP_NUM_TASKS")),
    "world-size-given-to-nobody-in-particular": ({}, 4, None, Place(4, 0)),
    "a-size-without-a-rank-says-nothing": ({"WORLD_SIZE": "8"}, None, None, Place()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "world_size", "rank", "place"), PLACES.values(), ids=PLACES
)
def test_rank_and_world_size_come_from_options_or_launcher(
    environment: Mapping[str, str], world_size: int | None, rank: int | None, place: Place
) -> None:
    assert place_of(world_size, rank, environment) == place


REFUSED: dict[str, tuple[Mapping[str, str], int | None, int | None, str]] = {
    "two-ranks": (
        {**STEP, **TORCHRUN, "RANK": "2"},
        None,
        None,
        "SLURM_PROCID=3 contradicts RANK=2: two launchers started this process.",
    ),
    "two-sizes": (
        {**STEP, **TORCHRUN, "WORLD_SIZE": "16"},
        None,
        None,
        "SLURM_STEP_NUM_TASKS=8 contradicts WORLD_SIZE=16: two",
    ),
    "two-ranks-of-a-given-size": (
        {**INDEXED, "RANK": "2"},
        8,
        None,
        "JOB_COMPLETION_INDEX=3 contradicts RANK=2",
    ),
    "kubernetes-tells-no-size": (
        INDEXED,
        None,
        None,
        "JOB_COMPLETION_INDEX='3' is the rank of this process, but WORLD_SIZE is not set",
    ),
    "rank-alone": (
        {"RANK": "1"},
        None,
        None,
        "RANK='1' is the rank of this process, but WORLD_SIZE is not set. Give",
    ),
    "no-number": (
        {**TORCHRUN, "RANK": "x"},
        None,
        None,
        "RANK='x' is not a whole number from 0 to 999999. Give --world-size and --rank",
    ),
    "no-size": (
        {**TORCHRUN, "WORLD_SIZE": "0"},
        None,
        None,
        "WORLD_SIZE='0' is not a whole number from 1 to 1000000.",
    ),
    "digits-without-end": ({**TORCHRUN, "RANK": "9" * 5000}, None, None, "is not a whole number"),
    "more-processes-than-given": (
        STEP,
        2,
        None,
        "SLURM_PROCID=3 is not below the world size, 2. Start --world-size processes",
    ),
    "a-given-rank-too-high": (STEP, None, 8, "--rank=8 is not below the world size, 8."),
}


@pytest.mark.parametrize(
    ("environment", "world_size", "rank", "problem"), REFUSED.values(), ids=REFUSED
)
def test_invalid_rank_or_world_size_is_refused(
    environment: Mapping[str, str], world_size: int | None, rank: int | None, problem: str
) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        place_of(world_size, rank, environment)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in LAUNCHERS:
        for name in (launcher.rank, launcher.marker, *launcher.world_size):
            if name is not None:
                monkeypatch.delenv(name, raising=False)


def test_run_reports_its_rank_first_and_does_its_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    code, printed = bench.run(records=2 * RANK_ROWS + 1)
    assert code == 0, printed
    assert (
        0
        <= printed.find("rank 1 of 2 (SLURM_PROCID, SLURM_STEP_NUM_TASKS)")
        < printed.index("data.jsonl: ")
    ), printed
    assert bench.rows == list(range(RANK_ROWS, 2 * RANK_ROWS))
    assert (bench.output / "ledger-1-of-2.jsonl").exists()


def test_contradicting_launchers_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STEP, **TORCHRUN, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code, printed = bench.run()
    assert code == 2 and printed.startswith("hsx generate: SLURM_PROCID=3 contradicts RANK=0"), (
        printed
    )
    assert not bench.server.seen
