"""Beam search, which vLLM 0.23.0 builds out of ordinary requests: one for each beam and token, without what the client said."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from vllm_ascend_hsx.compat.versions import require
from vllm_ascend_hsx.config import HsxConfig, HsxConfigError, read_options
from vllm_ascend_hsx.protocol.api import ERROR_KEY, EXTRACT_KEY, ParamsError, ServerParams, read_params

OFFLINE_MODULE = "vllm.entrypoints.generate.beam_search.offline"
ONLINE_MODULE = "vllm.entrypoints.generate.beam_search.online"
COMPLETION_MODULE = "vllm.entrypoints.openai.completion.protocol"
CHAT_MODULE = "vllm.entrypoints.openai.chat_completion.protocol"

NOT_EXTRACTED = "beam search is not extracted; send the text that it found as a prompt to have its hidden states"
_CLIENT_PARAMS = "_hsx_kv_transfer_params"

_opts_out: ContextVar[bool] = ContextVar("hsx_beams_opt_out", default=False)  # whether requests made in this context do


def extract_no_offline_beams(offline_module: Any) -> None:
    """Have the requests that `LLM.beam_search` makes opt out of extraction.

    Reason: each beam is a new request in each step (entrypoints/generate/beam_search/offline.py:75), whose prompt is the beam so far. With
    w beams and t tokens they would leave 1 + w * (t - 1) files for each prompt, nearly all of them of beams that were dropped, and
    nothing tells which is which.

    Args:
        offline_module: the module `vllm.entrypoints.generate.beam_search.offline`.

    Raises:
        IncompatibleVersionError: it makes no SamplingParams, or searches elsewhere.
    """
    _, sampling_params = require(offline_module, OFFLINE_MODULE, "SamplingParams")
    mixin, original = require(offline_module, OFFLINE_MODULE, "BeamSearchOfflineMixin", "beam_search")

    @functools.wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _opts_out.set(our_config(self.llm_engine.vllm_config) is not None)
        try:
            return original(self, *args, **kwargs)
        finally:
            _opts_out.reset(before)

    offline_module.SamplingParams = _opting_out(sampling_params)
    mixin.beam_search = beam_search


def extract_no_online_beams(online_module: Any) -> None:
    """Have the requests that the API server's beam search makes opt out of extraction, and its answer say so.

    Reason: as offline (entrypoints/generate/beam_search/online.py:60). What the client said in kv_transfer_params, an opt-out too, reaches
    none of these requests, so the engine cannot know it.

    Args:
        online_module: the module `vllm.entrypoints.generate.beam_search.online`.

    Raises:
        IncompatibleVersionError: it makes no SamplingParams, or searches elsewhere.
    """
    _, sampling_params = require(online_module, ONLINE_MODULE, "SamplingParams")
    mixin, original = require(online_module, ONLINE_MODULE, "BeamSearchOnlineMixin", "beam_search")

    @functools.wraps(original)
    async def beam_search(self: Any, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        config = our_config(self.engine_client.vllm_config)
        # Not reset: the next step of a generator may run in another context, and this one is the HTTP request's own.
        _opts_out.set(config is not None)
        async for output in original(self, prompt, request_id, params, *args, **kwargs):
            if config is not None:
                output.kv_transfer_params = _answer(config, getattr(params, _CLIENT_PARAMS, None))
            yield output

    online_module.SamplingParams = _opting_out(sampling_params)
    mixin.beam_search = beam_search


def keep_params_of_completion(protocol_module: Any) -> None:
    """Have a completion's beam search know the client's kv_transfer_params, to answer them.

    Reason: BeamSearchParams have no field for them (entrypoints/openai/completion/protocol.py:223).

    Args:
        protocol_module: the module `vllm.entrypoints.openai.completion.protocol`.

    Raises:
        IncompatibleVersionError: a request is no CompletionRequest, or makes its parameters elsewhere.
    """
    _keep_params(*require(protocol_module, COMPLETION_MODULE, "CompletionRequest", "to_beam_search_params"))


def keep_params_of_chat(protocol_module: Any) -> None:
    """Have a chat's beam search know the client's kv_transfer_params, to answer them.

    Reason: BeamSearchParams have no field for them (entrypoints/openai/chat_completion/protocol.py:531).

    Args:
        protocol_module: the module `vllm.entrypoints.openai.chat_completion.protocol`.

    Raises:
        IncompatibleVersionError: a request is no ChatCompletionRequest, or makes its parameters elsewhere.
    """
    _keep_params(*require(protocol_module, CHAT_MODULE, "ChatCompletionRequest", "to_beam_search_params"))


def _keep_params(request_class: Any, original: Any) -> None:
    @functools.wraps(original)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        setattr(params, _CLIENT_PARAMS, self.kv_transfer_params)
        return params

    request_class.to_beam_search_params = to_beam_search_params


def _opting_out(sampling_params: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if _opts_out.get():
            kwargs["extra_args"] = {"kv_transfer_params": {EXTRACT_KEY: False}}
        return sampling_params(*args, **kwargs)

    return make


def our_config(vllm_config: Any) -> HsxConfig | None:
    """Our connector's options; None if the engine has another connector, which must not see params of ours, or none."""
    try:
        return read_options(vllm_config.kv_transfer_config)
    except HsxConfigError:
        return None


def _answer(config: HsxConfig, client_params: Any) -> dict[str, Any] | None:
    """What the response says of hidden states: why there are none, if there would be some without beam search."""
    try:
        extract = read_params(client_params, ServerParams(None, extract_all=config.extract == "all")).extract
    except ParamsError:
        extract = True  # it asks for something
    return {ERROR_KEY: NOT_EXTRACTED} if extract else None
