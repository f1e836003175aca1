"""An engine that puts rows into a Mooncake store: right for our reader and for speculators'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from harness import tokens
from hs_connectors.mooncake_store import (
    MooncakeHiddenStatesStore,
    MooncakeIntegrityError,
    MooncakeStoreConfig,
)
from hs_connectors.transfer import MooncakeTransfer
from launch import START_SECONDS, tiny_server
from mooncake_master import MooncakeMaster, require_mooncake
from oracle import EXACT, Reference
from session import WITH_OUTPUT, EngineSession, Request

from vllm_ascend_hsx.demo.reference import compare, reference_hidden_states
from vllm_ascend_hsx.protocol.mooncake.manifest import handle_of
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeClient, MooncakeOptions
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED

LAYER_IDS = (3, 0, 4)
ARENA = 1 << 20  # four chunks: space for four small requests at a time
CHOOSES = {"extra_args": {"kv_transfer_params": {"hidden_states_path": "chosen.safetensors"}}}


def start(
    directory: Path,
    model: Path,
    master: MooncakeMaster,
    segment: int | str = "64MiB",
    patience: float = 30,
) -> EngineSession:
    store = {
        "master_server_address": master.address,
        "global_segment_size": segment,
        "local_buffer_size": ARENA,
    }
    options = {
        "sink": "mooncake",
        "mooncake": store,
        "shared_storage_path": None,
        "storage_timeout_s": patience,
    }
    return EngineSession(
        directory, model, layer_ids=LAYER_IDS, dtype="float32", connector_options=options
    )


@contextmanager
def holding_memory(master: MooncakeMaster) -> Iterator[None]:
    """Give the store memory, as another client."""
    options = MooncakeOptions(master_server_address=master.address)
    with closing(MooncakeClient(options, segment=64 << 20)):
        yield


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    require_mooncake()
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def session(
    master: MooncakeMaster, float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineSession]:
    with start(tmp_path_factory.mktemp("engine"), float32_qwen3, master) as session:
        yield session


@pytest.fixture(scope="module")
def reader(master: MooncakeMaster) -> Iterator[MooncakeReader]:
    with MooncakeReader(master.address) as reader:
        yield reader


@pytest.fixture(scope="module")
def transfer(master: MooncakeMaster) -> Iterator[MooncakeTransfer]:
    """speculators' reader."""
    transfer = MooncakeTransfer(
        MooncakeHiddenStatesStore(
            MooncakeStoreConfig("127.0.0.1", "P2PHANDSHAKE", master.address, 0, 16 << 20)
        )
    )
    transfer.setup()
    yield transfer
    transfer.store._store.close()


@pytest.fixture(scope="module")
def reference(float32_qwen3: Path) -> Reference:
    return Reference(float32_qwen3, 4, torch.float32)


def answer(request: Request) -> dict[str, Any]:
    assert request.finished and request.kv_transfer_params is not None
    return request.kv_transfer_params


def is_right(found: dict[str, Any], expected: list[int], reference: Reference) -> bool:
    """Return True if these are the rows of a sequence."""
    assert found["token_ids"].tolist() == expected
    rows = reference.rows(expected, LAYER_IDS)
    assert found["hidden_states"].shape == rows.shape
    return bool((found["hidden_states"].to(rows.dtype) - rows).abs().max() <= EXACT)


def test_both_readers_get_the_rows_of_the_request(
    session: EngineSession, reader: MooncakeReader, transfer: MooncakeTransfer, reference: Reference
) -> None:
    prompts = [session.add(tokens(length, seed=length), {"max_tokens": 1}) for length in (1, 7, 64)]
    session.settle()
    prompts.append(session.add(tokens(150), {"max_tokens": 1}))
    session.settle()
    with_output = session.add(tokens(20), {"max_tokens": 6, **WITH_OUTPUT})
    session.settle()
    for request in (*prompts, with_output):
        expected = request.sequence()[:-1]
        states = reader.load(answer(request), 60)
        assert is_right(states._asdict(), expected, reference)
        assert (states.layer_ids, states.num_prompt_tokens) == (
            list(LAYER_IDS),
            len(request.prompt),
        )
        assert states.metadata["request_id"] == request.internal_id
        theirs = transfer.get_generated(answer(request))
        assert theirs is not None
        assert is_right(theirs, expected, reference)
        reader.remove(answer(request))
    assert [answer(each)["metadata"]["extract_mode"] for each in (prompts[0], with_output)] == [
        "prompt_only",
        "all",
    ]
    assert not session.storage.exists()


def test_an_aborted_request_leaves_nothing(session: EngineSession, reader: MooncakeReader) -> None:
    aborted = session.add(tokens(30), {"max_tokens": 50, **WITH_OUTPUT})
    session.step(3)
    session.abort(aborted)
    session.settle()
    with pytest.raises(TimeoutError):
        reader.load(handle_of(aborted.internal_id), 0)


