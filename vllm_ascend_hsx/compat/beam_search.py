"""Beam search, which vLLM 0.23.0 runs as ordinary requests without the client's parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm_ascend_hsx.compat.patch_points import patch
from vllm_ascend_hsx.compat.request_params import OFFLINE, ONLINE, extra_args, our_config
from vllm_ascend_hsx.compat.versions import SINCE_0_23
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.api import ERROR_KEY, EXTRACT_KEY, ParamsError, ServerParams, read_params

COMPLETION = "vllm.entrypoints.openai.completion.protocol"
CHAT = "vllm.entrypoints.openai.chat_completion.protocol"

NOT_EXTRACTED = "beam search is not extracted; send the text that it found as a prompt to have its hidden states"
_CLIENT_PARAMS = "_hsx_kv_transfer_params"

_OPT_OUT = {"kv_transfer_params": {EXTRACT_KEY: False}}


@patch(OFFLINE, "BeamSearchOfflineMixin.beam_search", SINCE_0_23, why="beams are not extracted")
def search_offline(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the requests that `LLM.beam_search` makes opt out of extraction.

    Reason: in each step each beam is a new request (entrypoints/generate/beam_search/offline.py:75)
    whose prompt is the beam so far. With w beams and t tokens they would leave 1 + w * (t - 1)
    files per prompt, mostly of dropped beams, without a sign of which is which.
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
    """Have the requests of the API server's beam search opt out, and its response name the reason.

    Reason: as offline (entrypoints/generate/beam_search/online.py:60). The client's
    kv_transfer_params, even an opt-out, reach none of these requests.
    """
    config = our_config(self.engine_client.vllm_config)
    # Not reset: the next step of a generator may run in another context, and this one is the HTTP
    # request's own.
    extra_args.set(None if config is None else _OPT_OUT)
    async for output in original(self, prompt, request_id, params, *args, **kwargs):
        if config is not None:
            output.kv_transfer_params = _answer(config, getattr(params, _CLIENT_PARAMS, None))
        yield output


@patch(COMPLETION, "CompletionRequest.to_beam_search_params", SINCE_0_23, why="a beam search says why it has no rows")
@patch(CHAT, "ChatCompletionRequest.to_beam_search_params", SINCE_0_23, why="a beam search says why it has no rows")
def keep_client_params(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the client's kv_transfer_params with the parameters of its beam search, for the answer.

    Reason: BeamSearchParams have no field for them (entrypoints/openai/completion/protocol.py:223
    and entrypoints/openai/chat_completion/protocol.py:531).
    """
    params = original(self, *args, **kwargs)
    setattr(params, _CLIENT_PARAMS, self.kv_transfer_params)
    return params


def _answer(config: HsxConfig, client_params: Any) -> dict[str, Any] | None:
    """Return why there are no hidden states, if there would be some without beam search."""
    try:
        extract = read_params(client_params, ServerParams(None, extract_all=config.extract == "all")).extract
    except ParamsError:
        extract = True  # the client asked for something
    return {ERROR_KEY: NOT_EXTRACTED} if extract else None
