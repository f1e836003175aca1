"""A client of a server for the tests of HTTP requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from harness import tokens
from launch import START_SECONDS, tiny_server
from oracle import Oracle, Reference, Served
from releases import installed_is

import vllm_ascend_hsx
from vllm_ascend_hsx.demo.server import Server

LAYER_IDS = (4, 1, 2)
MAX_FILES = 6  # per API request
PROMPTS = [tokens(9), tokens(70), tokens(1)]
OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}
COMPLETIONS, CHAT = "completions", "chat/completions"


class Case(NamedTuple):
    """A request.

    Attributes:
        endpoint: the path after /v1/.
        body: JSON body, without the common fields.
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
        return [
            (prompt, sample)
            for prompt in range(len(self.prompts))
            for sample in range(self.body.get("n", 1))
        ]


MESSAGES = [{"role": "user", "content": "Which layer is the best one?"}]
SAMPLED = {"temperature": 1.0, "seed": 1}


@dataclass
class Answer:
    """The response to a case.

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
    oracle: Oracle

    def send(self, case: Case) -> Answer:
        with self.stream(case) as response:
            assert response.status_code == 200, response.read()
            if not case.body.get("stream"):
                response.read()
                return self._take([response.json()], case)
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            return self._take([json.loads(line) for line in lines if line != "[DONE]"], case)

    def stream(self, case: Case) -> Any:
        body = {
            "model": str(self.model),
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **case.body,
        }
        headers = {"X-Request-Id": case.request_id.encode()} if case.request_id else {}
        return httpx.stream(
            "POST", f"{self.server.url}/v1/{case.endpoint}", json=body, headers=headers, timeout=120
        )

    @staticmethod
    def _take(parts: list[dict[str, Any]], case: Case) -> Answer:
        (response_id,) = {part["id"] for part in parts}
        params = next(
            (part["kv_transfer_params"] for part in parts if part.get("kv_transfer_params")), None
        )
        answer = Answer(response_id, params, [], {}, {})
        for part in parts:
            for choice in part["choices"]:
                answer.samples.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                text = (
                    choice.get("text")
                    or (choice.get("message") or choice.get("delta") or {}).get("content")
                    or ""
                )
                answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + text
        answer.prompts = (
            case.prompts if case.endpoint == COMPLETIONS else [parts[0]["prompt_token_ids"]]
        )
        return answer

    def find(self, answer: Answer, prompt: int, sample: int) -> Path:
        return vllm_ascend_hsx.find(self.storage, answer.id, prompt=prompt, sample=sample)

    def verdict(
        self, path: Path, token_ids: list[int], num_prompt_tokens: int | None = None
    ) -> str:
        """Compare a file with the rows of these tokens."""
        own = Served(str(path), (*token_ids, 0), 0, None)
        rows = len(token_ids)
        return self.oracle.verdict(path, own, rows, num_prompt_tokens or rows)


@contextmanager
def start_client(directory: Path, model: Path) -> Iterator[Client]:
    """Start a server of a float32 model."""
    options = {"connector": {"max_files_per_request": MAX_FILES}, "expert_parallel": False}
    extra = ["--dtype", "float32"]
    if installed_is(">=0.30"):
        extra.append("--enable-scale-out")  # without it there is no /inference/v1/generate
    oracle = Oracle(Reference(model, 4, torch.float32), LAYER_IDS)
    with tiny_server(directory, model, LAYER_IDS, extra=tuple(extra), **options) as server:
        server.wait_ready(START_SECONDS)
        yield Client(server, model, directory / "hidden_states", oracle)
