"""Errors of the storage on a running engine: only one request fails, with the reason."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from errno import ENOENT, ENOTEMPTY
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tokens
from oracle import Reference
from session import EngineSession
from stage import Stage

from vllm_ascend_hsx.reader.load import HiddenStatesError, load

LAYER_IDS = (1, 2, 4)
ROW_BYTES = len(LAYER_IDS) * 256 * 4
CHUNK, BLOCK = 64, 128


@pytest.fixture(scope="module")
def stage(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    options: dict[str, Any] = {
        "max_num_batched_tokens": CHUNK,
        "layer_ids": LAYER_IDS,
        "dtype": "float32",
    }
    with EngineSession(tmp_path_factory.mktemp("faults"), float32_qwen3, **options) as session:
        yield Stage(session, Reference(float32_qwen3, 4, torch.float32))


# File, call, error, and True if the call fails early enough for the response to name the error.
FAULTS = [
    ("data", "reserve", "ENOSPC", True),
    ("data", "reserve", "EDQUOT", True),
    ("data", "pwrite", "ENOSPC", True),
    ("data", "pwrite", "EIO", True),
    ("data", "open", "EMFILE", True),
    ("data", "open", "EACCES", True),
    ("data", "fchmod", "EPERM", True),
    ("lock", "open", "EMFILE", True),
    ("lock", "open", "EROFS", True),
    ("lock", "flock", "ENOLCK", True),
    ("data", "link", "EIO", False),
    ("data", "link", "ENOSPC", False),
    ("data", "close", "EIO", False),
    ("data", "close", "EDQUOT", False),
]


def pattern(name: str, kind: str) -> str:
    """Return a regex of the hidden data file or of the lock, but not of the error file."""
    return rf"{re.escape(name)}\.\d+\b" if kind == "data" else rf"{re.escape(name)}\.lock"


@pytest.mark.parametrize("prompt", [3, CHUNK])
def test_answer_to_a_one_step_prompt_names_the_failed_open(stage: Stage, prompt: int) -> None:
    victim = stage.add(tokens(prompt), name="victim", expect="failed")
    (path,) = stage.session.paths(victim)
    stage.session.call(
        "inject", [{"call": "flock", "errno": "ENOLCK", "name": pattern(path.name, "lock")}]
    )
    stage.drain()
    assert stage.session.call("inject", [])
    assert "ENOLCK" in victim.kv_transfer_params["hidden_states_error"]
    stage.check()


@pytest.mark.parametrize(
    ("kind", "call", "errno", "early"), FAULTS, ids=["-".join(each[:3]) for each in FAULTS]
)
def test_storage_fault_fails_only_its_request(
    stage: Stage, kind: str, call: str, errno: str, early: bool
) -> None:
    prompt = tokens(
        150, seed=FAULTS.index((kind, call, errno, early))
    )  # no other request has rows of this file
    victim = stage.add(prompt, name="victim", expect="failed")
    other = stage.add(tokens(120, seed=1), name="other", max_tokens=4)
    unaware = stage.add(
        tokens(20, seed=2), name="unaware", params={"hidden_states": False}, expect="nothing"
    )
    (path,) = stage.session.paths(victim)
    stage.session.call("inject", [{"call": call, "errno": errno, "name": pattern(path.name, kind)}])
    stage.step()
    stage.session.call(
        "catch_up"
    )  # the first rows' write has failed before the last rows are computed
    stage.session.settle()
    assert stage.session.call("inject", [])
    with pytest.raises(HiddenStatesError, match=errno):
        load(path, 10)
    assert victim.finished
    if early:
        assert errno in victim.kv_transfer_params["hidden_states_error"]
    assert other.finished
    assert unaware.finished
    again = stage.add(prompt, name="again")
    stage.check()
    assert again.finished


@pytest.mark.parametrize("how", ["an error", "truncated by a consumer"])
def test_failed_copy_fails_one_request_and_the_next_request_computes_the_rows(
    stage: Stage, how: str
) -> None:
    prompt = tokens(BLOCK + 20, seed=len(how))
    source = stage.add(prompt, name="source")
    stage.check()
    victim = stage.add([*prompt, *tokens(70)], name="victim", expect="failed")
    other = stage.add(tokens(120, seed=1), name="other", max_tokens=4)
    (path,) = stage.session.paths(victim)
    if how == "an error":
        stage.session.call(
            "inject",
            [{"call": "copy_file_range", "errno": "EIO", "name": pattern(path.name, "data")}],
        )
    else:
        os.truncate(*stage.session.paths(source), BLOCK * ROW_BYTES)
    stage.step()
    stage.session.call("catch_up")
    stage.session.settle()
    assert bool(stage.session.call("inject", [])) == (how == "an error")
    reason = "EIO" if how == "an error" else "the file was truncated: it ends at byte"
    with pytest.raises(
        HiddenStatesError,
        match=rf"rows \[0, 128\) could not be copied from the file of an earlier request: .*{reason}",
    ):
        load(path, 10)
    assert reason in (victim.kv_transfer_params or {})["hidden_states_error"]
    again = stage.add([*prompt, *tokens(70)], name="again")
    stage.check()
    once_more = stage.add([*prompt, *tokens(70)], name="once-more")
    stage.check()
    assert (other.finished, victim.reused, again.reused, once_more.reused) == (
        True,
        BLOCK,
        0,
        BLOCK,
    )


def test_many_faults_at_once_leave_the_others_right(stage: Stage) -> None:
    victims = [
        stage.add(tokens(30 + index, seed=index), name=f"victim{index}", expect="failed")
        for index in range(6)
    ]
    for index in range(6):
        stage.add(tokens(40 + index, seed=10 + index), name=f"other{index}")
    names = [stage.session.paths(victim)[0].name for victim in victims]
    stage.session.call(
        "inject",
        [{"call": "pwrite", "errno": "EIO", "name": pattern(name, "data")} for name in names],
    )
    stage.session.settle()  # the last rows are written after the last answer
    assert len(stage.session.call("inject", [])) >= len(victims)
    stage.check()


def remove(directory: Path) -> None:
    """Remove a directory. Files that the engine creates meanwhile would stop rmtree."""
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTEMPTY):
                raise


def test_requests_fail_while_the_directory_is_missing_and_succeed_after_it_is_back(
    stage: Stage,
) -> None:
    stage.clear()
    under_way = stage.add(tokens(150), name="under-way", expect="nothing")
    stage.step()
    remove(stage.session.storage)
    during = stage.add(tokens(30), name="during", expect="nothing")
    plain = stage.add(
        tokens(20), name="plain", params={"hidden_states": False}, expect="nothing", max_tokens=5
    )
    stage.session.settle()
    assert under_way.finished
    assert plain.finished
    assert "ENOENT" in during.kv_transfer_params["hidden_states_error"]
    stage.session.storage.mkdir()
    stage.clear()
    after = stage.add(tokens(100), name="after")
    stage.settle_in()  # the removed directory stays open for files that might be in progress in it
    assert "hidden_states_error" not in after.kv_transfer_params
    stage.check()


@pytest.mark.parametrize("how", ["a new directory", "a link to another one"])
def test_replaced_directory_fails_requests_in_flight_and_later_ones_use_the_new_one(
    stage: Stage, how: str
) -> None:
    """As after log rotation, or a changed symbolic link."""
    stage.clear()
    storage = stage.session.storage
    params = {"include_output_tokens": True}
    under_way = stage.add(
        tokens(100), name="under-way", params=params, expect="nothing", max_tokens=60
    )
    (path,) = stage.session.paths(under_way)
    stage.until_mid_decode(under_way)
    former = storage.rename(storage.with_name(f"former, {how}"))
    alone = stage.add(tokens(30), name="alone", expect="nothing")
    stage.until(lambda: alone.finished)
    assert not under_way.finished
    assert f"{storage} no longer exists" in alone.kv_transfer_params["hidden_states_error"]
    if how == "a new directory":
        storage.mkdir()
    else:
        storage.with_name("another").mkdir()
        storage.symlink_to(storage.with_name("another"))
    after = stage.add(tokens(100), name="after")
    stage.settle_in()
    stage.check()
    assert "hidden_states_error" not in after.kv_transfer_params
    with pytest.raises(
        HiddenStatesError,
        match="was moved or replaced before all rows were written; send the request again",
    ):
        load(former / path.name, 10)
    left = {each.name for each in former.iterdir() if each.suffix != ".lock"}
    assert left == {f"{path.name}.error"}, "nothing but the reason"
    assert f"{storage} was replaced by another directory" in stage.session.log
