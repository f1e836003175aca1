"""Relate vLLM's internal request ids to the ids of the responses that clients see.

vLLM derives the id of a request from the id of the response (0.23.0):

    [{sample}_]{response id}[-{prompt} or _{prompt}][-{8 hex digits}]

`{sample}_` is present with n > 1 (v1/engine/parallel_sampling.py:92). `-{prompt}` is used for
completions (entrypoints/openai/completion/serving.py:180) and the items of /generative_scoring
(entrypoints/generate/generative_scoring/serving.py:267), `_{prompt}` for the turns of /v1/responses
(entrypoints/openai/responses/serving.py:661) and the conversations of /v1/chat/completions/batch
(entrypoints/openai/chat_completion/batch_serving.py:151). The digits are present unless
VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set (v1/engine/input_processor.py:240).

Clients choose ids that differ by a number, so a form is accepted only where an endpoint uses it.
"""

from __future__ import annotations

import re

_CHAT = "chatcmpl-"
_NUMBERED = ("cmpl-", "generative-scoring-")
_WITH_SAMPLES = (_CHAT, "generate-tokens-")
# Clients of /v1/responses choose the id. It may begin like the id of a sample.
_TURN = re.compile(r"(?:.*_)?[0-9]+", re.DOTALL)
_LATER_TURN = re.compile(r".*_[0-9]+", re.DOTALL)
# At most seven digits: eight digits are the random suffix.
_PROMPT = "[0-9]{1,7}"
_RANDOM = "(-[0-9a-f]{8})?"
_INTERNAL_ID = re.compile(rf"(?:(?P<sample>[0-9]+)_)?(?P<id>.*?){_RANDOM}", re.DOTALL)
_PROMPT_OF_SEVERAL = re.compile(
    rf"(?P<id>(?:{'|'.join(_NUMBERED)}).*)-(?P<prompt>[0-9]+)", re.DOTALL
)


def split_id(request_id: str) -> tuple[str, tuple[str, str]]:
    """Split an internal id into the API request and (prompt, sample).

    A number that the endpoint does not append is part of the API request. Prompt or sample is then
    empty.
    """
    found = _INTERNAL_ID.fullmatch(request_id)
    assert found is not None  # it matches anything
    sample = found["sample"] or ""
    if numbered := _PROMPT_OF_SEVERAL.fullmatch(found["id"]):
        return numbered["id"], (numbered["prompt"], sample)
    if not found["id"].startswith(_WITH_SAMPLES) and _TURN.fullmatch(found["id"]):
        sample = ""
    # Samples of one parent share the random digits; two requests with the same id do not.
    return request_id[len(sample) + 1 :] if sample else request_id, ("", sample)


def possible_ids(response_id: str, prompt: int, sample: int) -> list[list[str]]:
    """Return the possible ids of one prompt and sample, without the random digits.

    The most certain list comes first: a client's own chat `NAME_0` looks like the first
    conversation of a batch called `NAME`.
    """
    turn = [f"{response_id}_{prompt}"] if sample == 0 else []  # only with n = 1
    base = f"{response_id}-{prompt}" if response_id.startswith(_NUMBERED) else response_id
    samples = [base, f"0_{base}"] if sample == 0 else [f"{sample}_{base}"]
    if response_id.startswith(_NUMBERED):
        return [samples, turn]
    if prompt:
        return [turn]
    if response_id.startswith(_CHAT):
        return [samples, turn]
    # /v1/responses, or a caller of the engine that chooses the whole id
    return [turn] if _LATER_TURN.fullmatch(response_id) else [turn, samples]


def belongs_to(request_id: str, response_id: str) -> bool:
    """Return whether a request belongs to a response.

    Not for batches of chats: their ids can be ids of other clients' chats.
    """
    base = re.escape(response_id)
    if response_id.startswith(_NUMBERED):
        form = rf"([0-9]+_)?{base}-{_PROMPT}|{base}_{_PROMPT}"
    elif response_id.startswith(_CHAT):
        form = rf"([0-9]+_)?{base}"
    else:
        form = rf"{base}_{_PROMPT}"
    return re.fullmatch(f"({form}){_RANDOM}", request_id) is not None
