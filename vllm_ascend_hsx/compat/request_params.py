"""What a client says in kv_transfer_params at endpoints where vLLM 0.23.0 drops it on its way to the engine."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from vllm_ascend_hsx.compat.beam_search import our_config
from vllm_ascend_hsx.compat.versions import require

TOKENS_MODULE = "vllm.entrypoints.serve.disagg.serving"
SCORING_MODULE = "vllm.entrypoints.generate.generative_scoring.serving"
_KEY = "kv_transfer_params"

_of_scoring: ContextVar[dict[str, Any] | None] = ContextVar("hsx_extra_args_of_scoring", default=None)


def pass_params_of_tokens(serving_module: Any) -> None:
    """Have `/inference/v1/generate` pass the client's kv_transfer_params on, as completions do.

    Reason: it has a field for them that nothing reads (entrypoints/serve/disagg/protocol.py:112).

    Args:
        serving_module: the module `vllm.entrypoints.serve.disagg.serving`.

    Raises:
        IncompatibleVersionError: it serves tokens elsewhere.
    """
    serving, original = require(serving_module, TOKENS_MODULE, "ServingTokens", "serve_tokens")

    @functools.wraps(original)
    async def serve_tokens(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.kv_transfer_params and our_config(self.engine_client.vllm_config) is not None:
            params = request.sampling_params
            params.extra_args = {**(params.extra_args or {}), _KEY: request.kv_transfer_params}
        return await original(self, request, *args, **kwargs)

    serving.serve_tokens = serve_tokens


def pass_params_of_scoring(serving_module: Any) -> None:
    """Have `/generative_scoring` pass the client's kv_transfer_params on with each item.

    Reason: its request has no field for them, and keeps them as something that it does not know
    (entrypoints/generate/generative_scoring/serving.py:50). What it answers has none either; `find` leads to the files.

    Args:
        serving_module: the module `vllm.entrypoints.generate.generative_scoring.serving`.

    Raises:
        IncompatibleVersionError: it makes no SamplingParams, or scores elsewhere.
    """
    _, sampling_params = require(serving_module, SCORING_MODULE, "SamplingParams")
    serving, original = require(serving_module, SCORING_MODULE, "ServingGenerativeScoring", "create_generative_scoring")

    @functools.wraps(original)
    async def score(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        said = (request.model_extra or {}).get(_KEY)
        # Not reset: the context is the HTTP request's own.
        _of_scoring.set({_KEY: said} if said is not None and our_config(self.engine_client.vllm_config) is not None else None)
        return await original(self, request, *args, **kwargs)

    def make(*args: Any, **kwargs: Any) -> Any:
        if (extra_args := _of_scoring.get()) is not None:
            kwargs["extra_args"] = extra_args
        return sampling_params(*args, **kwargs)

    serving_module.SamplingParams = make
    serving.create_generative_scoring = score
