"""A server that samples live traffic within a budget: rows are right, others cost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import compare_file, tokens
from launch import START_SECONDS, tiny_server
from releases import installed_is
from session import EngineSession, Request
from test_metrics import growth, scrape_all

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.protocol.api import ServerParams, read_params

RATE = 0.3
ROW_BYTES = 3 * 256 * 4
BUDGET = 6 * 150 * ROW_BYTES  # six files of 150 rows have more, with their headers


SERVER = ServerParams(None, extract_all=False, sample_rate=RATE)


def params(**values: Any) -> dict[str, Any]:
    return {"max_tokens": 3, "extra_args": {"kv_transfer_params": values}}


def is_sampled(request: Request) -> bool:
    given = request.sampling.get("extra_args", {}).get("kv_transfer_params")
    return read_params(given, SERVER, request.internal_id).extract


@pytest.fixture(scope="module")
def session(
    float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineSession]:
    options = {"extract": "sample", "sample_rate": RATE, "directory_budget_bytes": BUDGET}
    with EngineSession(
        tmp_path_factory.mktemp("sample"), float32_qwen3, dtype="float32", connector_options=options
    ) as session:
        if installed_is("<0.30"):
            session.call("record_all_stats")
        yield session


def test_sampled_requests_have_their_rows_and_others_leave_no_trace(session: EngineSession) -> None:
    before, requests = scrape_all(session), []
    for number in range(16):
        key = {"sample_key": f"talk {number // 4}"} if number % 2 else {}
        # The digits that vLLM appends to this id do not matter.
        requests.append(session.add(tokens(5 + 9 * number), params(**key), name=f"cmpl-{number}-0"))
        session.step()
    session.settle()
    sampled = [request for request in requests if is_sampled(request)]
    assert [request.id for request in sampled] == [
        f"cmpl-{number}-0" for number in (2, 8, 10, 12, 13, 14, 15)
    ]
    for request in sampled:
        (path,) = session.paths(request)
        assert (request.kv_transfer_params or {})["hidden_states_path"] == str(path)
        result = compare_file(path, session.model, request.prompt, session.layer_ids)
        assert result.matches, result
        vllm_ascend_hsx.remove(path)
    assert [request for request in requests if request.kv_transfer_params] == sampled
    assert not list(session.storage.glob("*.safetensors*"))
    grown = growth(before, scrape_all(session))
    assert grown["files_total published"] == len(sampled)
    assert (
        grown["published_bytes_total"]
        == sum(len(request.prompt) for request in sampled) * ROW_BYTES
    )


def test_unsampled_requests_read_the_prefix_cache_and_are_in_no_metric(
    session: EngineSession,
) -> None:
    key = next(
        key
        for number in range(99)
        if not read_params({"sample_key": (key := f"user {number}")}, SERVER).extract
    )
    before = scrape_all(session)
    prompt = tokens(300, seed=9)
    first = session.add(prompt, params(sample_key=key), name="first")
    session.drain()
    second = session.add([*prompt, *tokens(9)], params(sample_key=key), name="second")
    session.drain()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 256)
    assert first.kv_transfer_params is second.kv_transfer_params is None
    assert growth(before, scrape_all(session)) == {}


def test_no_request_is_extracted_while_the_directory_is_full_and_the_next_is_after_a_clean(
    session: EngineSession,
) -> None:
    before, requests = scrape_all(session), []
    for number in range(8):
        requests.append(
            session.add(tokens(150, seed=20 + number), params(hidden_states=True), name="wanted")
        )
        session.settle()
    fitting, skipped = requests[:5], requests[5:]
    for request in fitting:
        (path,) = session.paths(request)
        result = compare_file(path, session.model, request.prompt, session.layer_ids)
        assert result.matches, result
    for request in skipped:
        assert request.finished and len(request.tokens) == 3
        error = (request.kv_transfer_params or {})["hidden_states_error"]
        assert error.startswith("the storage directory has no room for a file of up to")
        assert f"of {BUDGET} bytes are used" in error
    grown = growth(before, scrape_all(session))
    assert (grown["files_total published"], grown["failures_total directory_full"]) == (5, 3)
    assert sum(path.stat().st_size for path in session.storage.glob("*.safetensors")) <= BUDGET
    # A request without space reads the prefix cache like one that is not extracted.
    again = session.add(skipped[-1].prompt, params(hidden_states=True), name="again")
    session.settle()
    assert again.num_cached_tokens == 128
    for request in fitting[:2]:
        vllm_ascend_hsx.acknowledge(session.paths(request)[0])
    assert main(["clean", str(session.storage), "--older-than", "0s"]) == 0
    later = [first_with_room(session)]
    for number in range(2):
        later.append(
            session.add(tokens(150, seed=40 + number), params(hidden_states=True), name="later")
        )
        session.settle()
    assert [has_file(request) for request in later] == [True, True, False]
    result = compare_file(
        session.paths(later[0])[0], session.model, later[0].prompt, session.layer_ids
    )
    assert result.matches, result


def has_file(request: Request) -> bool:
    return "hidden_states_path" in (request.kv_transfer_params or {})


def first_with_room(session: EngineSession) -> Request:
    """Send requests until one is extracted: ranks look for removed files at most once a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        request = session.add(tokens(150, seed=30), params(hidden_states=True), name="first")
        session.settle()
        if has_file(request):
            return request
    raise AssertionError("no request has found the room")


@pytest.mark.timeout(600)
def test_each_data_parallel_engine_of_a_dense_target_keeps_its_share(
    float32_qwen3: Path, tmp_path: Path
) -> None:
    """vLLM configures such an engine as the only one."""
    storage = tmp_path / "hidden_states"
    storage.mkdir()
    (storage / "earlier.safetensors").write_bytes(b"x" * (BUDGET // 2))
    options = {
        "data_parallel": 2,
        "expert_parallel": False,
        "connector": {"directory_budget_bytes": BUDGET},
    }
    server = tiny_server(
        tmp_path, float32_qwen3, (1, 2, 4), extra=("--dtype", "float32"), **options
    )
    with server:
        server.wait_ready(START_SECONDS)
        answers: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        for number in range(6):
            engine, prompt = number % 2, tokens(150, seed=number)
            body = {
                "model": str(float32_qwen3),
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 0,
            }
            headers = {"X-data-parallel-rank": str(engine)}
            response = httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=120
            )
            response.raise_for_status()
            answers[engine].append(response.json()["kv_transfer_params"])
            if path := answers[engine][-1].get("hidden_states_path"):
                result = compare_file(Path(path), float32_qwen3, prompt, (1, 2, 4))
                assert result.matches, result
    for found in answers.values():
        assert ["hidden_states_path" in each for each in found] == [True, False, False]
        assert (
            f"of {BUDGET // 2} bytes, the share of this data-parallel rank, are used"
            in found[1]["hidden_states_error"]
        )
