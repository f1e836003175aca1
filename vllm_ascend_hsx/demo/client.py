"""Send the demo's prompts with the openai client, and return the files of hidden states."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from openai import OpenAI

from vllm_ascend_hsx.demo.prompts import Prompt

EXTRA_BODY = {"return_token_ids": True}
# A request that generates the maximum number of tokens, with their rows.
WITH_OUTPUT = {"ignore_eos": True, "kv_transfer_params": {"include_output_tokens": True}}


class Answer(NamedTuple):
    """The answer to one request.

    Attributes:
        prompt_ids: the prompt as tokenized by the server.
        generated: the tokens of the answer.
        path: the file of hidden states.
    """

    prompt: Prompt
    prompt_ids: list[int]
    generated: list[int]
    path: Path

    @property
    def token_ids(self) -> list[int]:
        """Tokens with rows in the file. The last token is never an input of the model."""
        return self.prompt_ids + (self.generated[:-1] if self.prompt.generates else [])


class AnswerError(RuntimeError):
    """A response lacks the fields of an extracted request."""


def send_all(url: str, prompts: Sequence[Prompt], *, timeout: float) -> list[Answer]:
    """Send the prompts wave by wave, each wave concurrently. Return the answers in order.

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
    """Send one prompt and request its tokens. Raises AnswerError if the response names no file."""
    extra_body = EXTRA_BODY | (WITH_OUTPUT if prompt.generates else {})
    asked: Any = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "extra_body": extra_body,
    }
    response: Any
    if prompt.kind == "chat":
        response = client.chat.completions.create(
            messages=[{"role": "user", "content": str(prompt.content)}], **asked
        )
        prompt_ids = response.prompt_token_ids
    else:
        response = client.completions.create(prompt=prompt.content, **asked)
        prompt_ids = response.choices[0].prompt_token_ids
    params = getattr(response, "kv_transfer_params", None) or {}
    path = params.get("hidden_states_path")
    if not path:
        raise AnswerError(
            f"the response to a {prompt.kind} prompt has no hidden_states_path; "
            f"kv_transfer_params are {params}"
        )
    return Answer(prompt, prompt_ids, response.choices[0].token_ids, Path(path))
