"""Parameters of requests at endpoints where vLLM 0.23.0 drops the client's kv_transfer_params."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_26, V0_23
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.api import PATH_KEY, one_file_for_all
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.transfer_config import read_options

TOKENS_0_23 = "vllm.entrypoints.serve.disagg.serving"
TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving"
BATCH = "vllm.entrypoints.openai.chat_completion.batch_serving"
SCORING = "vllm.entrypoints.generate.generative_scoring.serving"
OFFLINE = "vllm.entrypoints.generate.beam_search.offline"
ONLINE = "vllm.entrypoints.generate.beam_search.online"
_SCORED = "/generative_scoring takes kv_transfer_params"
_GENERATED = "/inference/v1/generate takes kv_transfer_params"
_KEY = "kv_transfer_params"

# extra_args for the SamplingParams that are made in this context.
extra_args: ContextVar[dict[str, Any] | None] = ContextVar("hsx_extra_args", default=None)


def our_config(vllm_config: Any) -> HsxConfig | None:
    """Return our connector's options; None if the engine has another connector or none."""
    try:
        return read_options(vllm_config.kv_transfer_config)
    except UserError:
        return None


@patch(TOKENS_0_23, "ServingTokens.serve_tokens", V0_23, why=_GENERATED)
@patch(TOKENS, "ServingTokens.serve_tokens", SINCE_0_26, why=_GENERATED)
async def serve_tokens(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Have `/inference/v1/generate` pass the client's kv_transfer_params on, as completions do.

    Reason: it has a field for them that nothing reads (entrypoints/serve/disagg/protocol.py:112).
    """
    if request.kv_transfer_params and our_config(self.engine_client.vllm_config) is not None:
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), _KEY: request.kv_transfer_params}
    return await original(self, request, *args, **kwargs)


@patch(SCORING, "ServingGenerativeScoring.create_generative_scoring", SINCE_0_23, why=_SCORED)
async def score(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Have `/generative_scoring` pass the client's kv_transfer_params on with each item.

    Reason: its request has no field for them, and keeps them as an unknown one
    (entrypoints/generate/generative_scoring/serving.py:50). Its answer has none either; `find`
    leads to the files.
    """
    given = (request.model_extra or {}).get(_KEY)
    ours = given is not None and our_config(self.engine_client.vllm_config) is not None
    extra_args.set({_KEY: given} if ours else None)  # not reset: the context is the HTTP request's
    return await original(self, request, *args, **kwargs)


_BATCH = "a batch of chats may choose no file"
uses(BATCH, "OpenAIServingChatBatch.create_error_response", SINCE_0_23, takes="message", why=_BATCH)


@patch(BATCH, "OpenAIServingChatBatch.create_batch_chat_completion", SINCE_0_23, why=_BATCH)
async def answer_batch(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse one file for several conversations.

    Reason: their ids do not tell which is the first one, because clients choose ids that end with a
    number, and the answer has no field for errors of files.
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
    """Make sampling parameters with the extra_args of this context."""
    if (extra := extra_args.get()) is not None:
        kwargs["extra_args"] = extra
    return original(*args, **kwargs)
