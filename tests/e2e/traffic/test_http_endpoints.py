"""Over HTTP: beam search, limits, and endpoints other than /v1/completions and chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import FIRST_WEIGHTS, names_in
from http_client import (
    CHAT,
    COMPLETIONS,
    MAX_FILES,
    MESSAGES,
    PROMPTS,
    SAMPLED,
    Case,
    Client,
    start_client,
)

import vllm_ascend_hsx
from vllm_ascend_hsx.compat.request_params import NOT_EXTRACTED


@pytest.fixture(scope="module")
def client(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with start_client(tmp_path_factory.mktemp("http"), float32_qwen3) as client:
        yield client


@pytest.fixture(scope="module")
def chat_prompt(client: Client) -> list[int]:
    """Return the tokens of MESSAGES."""
    answer = client.send(Case(CHAT, {"messages": MESSAGES}, (0, 0)))
    vllm_ascend_hsx.load(path := client.find(answer, 0, 0), timeout=60)
    vllm_ascend_hsx.remove(path)
    return answer.prompts[0]


BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 5}


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (None, True),
        ({"hidden_states": False}, False),
        ({"hidden_states_path": "beam.safetensors"}, True),
    ],
    ids=["silent", "opted out", "with a name"],
)
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [(COMPLETIONS, {"prompt": PROMPTS[1]}), (CHAT, {"messages": MESSAGES})],
    ids=["completion", "chat"],
)
def test_a_beam_search_leaves_no_file_and_says_so_to_whoever_wanted_one(
    client: Client, endpoint: str, body: dict[str, Any], params: dict[str, Any] | None, told: bool
) -> None:
    before = names_in(client.storage)
    answer = client.send(
        Case(
            endpoint, {**body, **BEAMS, **({"kv_transfer_params": params} if params else {})}, None
        )
    )
    assert len(answer.texts) == 3
    assert names_in(client.storage) == before
    assert answer.params == ({"hidden_states_error": NOT_EXTRACTED} if told else None)


@pytest.mark.parametrize(
    ("many", "what"),
    [({"prompt": [[7]] * 9}, "prompts"), ({"prompt": [7], "n": 9, **SAMPLED}, "samples")],
    ids=["prompts", "samples"],
)
def test_an_api_request_makes_so_many_files_and_no_more(
    client: Client, many: dict[str, Any], what: str
) -> None:
    answer = client.send(Case(COMPLETIONS, many, None))
    assert len(answer.texts) == 9
    found = []
    for index in range(9):
        with suppress(FileNotFoundError):
            found.append(client.find(answer, *((index, 0) if "n" not in many else (0, index))))
    assert len(found) == MAX_FILES
    assert answer.params is not None
    refused = rf"{9 - MAX_FILES} of 9 {what} \(first: \d\): .*max_files_per_request;.*"
    assert re.fullmatch(refused, answer.params["hidden_states_error"])
    if what == "prompts":
        assert answer.params["hidden_states_path"] == str(found[0])
    lines = [
        line
        for line in client.server.log.read_text(errors="replace").splitlines()
        if "is not extracted: this API request" in line
    ]
    assert lines and all(
        "kv_connector_extra_config.max_files_per_request" in line for line in lines
    )
    for path in found:
        assert vllm_ascend_hsx.load(path, timeout=60).token_ids.tolist() == [7]
        vllm_ascend_hsx.remove(path)


TURN = {"input": MESSAGES, "max_output_tokens": 4}
MESSAGE = {"messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize("extract", [True, False], ids=["extracted", "opted out"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("endpoint", "body", "request_id"),
    [
        ("responses", TURN, None),
        ("responses", TURN, "../turn 7"),
        ("messages", MESSAGE, None),
        ("messages", MESSAGE, "turn_8"),
    ],
    ids=["responses", "responses-named-by-the-client", "messages", "messages-named-by-the-client"],
)
def test_responses_and_messages_have_their_files(
    client: Client,
    chat_prompt: list[int],
    endpoint: str,
    body: dict[str, Any],
    request_id: str | None,
    stream: bool,
    extract: bool,
) -> None:
    body = {
        "model": str(client.model),
        **body,
        "stream": stream,
        "kv_transfer_params": {"hidden_states": extract},
    }
    body |= {"request_id": request_id} if request_id and endpoint == "responses" else {}
    headers = {"X-Request-Id": request_id} if request_id and endpoint == "messages" else {}
    response = httpx.post(
        f"{client.server.url}/v1/{endpoint}", json=body, headers=headers, timeout=120
    ).raise_for_status()
    if stream:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        (response_id,) = {
            event[key]["id"] for event in events for key in ("response", "message") if key in event
        }
    else:
        response_id = response.json()["id"]
    if not extract:
        with pytest.raises(FileNotFoundError):
            vllm_ascend_hsx.find(client.storage, response_id)
        return
    path = vllm_ascend_hsx.find(client.storage, response_id)
    if not stream:
        assert response.json()["kv_transfer_params"] == {
            "hidden_states_path": str(path),
            **FIRST_WEIGHTS,
        }
    assert client.verdict(path, chat_prompt) == ""
    assert vllm_ascend_hsx.load(path, response_id=response_id).token_ids.tolist() == chat_prompt
    vllm_ascend_hsx.remove(path)


@pytest.mark.parametrize("extract", [True, False], ids=["extracted", "opted out"])
def test_each_conversation_of_a_batch_has_its_file(
    client: Client, chat_prompt: list[int], extract: bool
) -> None:
    body = {
        "model": str(client.model),
        "messages": [MESSAGES, MESSAGES],
        "max_tokens": 2,
        "kv_transfer_params": {"hidden_states": extract},
    }
    response = (
        httpx.post(f"{client.server.url}/v1/{CHAT}/batch", json=body, timeout=120)
        .raise_for_status()
        .json()
    )
    for number in range(2):
        if extract:
            path = vllm_ascend_hsx.find(client.storage, response["id"], prompt=number)
            assert vllm_ascend_hsx.load(path, timeout=60).token_ids.tolist() == chat_prompt
            vllm_ascend_hsx.remove(path)
        else:
            with pytest.raises(FileNotFoundError):
                vllm_ascend_hsx.find(client.storage, response["id"], prompt=number)


def test_a_batch_may_choose_no_file_for_its_conversations(
    client: Client, chat_prompt: list[int]
) -> None:
    body = {
        "model": str(client.model),
        "messages": [MESSAGES, MESSAGES],
        "kv_transfer_params": {"hidden_states_path": "batch.safetensors"},
    }
    response = httpx.post(f"{client.server.url}/v1/{CHAT}/batch", json=body, timeout=120)
    assert response.status_code == 400
    assert (
        "names one file, and the first prompt and sample of the request uses it"
        in response.json()["error"]["message"]
    )


REFUSED = {"hidden_states_path": "x.safetensors"}
PARAMS = [
    (None, True),
    ({"hidden_states": True}, True),
    ({"hidden_states": False}, False),
    (REFUSED, False),
]


@pytest.mark.parametrize(("params", "extracted"), PARAMS, ids=str)
def test_tokens_that_are_sent_to_be_continued_have_a_file_unless_their_client_opts_out(
    client: Client, params: dict[str, Any] | None, extracted: bool
) -> None:
    body = {
        "token_ids": PROMPTS[1],
        "sampling_params": {"max_tokens": 2},
        "kv_transfer_params": params,
        "request_id": "tokens",
    }
    answer = (
        httpx.post(f"{client.server.url}/inference/v1/generate", json=body, timeout=120)
        .raise_for_status()
        .json()
    )
    assert len(answer["choices"][0]["token_ids"]) == 2
    if extracted:
        path = vllm_ascend_hsx.find(client.storage, "generate-tokens-tokens")
        assert answer["kv_transfer_params"] == {"hidden_states_path": str(path), **FIRST_WEIGHTS}
        assert client.verdict(path, PROMPTS[1]) == ""
        vllm_ascend_hsx.remove(path)
        return
    assert list(answer["kv_transfer_params"] or {}) == (
        ["hidden_states_error"] if params == REFUSED else []
    )
    with pytest.raises(FileNotFoundError):
        vllm_ascend_hsx.find(client.storage, "generate-tokens-tokens")


@pytest.mark.parametrize(("params", "extracted"), PARAMS, ids=str)
def test_items_that_are_scored_have_a_file_each_up_to_the_limit_unless_their_client_opts_out(
    client: Client, params: dict[str, Any] | None, extracted: bool
) -> None:
    said = {} if params is None else {"kv_transfer_params": params}
    items = [[8 + item] for item in range(MAX_FILES + 3)]
    body = {"query": PROMPTS[0], "items": items, "label_token_ids": [7, 9], **said}
    answer = (
        httpx.post(f"{client.server.url}/generative_scoring", json=body, timeout=120)
        .raise_for_status()
        .json()
    )
    assert len(answer["data"]) == len(items)
    found = {}
    for number in range(len(items)):
        with suppress(FileNotFoundError):
            found[number] = vllm_ascend_hsx.find(client.storage, answer["id"], prompt=number)
    assert len(found) == (MAX_FILES if extracted else 0)
    for number, path in found.items():
        assert (
            vllm_ascend_hsx.load(path, timeout=60, response_id=answer["id"]).token_ids.tolist()
            == PROMPTS[0] + items[number]
        )
        vllm_ascend_hsx.remove(path)


def test_all_files_were_found(client: Client, chat_prompt: list[int]) -> None:
    """Last in this file: the tests above have removed each file that they found."""
    assert names_in(client.storage) == set()