def test_request_without_store_memory_fails_alone_with_a_reason_for_both_readers(
    session: EngineSession, reader: MooncakeReader, transfer: MooncakeTransfer, reference: Reference
) -> None:
    requests = [
        session.add(tokens(9, seed=seed), {"max_tokens": 5, **WITH_OUTPUT}) for seed in range(5)
    ]
    session.settle()
    reason = r"mooncake\.local_buffer_size=1048576"
    failed = [request for request in requests if "hidden_states_error" in answer(request)]
    assert len(failed) == 1
    for request in requests:
        assert len(request.tokens) == 5
        if request in failed:
            with pytest.raises(HiddenStatesError, match=reason):
                reader.load(answer(request), 60)
            with pytest.raises(MooncakeIntegrityError, match=reason):
                transfer.get_generated(answer(request))
        else:
            assert is_right(
                reader.load(answer(request), 60)._asdict(), request.sequence()[:-1], reference
            )


def test_file_path_is_refused_with_a_mooncake_store(session: EngineSession) -> None:
    request = session.add(tokens(5), {"max_tokens": 1, **CHOOSES})
    session.settle()
    assert (
        "this server writes no files: it puts hidden states into a Mooncake store"
        in answer(request)["hidden_states_error"]
    )
    assert len(request.tokens) == 1


def test_requests_in_flight_at_a_stop_name_the_stop(float32_qwen3: Path, tmp_path: Path) -> None:
    require_mooncake()
    with (
        MooncakeMaster(tmp_path) as own,
        holding_memory(own),
        MooncakeReader(own.address) as reader,
    ):
        # The server gives the store no memory: a client that stays keeps the last writes.
        with start(tmp_path / "engine", float32_qwen3, own, segment=0) as session:
            under_way = session.add(tokens(30), {"max_tokens": 50, **WITH_OUTPUT})
            session.step(3)
        with pytest.raises(HiddenStatesError, match=SERVER_STOPPED):
            reader.load(handle_of(under_way.internal_id), 60)


def test_engine_survives_a_hanging_or_dead_master_and_names_the_problem(
    float32_qwen3: Path, tmp_path: Path, reference: Reference
) -> None:
    require_mooncake()
    with (
        MooncakeMaster(tmp_path) as own,
        start(tmp_path / "engine", float32_qwen3, own, patience=1) as session,
    ):
        own.pause()
        held_up = session.add(tokens(9), {"max_tokens": 2})
        session.drain()
        assert len(held_up.tokens) == 2
        assert "the storage did not answer for 1 s" in answer(held_up)["hidden_states_error"]
        own.go_on()
        session.settle()
        under_way = session.add(tokens(30), {"max_tokens": 4, **WITH_OUTPUT})
        session.step(2)
        own.kill()
        later = session.add(tokens(5), {"max_tokens": 2})
        session.settle()
        assert (len(under_way.tokens), len(later.tokens)) == (4, 2)
        # Whichever is noticed first: a broken connection, or a second without an answer.
        reasons = (
            "mooncake_master does not answer: check that it is running",
            "the storage did not answer for 1 s",
        )
        assert any(reason in answer(later)["hidden_states_error"] for reason in reasons)
        # Restarted on the same port; servers rejoin, with their memory, within seconds.
        with own, MooncakeReader(own.address) as reader:
            for _ in range(60):
                request = session.add(tokens(7), {"max_tokens": 1})
                session.settle()
                with suppress(HiddenStatesError, TimeoutError):
                    assert is_right(
                        reader.load(answer(request), 1)._asdict(), request.prompt, reference
                    )
                    break
            else:
                raise AssertionError(f"the server has not joined the new master: {answer(request)}")


def test_http_answer_leads_to_the_rows_on_any_rank(
    tiny_minimax_m2: Path, master: MooncakeMaster, reader: MooncakeReader, tmp_path: Path
) -> None:
    """TP=2: each worker has a part of the store, and some of the requests."""
    store = {
        "master_server_address": master.address,
        "global_segment_size": "64MiB",
        "local_buffer_size": "4MiB",
    }
    connector = {"sink": "mooncake", "mooncake": store, "shared_storage_path": None}
    options = {"tensor_parallel": 2, "connector": connector}
    with tiny_server(tmp_path, tiny_minimax_m2, LAYER_IDS, **options) as server:
        server.wait_ready(START_SECONDS)
        for length in (5, 40, 130, 3):
            prompt = tokens(length)
            body = {
                "model": str(tiny_minimax_m2),
                "prompt": prompt,
                "max_tokens": 2,
                "temperature": 0,
            }
            response = (
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
                .raise_for_status()
                .json()
            )
            states = reader.load(response["kv_transfer_params"], 60)
            assert states.token_ids.tolist() == prompt
            comparison = compare(
                states.hidden_states, reference_hidden_states(tiny_minimax_m2, prompt, LAYER_IDS)
            )
            assert comparison.matches, comparison
