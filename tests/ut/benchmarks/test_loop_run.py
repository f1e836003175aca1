"""Steps of the loop: results are kept, and errors name the step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.loop import drafts, run
from benchmarks.loop.corpus import stories
from benchmarks.loop.drafts import EAGLE3
from benchmarks.loop.results import OURS, VLLMS, Kind, Trained
from benchmarks.loop.rows import SHIFTED, write_rows
from benchmarks.loop.run import KINDS, Loop, Sizes
from benchmarks.loop.target import LAYER_IDS, Target
from vllm_ascend_hsx.demo import DemoError, server
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.protocol.errors import UserError

SMALL = Sizes(target_steps=1, stories=12, epochs=1, held_out=2)


class Faked(Loop):
    """A loop without servers and trainers; `trained` and `extracted` record the calls."""

    trained: list[tuple[Kind, int]]
    extracted: list[tuple[Target, dict[str, str]]]

    def extract_with_vllms(self, target: Target, rows: Path) -> None:
        self.generate(target, rows, **{VLLMS: ""})

    def generate(self, target: Target, rows: Path, **options: str) -> None:
        self.extracted.append((target, options))
        rows.mkdir()
        for index, token_ids in enumerate(self.stories):
            write_rows(
                rows, index, torch.rand(len(token_ids), len(LAYER_IDS), 8), torch.tensor(token_ids)
            )

    def draft(self, kind: Kind, rows: Path, seed: int) -> Trained:
        assert len(list(rows.glob("hs_*.safetensors"))) == SMALL.stories
        self.trained.append((kind, seed))
        return Trained(*kind, seed, 1.0, 1.0, 10, 30, 5 if kind.rows == SHIFTED else 20)


@pytest.fixture
def console() -> Console:
    return Console(width=200)


def loop(work: Path, console: Console, seeds: Sequence[int]) -> Faked:
    plan = [(kind, seed) for seed in seeds for kind in KINDS]
    made = Faked(work, console, lambda npus: {}, 1.0, 1.0, plan, SMALL)
    made.trained, made.extracted = [], []
    return made


def test_each_kind_gets_a_draft_and_another_call_trains_only_missing_drafts(
    tmp_path: Path, console: Console
) -> None:
    first = loop(tmp_path, console, [0])
    assert first.run().problems() == []
    assert first.trained == [(kind, 0) for kind in KINDS]
    second = loop(tmp_path, console, [0, 1])
    assert second.run().lengths(Kind(EAGLE3, OURS)) == [3.0, 3.0]
    assert second.trained == [(kind, 1) for kind in KINDS]


def test_rows_of_each_kind_come_from_the_target_that_serves_the_draft(
    tmp_path: Path, console: Console
) -> None:
    made = loop(tmp_path, console, [])
    made.plan = run.plan_of(2)
    results = made.run()
    assert set(results.kinds) == {*KINDS, *run.MORE_KINDS, *run.ONCE_KINDS}
    assert {kind.method for kind in results.kinds} == set(drafts.OPTIONS)
    plain, rotated = Target(tmp_path / "target"), Target(tmp_path / "target-quarot", quantised=True)
    assert made.extracted == [
        (plain, {}),
        (rotated, {}),
        (rotated, {"rotation": "keep"}),
        (plain, {VLLMS: ""}),
    ]
    directories = {kind: made.rows(kind.target, kind.rows) for kind in results.kinds}
    assert len(set(directories.values())) == len(
        {(kind.target, kind.rows) for kind in results.kinds}
    )


def test_interrupted_rows_are_computed_again(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(directory: Path, *_: Any) -> None:
        directory.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "rows_of_transformers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop(tmp_path, console, [0]).run()
    assert loop(tmp_path, console, [0]).run().kinds == list(KINDS)


def test_directory_with_other_sizes_is_refused(tmp_path: Path, console: Console) -> None:
    loop(tmp_path, console, [0]).run()
    other = loop(tmp_path, console, [0])
    other.sizes = Sizes(target_steps=2, stories=12, epochs=1, held_out=2)
    with pytest.raises(UserError, match="has results with the sizes"):
        other.run()


def test_draft_of_the_best_epoch_is_served(tmp_path: Path) -> None:
    """speculators writes the validation loss of an epoch only if no earlier epoch was better."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "0" / "val_metrics.json").write_text('{"loss_epoch": 0.5}')
    (tmp_path / "checkpoint_best").symlink_to("0")
    assert drafts.checkpoint(tmp_path).resolve() == tmp_path / "0"
    assert drafts.validation_loss(drafts.checkpoint(tmp_path)) == 0.5


def test_epoch_is_finished_once_the_checkpoint_is_written(tmp_path: Path) -> None:
    for name in ("0", "1", "2"):
        (tmp_path / name).mkdir()
    for name in ("0", "1"):
        (tmp_path / name / "training_state.json").touch()
    (tmp_path / "checkpoint_best").symlink_to("0")
    assert drafts.finished_epochs(tmp_path) == 2


def test_failed_command_is_named_with_the_end_of_the_output(
    tmp_path: Path, console: Console
) -> None:
    made = loop(tmp_path, console, [0])
    made.started = made.shown_at = 0.0
    with pytest.raises(
        DemoError,
        match=r"(?s)training: exit code 3\nthe last lines of .*train\.log:.*\nno such layer",
    ):
        made.process(
            [sys.executable, "-c", "print('no such layer'); raise SystemExit(3)"],
            "train",
            {},
            "training",
            lambda: "",
        )


def test_command_that_ignores_sigterm_is_killed(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer once hung after SIGTERM, and the loop waited for it."""
    monkeypatch.setattr(server, "STOP_SECONDS", 0.1)
    made = loop(tmp_path, console, [0])
    made.started = made.shown_at = 0.0
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )

    def interrupted() -> str:
        if (tmp_path / "train.log").read_text().count("\n") > 1:
            raise KeyboardInterrupt
        return ""

    with pytest.raises(KeyboardInterrupt):
        made.process([sys.executable, "-c", deaf], "train", {}, "training", interrupted)
    pid = int((tmp_path / "train.log").read_text().split()[-1])
    assert server.group_members(pid) == []


def test_dataset_is_readable_by_hsx_and_speculators(tmp_path: Path) -> None:
    from datasets import load_from_disk

    dataset = stories(4, seed=0)
    drafts.write_dataset(tmp_path / "dataset", dataset)
    rows = list(
        open_dataset(Options(str(tmp_path / "dataset"), tmp_path)).records(lambda index: True)
    )
    assert [list(row.content) for row in rows] == dataset  # type: ignore[union-attr]
    theirs = load_from_disk(str(tmp_path / "dataset"))
    assert [
        torch.equal(theirs[n]["input_ids"], torch.tensor(row)) for n, row in enumerate(dataset)
    ] == [True] * 4
    assert theirs[0]["loss_mask"].sum() == len(dataset[0])


def test_draft_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="wrote no checkpoint"):
        drafts.checkpoint(tmp_path)
