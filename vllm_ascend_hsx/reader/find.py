"""Finds the file of a response that does not name it: several prompts in one request, several samples, streaming, stop strings.

vLLM 0.23.0 passes `kv_transfer_params` on for one prompt and one sample of a request only, and not at all in a stream or when a stop string
ended it. But the file is named after vLLM's internal id, which is built from the response's:

    [{sample}_]{response id}[-{prompt} or _{prompt}][-{8 hex digits}]

`sample` stands there with n > 1 (v1/engine/parallel_sampling.py:92), `-{prompt}` for completions
(entrypoints/openai/completion/serving.py:180) and the items of /generative_scoring
(entrypoints/generate/generative_scoring/serving.py:267), `_{prompt}` for the turns of /v1/responses
(entrypoints/openai/responses/serving.py:661) and the conversations of /v1/chat/completions/batch
(entrypoints/openai/chat_completion/batch_serving.py:151), the digits unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set
(v1/engine/input_processor.py:240).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_ascend_hsx.protocol.arguments import require_whole
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX, file_name, sanitize
from vllm_ascend_hsx.reader.shards import shards_of

_RANDOM = re.compile(r"-([0-9a-f]{8})(?:~[0-9a-f]{32})?$")
# The longest first: the name of a lock file ends with DATA_SUFFIX + LOCK_SUFFIX.
_SUFFIXES = (DATA_SUFFIX + LOCK_SUFFIX, DATA_SUFFIX + ERROR_SUFFIX, DATA_SUFFIX)


def find(directory: str | os.PathLike[str], response_id: str, *, prompt: int = 0, sample: int = 0) -> Path:
    """The path for `load` of one prompt and sample of a response, complete or not.

    It is there as soon as the server has begun with the prompt, hence always when text has come back. All names in the directory are
    read; where a response has `kv_transfer_params["hidden_states_path"]`, that is quicker.

    Args:
        directory: where the server stores files.
        response_id: the `id` of the response or of any chunk of its stream, for example `cmpl-5f...`. A client that sends the header
            `X-Request-Id: NAME` knows it beforehand: `cmpl-NAME` for completions, `chatcmpl-NAME` for chat and /v1/messages. For
            /v1/responses it is what the client sends as `request_id` in the body; /inference/v1/generate answers with another id than
            its own, `generate-tokens-NAME`.
        prompt: index of the prompt in a request for completions of several, of the item in one for scores, of the conversation in a
            batch of chats, or of the turn in a response whose tools were called by the server.
        sample: index of the sample in a request with n > 1.

    Raises:
        FileNotFoundError: neither a file nor a lock nor an error is there: not begun, aborted, opted out, or taken away.
        LookupError: several are there, because several requests had this id. Ids longer than about 170 characters are not found.
        ValueError: `prompt` or `sample` is no index.
        OSError: the directory cannot be read.
    """
    for name, value in (("prompt", prompt), ("sample", sample)):
        require_whole(name, value, 0, "give a whole number, counted from 0")
    # The forms of the id, first those that leave no doubt: another client's own `NAME_0` looks like the first turn of NAME.
    plain = [response_id, f"{response_id}-{prompt}"] if prompt == 0 else [f"{response_id}-{prompt}"]
    forms = [_with_sample(bases, sample) for bases in (plain, [f"{response_id}_{prompt}"])]
    common = sanitize(response_id)
    found: list[set[str]] = [set() for _ in forms]
    for name in _names(directory):
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
        if suffix is None or common not in name or name.startswith("."):
            continue
        stem = name.removesuffix(suffix)
        random = _RANDOM.search(stem)
        for bases, paths in zip(forms, found, strict=True):
            ids = [*bases, *(f"{base}-{random[1]}" for base in bases if random)]
            if stem + DATA_SUFFIX in map(file_name, ids):
                paths.add(stem + DATA_SUFFIX)
    best = next(filter(None, found), set())
    if len(best) > 1:
        raise LookupError(f"{response_id!r} is the id of several requests: {', '.join(sorted(best))}. Give each request an id of its own.")
    if not best:
        raise FileNotFoundError(f"{directory} has no hidden states of prompt {prompt}, sample {sample} of {response_id!r}")
    return Path(directory, best.pop())


def _with_sample(bases: list[str], sample: int) -> list[str]:
    """The beginnings of an id, with the sample's number; without it too where there may be one sample only."""
    numbered = [f"{sample}_{base}" for base in bases]
    return [*bases, *numbered] if sample == 0 else numbered


def _names(directory: str | os.PathLike[str]) -> Iterator[str]:
    with os.scandir(directory) as entries:
        yield from (entry.name for entry in entries)
    yield from shards_of(directory).members()
