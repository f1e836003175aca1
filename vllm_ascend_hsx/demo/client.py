"""Send the demo's prompts with the openai client, and return the files of their hidden states."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from openai import OpenAI

from vllm_ascend_hsx.demo.prompts import Prompt

EXTRA_BODY = {"return_token_ids": True}


class Answer(NamedTuple):
    """The answer to one request: the prompt as the server tokenized it, and the file."""

    prompt: Prompt
    token_ids: list[int]
    path: Path


class AnswerError(RuntimeError):
    """A response lacks the fields of an extracted request."""


def send_all(url: str, prompts: Sequence[Prompt], *, timeout: float) -> list[Answer]:
    """Send the prompts, those of a wave at the same time, and return the answers in their order.

    Raises AnswerError, or openai's error for a request that failed or exceeded timeout seconds.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)
    model = client.models.list().data[0].id
    answers: list[Answer] = []
    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        for _, wave in groupby(prompts, key=lambda prompt: prompt.wave):
            answers += pool.map(lambda prompt: send(client, model, prompt), list(wave))
    return answers


def send(client: OpenAI, model: str, prompt: Prompt) -> Answer:
    """Send one prompt and request one token. Raises AnswerError if the response names no file."""
    response: Any
    if prompt.kind == "chat":
        response = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": str(prompt.content)}], max_tokens=1, temperature=0, extra_body=EXTRA_BODY
        )
        token_ids = response.prompt_token_ids
    else:
        response = client.completions.create(model=model, prompt=prompt.content, max_tokens=1, temperature=0, extra_body=EXTRA_BODY)
        token_ids = response.choices[0].prompt_token_ids
    params = getattr(response, "kv_transfer_params", None) or {}
    path = params.get("hidden_states_path")
    if not path:
        raise AnswerError(f"the response to a {prompt.kind} prompt has no hidden_states_path; its kv_transfer_params are {params}")
    return Answer(prompt, token_ids, Path(path))
