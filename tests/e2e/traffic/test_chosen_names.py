"""Requests that choose their file: below the directory and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import FIRST_WEIGHTS, tokens
from oracle import Oracle, Reference, Served
from session import EngineSession, Request

from vllm_ascend_hsx import load, remove
from vllm_ascend_hsx.sinks.base import NAME_USED

LAYER_IDS = (4, 1, 2)


@pytest.fixture(scope="module")
def session(
    float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineSession]:
    options: dict[str, Any] = {
        "layer_ids": LAYER_IDS,
        "dtype": "float32",
        "connector_options": {"allow_custom_save_path": True},
    }
    with EngineSession(tmp_path_factory.mktemp("chosen"), float32_qwen3, **options) as session:
        yield session


@pytest.fixture(scope="module")
def oracle(float32_qwen3: Path) -> Oracle:
    return Oracle(Reference(float32_qwen3, 4, torch.float32), LAYER_IDS)


def add(session: EngineSession, length: int, path: Any, **sampling: Any) -> Request:
    params = {"hidden_states_path": path}
    return session.add(
        tokens(length), {"max_tokens": 2, "extra_args": {"kv_transfer_params": params}, **sampling}
    )


def verdict(oracle: Oracle, path: Path, request: Request) -> str:
    return oracle.verdict(
        path,
        Served(str(path), tuple(request.prompt), 0, None),
        len(request.prompt),
        len(request.prompt),
    )


def test_file_is_at_the_chosen_path_and_holds_the_requests_rows(
    session: EngineSession, oracle: Oracle
) -> None:
    chosen = {
        "mine.safetensors": 9,
        "train/shard 0/é.safetensors": 70,
        "train/shard 0/b.safetensors": 12,
        f"{session.storage}/absolute/c.safetensors": 30,
    }
    requests = {path: add(session, length, path) for path, length in chosen.items()}
    unnamed = session.add(tokens(11), {"max_tokens": 2})
    session.settle()
    for path, request in requests.items():
        assert request.kv_transfer_params == {
            "hidden_states_path": str(session.storage / path),
            **FIRST_WEIGHTS,
        }
        assert verdict(oracle, session.storage / path, request) == ""
    assert verdict(oracle, Path(unnamed.kv_transfer_params["hidden_states_path"]), unnamed) == ""
    assert not [
        name
        for folder in ("train", "train/shard 0")
        for name in os.listdir(session.storage / folder)
        if name.startswith(".")
    ]


def test_name_is_refused_while_it_is_written_and_until_its_rows_are_removed(
    session: EngineSession, oracle: Oracle
) -> None:
    first, second = (
        add(session, 100, "one/name.safetensors"),
        add(session, 20, "one/name.safetensors"),
    )
    session.settle()
    path = session.storage / "one" / "name.safetensors"
    assert "another request is writing" in second.kv_transfer_params["hidden_states_error"]
    assert "hidden_states_path" not in second.kv_transfer_params
    assert len(second.tokens) == 2
    assert verdict(oracle, path, first) == ""
    third = add(session, 21, "one/name.safetensors")
    session.settle()
    assert third.kv_transfer_params == {
        "hidden_states_path": str(path),
        "hidden_states_error": NAME_USED,
        **FIRST_WEIGHTS,
    }
    assert len(third.tokens) == 2
    assert verdict(oracle, path, first) == ""
    remove(path)
    later = add(session, 22, "one/name.safetensors")
    session.settle()
    assert verdict(oracle, path, later) == ""


def test_the_name_is_given_to_the_first_sample(session: EngineSession, oracle: Oracle) -> None:
    both = add(session, 25, "samples.safetensors", n=2, temperature=1.0, seed=1)
    session.settle()
    assert (
        "the first prompt and sample of the request uses it"
        in both.kv_transfer_params["hidden_states_error"]
    )
    path = session.storage / "samples.safetensors"
    assert verdict(oracle, path, both) == ""
    assert load(path).metadata["request_id"].startswith("0_")


def test_a_planted_link_fails_its_request_and_leads_nowhere(
    session: EngineSession, oracle: Oracle, tmp_path: Path
) -> None:
    (session.storage / "planted").symlink_to(tmp_path)
    (session.storage / "linked.safetensors").symlink_to(tmp_path / "victim")
    through, over = (
        add(session, 13, "planted/a.safetensors"),
        add(session, 14, "linked.safetensors"),
    )
    session.settle()
    assert (
        "a folder in its path cannot be opened: Not a directory"
        in through.kv_transfer_params["hidden_states_error"]
    )
    assert len(through.tokens) == 2
    assert over.kv_transfer_params["hidden_states_error"] == NAME_USED
    assert (session.storage / "linked.safetensors").is_symlink()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"hidden_states_path": "../escaped.safetensors"}, "is not a plain, printable name"),
        ({"hidden_states_path": "/etc/escaped.safetensors"}, "is outside the storage directory"),
        (
            {"hidden_states_path": "../" * 3000 + "etc/passwd"},
            "(9010 characters), which cannot be used",
        ),
        ({"hidden_states_path": ["a.safetensors"]}, "is a list; use a path"),
        (
            {"hidden_states_path": "\ud800.safetensors"},
            "'\\ud800.safetensors', which cannot be used",
        ),
        ("not an object", "kv_transfer_params is 'not an object'; use an object"),
    ],
    ids=ascii,
)
def test_invalid_path_is_refused_but_the_request_generates(
    session: EngineSession, params: Any, words: str
) -> None:
    refused = session.add(
        tokens(17), {"max_tokens": 3, "extra_args": {"kv_transfer_params": params}}
    )
    plain = session.add(
        tokens(17),
        {"max_tokens": 3, "extra_args": {"kv_transfer_params": {"hidden_states": False}}},
    )
    session.settle()
    assert words in refused.kv_transfer_params["hidden_states_error"]
    assert refused.tokens == plain.tokens
    assert not list(session.storage.parent.glob("escaped*"))
