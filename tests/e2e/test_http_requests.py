"""Over HTTP: which answers name their file in vLLM 0.23.0, and that a client can find the files of all others by the response's id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from harness import SPAWN, START_SECONDS, names_in, process_environment, tokens
from oracle import Oracle, Reference, Served

import vllm_ascend_hsx
from vllm_ascend_hsx.compat.beam_search import NOT_EXTRACTED
from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.demo.server import Server, free_port

LAYER_IDS = (4, 1, 2)
MAX_FILES = 6  # of one API request
PROMPTS = [tokens(9), tokens(70), tokens(1)]
OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}
COMPLETIONS, CHAT = "completions", "chat/completions"


class Case(NamedTuple):
    """A request.

    Attributes:
        endpoint: behind /v1/.
        body: its JSON, less what all have in common.
        named: (prompt, sample) of the file that the answer names, or None if it names none.
        request_id: sent as X-Request-Id.
    """

    endpoint: str
    body: dict[str, Any]
    named: tuple[int, int] | None
    request_id: str | None = None

    @property
    def prompts(self) -> list[list[int]]:
        prompt = self.body.get("prompt", [0])
        return prompt if isinstance(prompt[0], list) else [prompt]

    @property
    def files(self) -> list[tuple[int, int]]:
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.body.get("n", 1))]


MESSAGES = [{"role": "user", "content": "Which layer of the model says so?"}]
SAMPLED = {"temperature": 1.0, "seed": 1}
CASES = {
    "one-prompt": Case(COMPLETIONS, {"prompt": PROMPTS[0]}, (0, 0)),
    "several-prompts": Case(COMPLETIONS, {"prompt": PROMPTS}, (0, 0)),
    "several-samples": Case(COMPLETIONS, {"prompt": PROMPTS[1], "n": 3, **SAMPLED, **OUTPUT}, (0, 2)),
    "several-of-both": Case(COMPLETIONS, {"prompt": PROMPTS[:2], "n": 2, **SAMPLED, **OUTPUT}, (0, 1)),
    "streamed": Case(COMPLETIONS, {"prompt": PROMPTS[1], "stream": True, **OUTPUT}, None),
    "several-prompts-streamed": Case(COMPLETIONS, {"prompt": PROMPTS, "stream": True}, None),
    "stopped-by-a-string": Case(COMPLETIONS, {"prompt": PROMPTS[1], "stop": ["<to be set>"], **OUTPUT}, None),
    "chat": Case(CHAT, {"messages": MESSAGES, **OUTPUT}, (0, 0)),
    "chat-with-several-samples": Case(CHAT, {"messages": MESSAGES, "n": 2, **SAMPLED, **OUTPUT}, (0, 1)),
    "chat-streamed": Case(CHAT, {"messages": MESSAGES, "stream": True, **OUTPUT}, None),
    "named-by-the-client": Case(COMPLETIONS, {"prompt": PROMPTS}, (0, 0), "sample-17"),
    "hostile-name": Case(COMPLETIONS, {"prompt": PROMPTS, "stream": True}, None, "a/../../b c~é"),
    "hostile-name-in-the-body": Case(COMPLETIONS, {"prompt": PROMPTS[0], "request_id": "../\0/" + "é" * 50}, (0, 0)),
    "chat-named-by-the-client": Case(CHAT, {"messages": MESSAGES, "stream": True}, None, "sample-18"),
    "opted-out": Case(COMPLETIONS, {"prompt": PROMPTS[0], "kv_transfer_params": {"hidden_states": False}}, None),
}


@dataclass
class Answer:
    """What came back for a case.

    Attributes:
        id: of the response or of the stream's chunks.
        params: kv_transfer_params of the response, or of any chunk.
        prompts: token ids by index. samples: generated token ids by index of the choice.
    """

    id: str
    params: dict[str, Any] | None
    prompts: list[list[int]]
    samples: dict[int, list[int]]
    texts: dict[int, str]


@dataclass
class Client:
    server: Server
    model: Path
    storage: Path

    def send(self, case: Case) -> Answer:
        with self.stream(case) as response:
            assert response.status_code == 200, response.read()
            if not case.body.get("stream"):
                response.read()
                return self._take([response.json()], case)
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            return self._take([json.loads(line) for line in lines if line != "[DONE]"], case)

    def stream(self, case: Case) -> Any:
        body = {"model": str(self.model), "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **case.body}
        headers = {"X-Request-Id": case.request_id.encode()} if case.request_id else {}
        return httpx.stream("POST", f"{self.server.url}/v1/{case.endpoint}", json=body, headers=headers, timeout=120)

    @staticmethod
    def _take(parts: list[dict[str, Any]], case: Case) -> Answer:
        (response_id,) = {part["id"] for part in parts}
        params = next((part["kv_transfer_params"] for part in parts if part.get("kv_transfer_params")), None)
        answer = Answer(response_id, params, [], {}, {})
        for part in parts:
            for choice in part["choices"]:
                answer.samples.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                text = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
                answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + text
        answer.prompts = case.prompts if case.endpoint == COMPLETIONS else [parts[0]["prompt_token_ids"]]
        return answer

    def find(self, answer: Answer, prompt: int, sample: int) -> Path:
        return vllm_ascend_hsx.find(self.storage, answer.id, prompt=prompt, sample=sample)


@pytest.fixture(scope="module")
def client(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("http")
    options = ServeOptions(
        model=str(float32_qwen3),
        storage=directory / "hidden_states",
        layer_ids=LAYER_IDS,
        port=free_port(),
        data_parallel_size=1,
        tensor_parallel_size=1,
        expert_parallel=False,
        max_num_batched_tokens=64,
        extra=("--enforce-eager", "--gpu-memory-utilization", "0.4", "--dtype", "float32"),
    )
    command = options.command()
    at = command.index("--kv-transfer-config") + 1
    transfer = json.loads(command[at])
    transfer["kv_connector_extra_config"]["max_files_per_request"] = MAX_FILES
    command[at] = json.dumps(transfer)
    server = Server(command, port=options.port, log=directory / "server.log", environment=process_environment(npus=1) | SPAWN)
    with server:
        server.wait_ready(START_SECONDS)
        yield Client(server, float32_qwen3, options.storage)


@pytest.fixture(scope="module")
def answers(client: Client) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for name, case in CASES.items():
        if "stop" in case.body:
            text = found["streamed"].texts[0]  # of the same prompt, without a stop string
            case.body["stop"] = [text[len(text) // 2 :][:2]]
        found[name] = client.send(case)
    return found


@pytest.fixture(scope="module")
def oracle(float32_qwen3: Path) -> Oracle:
    return Oracle(Reference(float32_qwen3, 4, torch.float32), LAYER_IDS)


@pytest.mark.parametrize("name", CASES)
def test_every_file_is_found_and_right(client: Client, answers: dict[str, Answer], oracle: Oracle, name: str) -> None:
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
                # The engine hears of the stop some steps later; what it has generated until then is in the file too.
                stored = vllm_ascend_hsx.load(path).token_ids.tolist()[rows:]
                assert stored[: len(generated) - 1] == generated[:-1]
                generated = [*stored, 0]
            token_ids = [*token_ids, *generated]
            rows = len(token_ids) - 1
        assert oracle.verdict(path, Served(str(path), tuple(token_ids), 0, None), rows, len(answer.prompts[prompt])) == ""


@pytest.mark.parametrize("name", CASES)
def test_which_answers_name_their_file(client: Client, answers: dict[str, Answer], name: str) -> None:
    case, answer = CASES[name], answers[name]
    if case.named is None:
        assert answer.params is None
    else:
        assert answer.params == {"hidden_states_path": str(client.find(answer, *case.named))}


def test_a_client_knows_the_id_of_its_response_beforehand(client: Client, answers: dict[str, Answer]) -> None:
    for name, prefix in (("named-by-the-client", "cmpl-sample-17"), ("chat-named-by-the-client", "chatcmpl-sample-18")):
        assert answers[name].id == prefix
        assert client.find(answers[name], 0, 0).name.startswith(prefix)


def test_a_client_that_goes_away_leaves_nothing(client: Client) -> None:
    case = Case(COMPLETIONS, {"prompt": PROMPTS[1], "stream": True, "max_tokens": 400, **OUTPUT}, None, "gone")
    with client.stream(case) as response:
        next(response.iter_lines())
        path = vllm_ascend_hsx.find(client.storage, "cmpl-gone")
    with pytest.raises(FileNotFoundError, match="was the request aborted"):
        vllm_ascend_hsx.load(path, timeout=60)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"kv_transfer_params": {"hidden_states_path": "../../escaped.safetensors"}}, "extra_config.allow_custom_save_path=true"),
        ({"kv_transfer_params": {"hidden_states_path": "x" * 10_000}}, "(10000 characters), but this server names its files itself"),
        ({"kv_transfer_params": {"hidden_states_path": None}}, "is None, but this server names its files itself"),
        ({"kv_transfer_params": {"hidden_states": {"a": [1]}}}, "kv_transfer_params.hidden_states is an object; use true or false"),
        ({"kv_transfer_params": {"include_output_tokens": "yes"}}, "'yes'; use true or false"),
        # vLLM passes these on as they are, whatever they are.
        ({"vllm_xargs": {"kv_transfer_params": 5}}, "kv_transfer_params is 5; use an object"),
        ({"vllm_xargs": {"kv_transfer_params": "hidden_states"}}, "kv_transfer_params is 'hidden_states'; use an object"),
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
def test_an_id_of_ten_thousand_characters_has_a_file(client: Client, oracle: Oracle, where: str) -> None:
    hostile = "../" * 3334
    body = {"prompt": PROMPTS[0], **({"request_id": hostile} if where == "body" else {})}
    answer = client.send(Case(COMPLETIONS, body, None, hostile if where == "header" else None))
    assert answer.params is not None
    path = Path(answer.params["hidden_states_path"])
    assert path.parent == client.storage
    assert oracle.verdict(path, Served(str(path), tuple(PROMPTS[0]), 0, None), len(PROMPTS[0]), len(PROMPTS[0])) == ""
    assert hostile in vllm_ascend_hsx.load(path).metadata["request_id"]
    vllm_ascend_hsx.remove(path)


@pytest.mark.parametrize("params", [{"hidden_states_path": "\ud800"}, {"hidden_states": 10**30}], ids=ascii)
def test_params_that_vllm_cannot_pass_on_end_their_request_alone(
    client: Client, answers: dict[str, Answer], params: dict[str, Any]
) -> None:
    body = {"model": str(client.model), "prompt": PROMPTS[0], "max_tokens": 6, "kv_transfer_params": params}
    response = httpx.post(f"{client.server.url}/v1/completions", content=json.dumps(body), timeout=120)
    assert response.status_code >= 400
    opted_out = client.send(Case(COMPLETIONS, {"prompt": PROMPTS[0], "kv_transfer_params": {"hidden_states": False}}, None))
    assert opted_out.texts == answers["one-prompt"].texts


BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 5}


@pytest.mark.parametrize(
    ("params", "told"),
    [(None, True), ({"hidden_states": False}, False), ({"hidden_states_path": "beam.safetensors"}, True)],
    ids=["silent", "opted out", "with a name"],
)
@pytest.mark.parametrize(
    ("endpoint", "body"), [(COMPLETIONS, {"prompt": PROMPTS[1]}), (CHAT, {"messages": MESSAGES})], ids=["completion", "chat"]
)
def test_a_beam_search_leaves_no_file_and_says_so_to_whoever_wanted_one(
    client: Client, answers: dict[str, Answer], endpoint: str, body: dict[str, Any], params: dict[str, Any] | None, told: bool
) -> None:
    before = names_in(client.storage)
    answer = client.send(Case(endpoint, {**body, **BEAMS, **({"kv_transfer_params": params} if params else {})}, None))
    assert len(answer.texts) == 3
    assert names_in(client.storage) == before
    assert answer.params == ({"hidden_states_error": NOT_EXTRACTED} if told else None)


@pytest.mark.parametrize(
    ("many", "told"),
    [({"prompt": [[7]] * 9}, False), ({"prompt": [7], "n": 9, **SAMPLED}, True)],
    ids=["prompts", "samples"],
)
def test_an_api_request_makes_so_many_files_and_no_more(client: Client, many: dict[str, Any], told: bool) -> None:
    answer = client.send(Case(COMPLETIONS, many, None))
    assert len(answer.texts) == 9
    found = []
    for index in range(9):
        with suppress(FileNotFoundError):
            found.append(client.find(answer, *((index, 0) if "n" not in many else (0, index))))
    assert len(found) == MAX_FILES
    assert answer.params is not None
    if told:  # vLLM passes on what is said of the last sample
        assert "max_files_per_request allows" in answer.params["hidden_states_error"]
    else:
        assert answer.params == {"hidden_states_path": str(found[0])}
    lines = [line for line in client.server.log.read_text(errors="replace").splitlines() if "is not extracted: this API request" in line]
    assert lines and all("kv_connector_extra_config.max_files_per_request" in line for line in lines)
    for path in found:
        assert vllm_ascend_hsx.load(path, timeout=60).token_ids.tolist() == [7]
        vllm_ascend_hsx.remove(path)


TURN = {"input": MESSAGES, "max_output_tokens": 4}
MESSAGE = {"messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize("extract", [True, False], ids=["extracted", "opted out"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("endpoint", "body", "request_id"),
    [("responses", TURN, None), ("responses", TURN, "../turn 7"), ("messages", MESSAGE, None), ("messages", MESSAGE, "turn_8")],
    ids=["responses", "responses-named-by-the-client", "messages", "messages-named-by-the-client"],
)
def test_responses_and_messages_have_their_files(
    client: Client,
    answers: dict[str, Answer],
    oracle: Oracle,
    endpoint: str,
    body: dict[str, Any],
    request_id: str | None,
    stream: bool,
    extract: bool,
) -> None:
    body = {"model": str(client.model), **body, "stream": stream, "kv_transfer_params": {"hidden_states": extract}}
    body |= {"request_id": request_id} if request_id and endpoint == "responses" else {}
    headers = {"X-Request-Id": request_id} if request_id and endpoint == "messages" else {}
    response = httpx.post(f"{client.server.url}/v1/{endpoint}", json=body, headers=headers, timeout=120).raise_for_status()
    if stream:
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: {")]
        (response_id,) = {event[key]["id"] for event in events for key in ("response", "message") if key in event}
    else:
        response_id = response.json()["id"]
    if not extract:
        with pytest.raises(FileNotFoundError):
            vllm_ascend_hsx.find(client.storage, response_id)
        return
    path = vllm_ascend_hsx.find(client.storage, response_id)
    if not stream:
        assert response.json()["kv_transfer_params"] == {"hidden_states_path": str(path)}
    (prompt,) = answers["chat"].prompts
    assert oracle.verdict(path, Served(str(path), tuple(prompt), 0, None), len(prompt), len(prompt)) == ""
    vllm_ascend_hsx.remove(path)


@pytest.mark.parametrize("extract", [True, False], ids=["extracted", "opted out"])
def test_each_conversation_of_a_batch_has_its_file(client: Client, answers: dict[str, Answer], extract: bool) -> None:
    body = {"model": str(client.model), "messages": [MESSAGES, MESSAGES], "max_tokens": 2, "kv_transfer_params": {"hidden_states": extract}}
    response = httpx.post(f"{client.server.url}/v1/{CHAT}/batch", json=body, timeout=120).raise_for_status().json()
    for number in range(2):
        if extract:
            path = vllm_ascend_hsx.find(client.storage, response["id"], prompt=number)
            assert [vllm_ascend_hsx.load(path, timeout=60).token_ids.tolist()] == answers["chat"].prompts
            vllm_ascend_hsx.remove(path)
        else:
            with pytest.raises(FileNotFoundError):
                vllm_ascend_hsx.find(client.storage, response["id"], prompt=number)


REFUSED = {"hidden_states_path": "x.safetensors"}
PARAMS = [(None, True), ({"hidden_states": True}, True), ({"hidden_states": False}, False), (REFUSED, False)]


@pytest.mark.parametrize(("params", "extracted"), PARAMS, ids=str)
def test_tokens_that_are_sent_to_be_continued_have_a_file_unless_their_client_opts_out(
    client: Client, oracle: Oracle, params: dict[str, Any] | None, extracted: bool
) -> None:
    body = {"token_ids": PROMPTS[1], "sampling_params": {"max_tokens": 2}, "kv_transfer_params": params, "request_id": "tokens"}
    answer = httpx.post(f"{client.server.url}/inference/v1/generate", json=body, timeout=120).raise_for_status().json()
    assert len(answer["choices"][0]["token_ids"]) == 2
    if extracted:
        path = vllm_ascend_hsx.find(client.storage, "generate-tokens-tokens")
        assert answer["kv_transfer_params"] == {"hidden_states_path": str(path)}
        assert oracle.verdict(path, Served(str(path), tuple(PROMPTS[1]), 0, None), len(PROMPTS[1]), len(PROMPTS[1])) == ""
        vllm_ascend_hsx.remove(path)
        return
    assert list(answer["kv_transfer_params"] or {}) == (["hidden_states_error"] if params == REFUSED else [])
    with pytest.raises(FileNotFoundError):
        vllm_ascend_hsx.find(client.storage, "generate-tokens-tokens")


@pytest.mark.parametrize(("params", "extracted"), PARAMS, ids=str)
def test_items_that_are_scored_have_a_file_each_up_to_the_limit_unless_their_client_opts_out(
    client: Client, params: dict[str, Any] | None, extracted: bool
) -> None:
    said = {} if params is None else {"kv_transfer_params": params}
    items = [[8 + item] for item in range(MAX_FILES + 3)]
    body = {"query": PROMPTS[0], "items": items, "label_token_ids": [7, 9], **said}
    answer = httpx.post(f"{client.server.url}/generative_scoring", json=body, timeout=120).raise_for_status().json()
    assert len(answer["data"]) == len(items)
    found = {}
    for number in range(len(items)):
        with suppress(FileNotFoundError):
            found[number] = vllm_ascend_hsx.find(client.storage, answer["id"], prompt=number)
    assert len(found) == (MAX_FILES if extracted else 0)
    for number, path in found.items():
        assert vllm_ascend_hsx.load(path, timeout=60).token_ids.tolist() == PROMPTS[0] + items[number]
        vllm_ascend_hsx.remove(path)


def test_nothing_but_complete_files_is_visible(client: Client, answers: dict[str, Answer]) -> None:
    expected = {client.find(answers[name], *file).name for name, case in CASES.items() if name != "opted-out" for file in case.files}
    assert {name.removesuffix(".lock") for name in names_in(client.storage)} == expected
