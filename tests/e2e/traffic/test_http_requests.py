"""Over HTTP: answers name their file, and clients find all files by response id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import FIRST_WEIGHTS, names_in
from http_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OUTPUT,
    PROMPTS,
    SAMPLED,
    Answer,
    Case,
    Client,
    start_client,
)

import vllm_ascend_hsx

CASES = {
    "one-prompt": Case(COMPLETIONS, {"prompt": PROMPTS[0]}, (0, 0)),
    "several-prompts": Case(COMPLETIONS, {"prompt": PROMPTS}, (0, 0)),
    "several-samples": Case(
        COMPLETIONS, {"prompt": PROMPTS[1], "n": 3, **SAMPLED, **OUTPUT}, (0, 2)
    ),
    "several-of-both": Case(
        COMPLETIONS, {"prompt": PROMPTS[:2], "n": 2, **SAMPLED, **OUTPUT}, (0, 1)
    ),
    "streamed": Case(COMPLETIONS, {"prompt": PROMPTS[1], "stream": True, **OUTPUT}, None),
    "several-prompts-streamed": Case(COMPLETIONS, {"prompt": PROMPTS, "stream": True}, None),
    "stopped-by-a-string": Case(
        COMPLETIONS, {"prompt": PROMPTS[1], "stop": ["<to be set>"], **OUTPUT}, None
    ),
    "chat": Case(CHAT, {"messages": MESSAGES, **OUTPUT}, (0, 0)),
    "chat-with-several-samples": Case(
        CHAT, {"messages": MESSAGES, "n": 2, **SAMPLED, **OUTPUT}, (0, 1)
    ),
    "chat-streamed": Case(CHAT, {"messages": MESSAGES, "stream": True, **OUTPUT}, None),
    "named-by-the-client": Case(COMPLETIONS, {"prompt": PROMPTS}, (0, 0), "sample-17"),
    "hostile-name": Case(COMPLETIONS, {"prompt": PROMPTS, "stream": True}, None, "a/../../b c~é"),
    "hostile-name-in-the-body": Case(
        COMPLETIONS, {"prompt": PROMPTS[0], "request_id": "../\0/" + "é" * 50}, (0, 0)
    ),
    "chat-named-by-the-client": Case(
        CHAT, {"messages": MESSAGES, "stream": True}, None, "sample-18"
    ),
    "opted-out": Case(
        COMPLETIONS, {"prompt": PROMPTS[0], "kv_transfer_params": {"hidden_states": False}}, None
    ),
}


@pytest.fixture(scope="module")
def client(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with start_client(tmp_path_factory.mktemp("http"), float32_qwen3) as client:
        yield client


@pytest.fixture(scope="module")
def answers(client: Client) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for name, case in CASES.items():
        if "stop" in case.body:
            text = found["streamed"].texts[0]  # of the same prompt, without a stop string
            case.body["stop"] = [text[len(text) // 2 :][:2]]
        found[name] = client.send(case)
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_file_is_found_and_right(
    client: Client, answers: dict[str, Answer], name: str
) -> None:
    case, answer = CASES[name], answers[name]
    if name == "opted-out":
        with pytest.raises(FileNotFoundError):
            client.find(answer, 0, 0)
        return
    paths = {file: client.find(answer, *file) for file in case.files}
    assert len(set(paths.values())) == len(paths)
    for (prompt, sample), path in paths.items():
        token_ids = answer.prompts[prompt]
        rows = len(token_ids)
        if "kv_transfer_params" in case.body:
            generated = answer.samples[prompt * case.body.get("n", 1) + sample]
            if "stop" in case.body:
                # The file also has tokens that the engine generates until the abort reaches it.
                stored = vllm_ascend_hsx.load(path).token_ids.tolist()[rows:]
                assert stored[: len(generated) - 1] == generated[:-1]
                generated = [*stored, 0]
            token_ids = [*token_ids, *generated[:-1]]
        assert client.verdict(path, token_ids, len(answer.prompts[prompt])) == ""
        assert len(vllm_ascend_hsx.load(path, response_id=answer.id).token_ids) == len(token_ids)


@pytest.mark.parametrize("name", CASES)
def test_answer_names_its_file_if_there_is_one(
    client: Client, answers: dict[str, Answer], name: str
) -> None:
    case, answer = CASES[name], answers[name]
    if case.named is None:
        assert answer.params is None
    else:
        assert answer.params == {
            "hidden_states_path": str(client.find(answer, *case.named)),
            **FIRST_WEIGHTS,
        }


def test_a_client_knows_the_id_of_its_response_beforehand(
    client: Client, answers: dict[str, Answer]
) -> None:
    for name, prefix in (
        ("named-by-the-client", "cmpl-sample-17"),
        ("chat-named-by-the-client", "chatcmpl-sample-18"),
    ):
        assert answers[name].id == prefix
        assert client.find(answers[name], 0, 0).name.startswith(prefix)


def test_a_client_that_goes_away_leaves_nothing(client: Client) -> None:
    case = Case(
        COMPLETIONS,
        {"prompt": PROMPTS[1], "stream": True, "max_tokens": 400, **OUTPUT},
        None,
        "gone",
    )
    with client.stream(case) as response:
        next(response.iter_lines())
        path = vllm_ascend_hsx.find(client.storage, "cmpl-gone")
    with pytest.raises(FileNotFoundError, match="no hidden states, lock or error"):
        vllm_ascend_hsx.load(path, timeout=60)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"kv_transfer_params": {"hidden_states_path": "../../escaped.safetensors"}},
            "extra_config.allow_custom_save_path=true",
        ),
        (
            {"kv_transfer_params": {"hidden_states_path": "x" * 10_000}},
            "(10000 characters), but this server chooses file names itself",
        ),
        (
            {"kv_transfer_params": {"hidden_states_path": None}},
            "is None, but this server chooses file names itself",
        ),
        (
            {"kv_transfer_params": {"hidden_states": {"a": [1]}}},
            "kv_transfer_params.hidden_states is an object; use true or false",
        ),
        ({"kv_transfer_params": {"include_output_tokens": "yes"}}, "'yes'; use true or false"),
        # vLLM passes these on unchanged.
        ({"vllm_xargs": {"kv_transfer_params": 5}}, "kv_transfer_params is 5; use an object"),
        (
            {"vllm_xargs": {"kv_transfer_params": "hidden_states"}},
            "kv_transfer_params is 'hidden_states'; use an object",
        ),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_params_that_make_no_sense_are_refused_and_the_request_generates_all_the_same(
    client: Client, answers: dict[str, Answer], body: dict[str, Any], words: str
) -> None:
    answer = client.send(Case(COMPLETIONS, {"prompt": PROMPTS[0], **body}, None))
    assert answer.params is not None
    (error,) = answer.params.values()
    assert list(answer.params) == ["hidden_states_error"]
    assert words in error
    assert len(error) < 500
    assert answer.texts == answers["one-prompt"].texts


@pytest.mark.parametrize("where", ["header", "body"])
def test_an_id_of_ten_thousand_characters_has_a_file(client: Client, where: str) -> None:
    hostile = "../" * 3334
    body = {"prompt": PROMPTS[0], **({"request_id": hostile} if where == "body" else {})}
    answer = client.send(Case(COMPLETIONS, body, None, hostile if where == "header" else None))
    assert answer.params is not None
    path = Path(answer.params["hidden_states_path"])
    assert path.parent == client.storage
    assert client.verdict(path, PROMPTS[0]) == ""
    assert hostile in vllm_ascend_hsx.load(path).metadata["request_id"]
    vllm_ascend_hsx.remove(path)


@pytest.mark.parametrize(
    "params", [{"hidden_states_path": "\ud800"}, {"hidden_states": 10**30}], ids=ascii
)
def test_params_that_vllm_cannot_pass_on_end_their_request_alone(
    client: Client, answers: dict[str, Answer], params: dict[str, Any]
) -> None:
    body = {
        "model": str(client.model),
        "prompt": PROMPTS[0],
        "max_tokens": 6,
        "kv_transfer_params": params,
    }
    response = httpx.post(
        f"{client.server.url}/v1/completions", content=json.dumps(body), timeout=120
    )
    assert response.status_code >= 400
    opted_out = client.send(
        Case(
            COMPLETIONS,
            {"prompt": PROMPTS[0], "kv_transfer_params": {"hidden_states": False}},
            None,
        )
    )
    assert opted_out.texts == answers["one-prompt"].texts


def test_only_complete_files_are_visible(client: Client, answers: dict[str, Answer]) -> None:
    expected = {
        client.find(answers[name], *file).name
        for name, case in CASES.items()
        if name != "opted-out"
        for file in case.files
    }
    assert {name.removesuffix(".lock") for name in names_in(client.storage)} == expected
