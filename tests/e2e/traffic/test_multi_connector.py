"""Inside MultiConnector: files are right, the other connector works, and HMA is as without us."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks
from harness import FIRST_WEIGHTS, run_engine, tokens
from oracle import Oracle, Reference, Served
from session import NOT_EXTRACTED, EngineSession
from tiny_gpt_oss import build_gpt_oss

from vllm_ascend_hsx import find, load
from vllm_ascend_hsx.serve.options import kv_transfer_config

LAYER_IDS = (4, 1, 2)
PROMPT = tokens(300)
INSTRUMENTS = {"importable_mooncake": None}
HANDED_ON = {"max_tokens": 1, "extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}


def multi_config(
    storage: Path, sibling: str = "SiblingConnector", *, first: bool = False
) -> dict[str, Any]:
    """Return --kv-transfer-config with our connector and a sibling, first or last."""
    entry = {
        "kv_connector": sibling,
        "kv_connector_module_path": "sibling_connector",
        "kv_role": "kv_both",
    }
    entries = [kv_transfer_config(storage), entry]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": entries[::-1] if first else entries},
    }


@pytest.fixture(params=[False, True], ids=["sibling last", "sibling first"])
def session(
    request: pytest.FixtureRequest, float32_qwen3: Path, tmp_path: Path
) -> Iterator[EngineSession]:
    config = multi_config(tmp_path / "hidden_states", first=request.param)
    with EngineSession(
        tmp_path,
        float32_qwen3,
        layer_ids=LAYER_IDS,
        dtype="float32",
        kv_transfer_config=config,
        instruments=INSTRUMENTS,
    ) as session:
        yield session


def test_sibling_loads_tokens_only_for_requests_without_extraction(
    session: EngineSession, float32_qwen3: Path
) -> None:
    first = session.add(PROMPT, {"max_tokens": 2}, name="first")
    session.drain()
    assert session.call("reset_prefix_cache")
    again = session.add([*PROMPT, *tokens(20)], {"max_tokens": 2}, name="again")
    session.drain()
    assert session.call("reset_prefix_cache")
    ordinary = session.add(PROMPT, {"max_tokens": 2, **NOT_EXTRACTED}, name="ordinary")
    session.drain()
    assert (first.num_cached_tokens, again.num_cached_tokens, ordinary.num_cached_tokens) == (
        0,
        0,
        256,
    )
    oracle = Oracle(Reference(float32_qwen3, 4, torch.float32), LAYER_IDS)
    for request in (first, again):
        path = find(session.storage, request.id)
        assert request.kv_transfer_params == {"hidden_states_path": str(path), **FIRST_WEIGHTS}
        own = Served(request.id, tuple(request.prompt), request.begun, request.ended)
        assert oracle.verdict(path, own, len(request.prompt), len(request.prompt)) == ""


def test_answer_names_the_file_beside_the_siblings_kv_params(
    session: EngineSession,
) -> None:
    request = session.add(PROMPT, HANDED_ON)
    session.drain()
    path = find(session.storage, request.id)
    assert request.kv_transfer_params == {
        "remote_engine_id": "sibling",
        "hidden_states_path": str(path),
        **FIRST_WEIGHTS,
    }
    assert load(path).token_ids.tolist() == PROMPT


def test_quick_starts_prefill_node_sends_kv_and_names_the_file(
    float32_qwen3: Path, tmp_path: Path
) -> None:
    config = json.loads(blocks("serve.md", "kv-transfer prefill")[0])
    mooncake, ours = config["kv_connector_extra_config"]["connectors"]
    assert mooncake["kv_connector"] == "MooncakeConnectorV1"  # it needs NPUs
    mooncake |= {
        "kv_connector": "SiblingConnector",
        "kv_connector_module_path": "sibling_connector",
    }
    ours["kv_connector_extra_config"]["shared_storage_path"] = str(tmp_path / "hidden_states")
    with EngineSession(
        tmp_path, float32_qwen3, layer_ids=LAYER_IDS, dtype="float32", kv_transfer_config=config
    ) as session:
        request = session.add(PROMPT, HANDED_ON)
        session.drain()
        path = find(session.storage, request.id)
        assert request.kv_transfer_params == {
            "remote_engine_id": "sibling",
            "hidden_states_path": str(path),
            **FIRST_WEIGHTS,
        }
        oracle = Oracle(Reference(float32_qwen3, 4, torch.float32), LAYER_IDS)
        own = Served(request.id, tuple(request.prompt), request.begun, request.ended)
        assert (
            oracle.verdict(
                find(session.storage, request.id), own, len(request.prompt), len(request.prompt)
            )
            == ""
        )


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with two KV cache groups: sliding-window and full attention."""
    return build_gpt_oss(tmp_path_factory.mktemp("models") / "gpt_oss")


@pytest.mark.parametrize(("sibling", "groups"), [("SiblingConnector", 2), ("UnawareConnector", 1)])
def test_hybrid_kv_cache_manager_stays_on_unless_the_sibling_lacks_it(
    tmp_path: Path, gpt_oss: Path, sibling: str, groups: int
) -> None:
    script = [["add", "r", tokens(20), {"max_tokens": 1}], ["drain"]]
    config = multi_config(tmp_path / "hidden_states", sibling)
    run = run_engine(
        tmp_path,
        gpt_oss,
        script,
        kv_transfer_config=config,
        instruments=INSTRUMENTS,
        num_gpu_blocks_override=16,
    )
    assert run.error is None, run.error
    assert len(run.result["kv_groups"]) == groups
    assert ("Turning off hybrid kv cache manager" in run.log) == (groups == 1)
    assert load(run.path("r")).token_ids.tolist() == tokens(20)


RECOMPUTES = {"additional_config": {"recompute_scheduler_enable": True}}


def test_decode_node_with_vllm_ascends_scheduler_names_the_failed_open(
    tmp_path: Path, float32_qwen3: Path
) -> None:
    config = {**multi_config(tmp_path / "hidden_states"), "kv_role": "kv_consumer"}
    options = {
        "layer_ids": LAYER_IDS,
        "dtype": "float32",
        "kv_transfer_config": config,
        "instruments": INSTRUMENTS,
    }
    with EngineSession(tmp_path, float32_qwen3, **options, **RECOMPUTES) as session:
        right = session.add(PROMPT, {"max_tokens": 2}, name="right")
        session.drain()
        shutil.rmtree(session.storage)
        failed = session.add(tokens(30), {"max_tokens": 1}, name="failed")  # in one step
        session.drain()
    assert "AsyncRecomputeScheduler" in session.log
    assert right.kv_transfer_params == {
        "hidden_states_path": str(session.paths(right)[0]),
        **FIRST_WEIGHTS,
    }
    assert "ENOENT" in failed.kv_transfer_params["hidden_states_error"]
