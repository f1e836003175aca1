"""Request parameters at endpoints where vLLM 0.23.0 drops the client's kv_transfer_params.

They include beam search. It is not extracted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_26, V0_23
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.api import (
    ERROR_KEY,
    EXTRACT_KEY,
    PATH_KEY,
    ParamsError,
    ServerParams,
    one_file_for_all,
    read_params,
)
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.transfer_config import read_options

TOKENS_0_23 = "vllm.entrypoints.serve.disagg.serving"
TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving"
BATCH = "vllm.entrypoints.openai.chat_completion.batch_serving"
SCORING = "vllm.entrypoints.generate.generative_scoring.serving"
OFFLINE = "vllm.entrypoints.generate.beam_search.offline"
ONLINE = "vllm.entrypoints.generate.beam_search.online"
COMPLETION = "vllm.entrypoints.openai.completion.protocol"
CHAT = "vllm.entrypoints.openai.chat_completion.protocol"
_SCORED = "/generative_scoring accepts kv_transfer_params"
_GENERATED = "/inference/v1/generate accepts kv_transfer_params"
_KEY = "kv_transfer_params"

# extra_args for SamplingParams created in this context.
extra_args: ContextVar[dict[str, Any] | None] = ContextVar("hsx_extra_args", default=None)


def our_config(vllm_config: Any) -> HsxConfig | None:
    """Return our connector's options; None if the engine has no connector of ours."""
    try:
        return read_options(vllm_config.kv_transfer_config)
    except UserError:
        return None


@patch(TOKENS_0_23, "ServingTokens.serve_tokens", V0_23, why=_GENERATED)
@patch(TOKENS, "ServingTokens.serve_tokens", SINCE_0_26, why=_GENERATED)
async def serve_tokens(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Make `/inference/v1/generate` pass the client's kv_transfer_params on, as completions do.

    Reason: vLLM reads nothing from the request's field for them
    (entrypoints/serve/disagg/protocol.py:112).
    """
    if request.kv_transfer_params and our_config(self.engine_client.vllm_config) is not None:
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), _KEY: request.kv_transfer_params}
    return await original(self, request, *args, **kwargs)


@patch(SCORING, "ServingGenerativeScoring.create_generative_scoring", SINCE_0_23, why=_SCORED)
async def score(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Make `/generative_scoring` pass the client's kv_transfer_params on with each item.

    Reason: the request has no field for them and keeps them as an unknown field
    (entrypoints/generate/generative_scoring/serving.py:50). The answer has no field either; use
    `find` to locate the files.
    """
    given = (request.model_extra or {}).get(_KEY)
    ours = given is not None and our_config(self.engine_client.vllm_config) is not None
    extra_args.set(
        {_KEY: given} if ours else None
    )  # not reset: the context belongs to the HTTP request
    return await original(self, request, *args, **kwargs)


_BATCH = "a batch of chats names no single file"
uses(BATCH, "OpenAIServingChatBatch.create_error_response", SINCE_0_23, takes="message", why=_BATCH)


@patch(BATCH, "OpenAIServingChatBatch.create_batch_chat_completion", SINCE_0_23, why=_BATCH)
async def answer_batch(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to write several conversations to one file.

    Reason: their ids do not identify the first conversation, because a client's own id may end with
    a number. The answer has no field for errors of files.
    """
    given = (request.model_extra or {}).get(_KEY)
    of_ours = len(request.messages) > 1 and our_config(self.engine_client.vllm_config) is not None
    if of_ours and isinstance(given, dict) and PATH_KEY in given:
        return self.create_error_response(one_file_for_all(given[PATH_KEY]))
    return await original(self, request, *args, **kwargs)


@patch(SCORING, "SamplingParams", SINCE_0_23, why=_SCORED)
@patch(OFFLINE, "SamplingParams", SINCE_0_23, why="beams are not extracted")
@patch(ONLINE, "SamplingParams", SINCE_0_23, why="beams are not extracted")
def add_extra_args(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Create sampling parameters with the extra_args of this context."""
    if (extra := extra_args.get()) is not None:
        kwargs["extra_args"] = extra
    return original(*args, **kwargs)


# Beam search: vLLM runs it as ordinary requests without the client's parameters.

NOT_EXTRACTED = "beam search is not extracted; send its text as a prompt to get the hidden states"
_CLIENT_PARAMS = "_hsx_kv_transfer_params"

_OPT_OUT = {"kv_transfer_params": {EXTRACT_KEY: False}}


@patch(OFFLINE, "BeamSearchOfflineMixin.beam_search", SINCE_0_23, why="beams are not extracted")
def search_offline(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the requests of `LLM.beam_search` opt out of extraction.

    Reason: in each step each beam is a new request (entrypoints/generate/beam_search/offline.py:75)
    whose prompt is the beam so far. With w beams and t tokens they would leave 1 + w * (t - 1)
    files per prompt. Most belong to dropped beams, and nothing identifies them.
    """
    ours = our_config(self.llm_engine.vllm_config) is not None
    before = extra_args.set(_OPT_OUT if ours else None)
    try:
        return original(self, *args, **kwargs)
    finally:
        extra_args.reset(before)


@patch(ONLINE, "BeamSearchOnlineMixin.beam_search", SINCE_0_23, why="beams are not extracted")
async def search_online(
    original: Any, self: Any, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Make the API server's beam search requests opt out, and the response name the reason.

    Reason: as offline (entrypoints/generate/beam_search/online.py:60). The client's
    kv_transfer_params, even an opt-out, reach none of these requests.
    """
    config = our_config(self.engine_client.vllm_config)
    # Not reset: the next step of a generator may run in another context, and this context belongs
    # to the HTTP request.
    extra_args.set(None if config is None else _OPT_OUT)
    async for output in original(self, prompt, request_id, params, *args, **kwargs):
        if config is not None:
            output.kv_transfer_params = _answer(config, getattr(params, _CLIENT_PARAMS, None))
        yield output


@patch(
    COMPLETION,
    "CompletionRequest.to_beam_search_params",
    SINCE_0_23,
    why="a beam search names the reason why it has no rows",
)
@patch(
    CHAT,
    "ChatCompletionRequest.to_beam_search_params",
    SINCE_0_23,
    why="a beam search names the reason why it has no rows",
)
def keep_client_params(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the client's kv_transfer_params with the beam search parameters, for the answer.

    Reason: BeamSearchParams have no field for them (entrypoints/openai/completion/protocol.py:223
    and entrypoints/openai/chat_completion/protocol.py:531).
    """
    params = original(self, *args, **kwargs)
    setattr(params, _CLIENT_PARAMS, self.kv_transfer_params)
    return params


def _answer(config: HsxConfig, client_params: Any) -> dict[str, Any] | None:
    """Return the reason for missing hidden states if they would exist without beam search."""
    try:
        extract = read_params(
            client_params, ServerParams(None, extract_all=config.extract == "all")
        ).extract
    except ParamsError:
        extract = True  # the client asked for extraction
    return {ERROR_KEY: NOT_EXTRACTED} if extract else None
