"""The client's kv_transfer_params at endpoints where vLLM 0.23.0 drops them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from vllm_ascend_hsx.compat.beam_search import our_config
from vllm_ascend_hsx.compat.patch_points import patch
from vllm_ascend_hsx.compat.versions import V0_23

TOKENS = "vllm.entrypoints.serve.disagg.serving"
SCORING = "vllm.entrypoints.generate.generative_scoring.serving"
_SCORED = "/generative_scoring takes kv_transfer_params"
_KEY = "kv_transfer_params"

_of_scoring: ContextVar[dict[str, Any] | None] = ContextVar(
    "hsx_extra_args_of_scoring", default=None
)


@patch(
    TOKENS,
    "ServingTokens.serve_tokens",
    V0_23,
    why="/inference/v1/generate takes kv_transfer_params",
)
async def serve_tokens(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Have `/inference/v1/generate` pass the client's kv_transfer_params on, as completions do.

    Reason: it has a field for them that nothing reads (entrypoints/serve/disagg/protocol.py:112).
    """
    if request.kv_transfer_params and our_config(self.engine_client.vllm_config) is not None:
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), _KEY: request.kv_transfer_params}
    return await original(self, request, *args, **kwargs)


@patch(SCORING, "ServingGenerativeScoring.create_generative_scoring", V0_23, why=_SCORED)
async def score(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Have `/generative_scoring` pass the client's kv_transfer_params on with each item.

    Reason: its request has no field for them, and keeps them as an unknown one
    (entrypoints/generate/generative_scoring/serving.py:50). Its answer has none either; `find`
    leads to the files.
    """
    given = (request.model_extra or {}).get(_KEY)
    ours = given is not None and our_config(self.engine_client.vllm_config) is not None
    _of_scoring.set(
        {_KEY: given} if ours else None
    )  # not reset: the context is the HTTP request's own
    return await original(self, request, *args, **kwargs)


@patch(SCORING, "SamplingParams", V0_23, why=_SCORED)
def add_scoring_params(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the sampling parameters of an item, which are the only place for kv_transfer_params."""
    if (extra_args := _of_scoring.get()) is not None:
        kwargs["extra_args"] = extra_args
    return original(*args, **kwargs)
