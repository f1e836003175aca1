"""Compare the file of each answer with the reference."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_ascend_hsx.demo.client import Answer
from vllm_ascend_hsx.demo.compare import compare
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load

READ_SECONDS = 60.0

Reference = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


class Row(NamedTuple):
    """One request of the table.

    max_difference is NaN if nothing was compared; shape is empty if nothing was read.
    """

    request: str
    tokens: int
    shape: tuple[int, ...]
    size: int
    max_difference: float
    passed: bool
    verdict: str


def verify(answer: Answer, layer_ids: Sequence[int], reference: Reference | None) -> Row:
    """Check that an answer's file has the tokens sent, the layers and the reference's states.

    Without a reference (a model too large for this machine's memory) only shape, token ids and
    finiteness are checked.
    """
    prompt = answer.prompt
    try:
        states = load(answer.path, READ_SECONDS)
    except (HiddenStatesError, OSError) as error:  # TimeoutError is an OSError
        return Row(prompt.kind, len(answer.token_ids), (), 0, math.nan, False, f"no file: {error}")
    shape, size = tuple(states.hidden_states.shape), answer.path.stat().st_size
    problem = _contradiction(answer, layer_ids, states)
    if problem:
        return Row(prompt.kind, len(answer.token_ids), shape, size, math.nan, False, problem)
    if reference is None:
        finite = bool(states.hidden_states.isfinite().all())
        verdict = "finite, not compared" if finite else "NaN or infinity"
        return Row(prompt.kind, shape[0], shape, size, math.nan, finite, verdict)
    result = compare(states.hidden_states, reference(answer.token_ids, layer_ids), layer_ids)
    return Row(
        prompt.kind,
        shape[0],
        shape,
        size,
        result.max_abs_difference,
        result.matches,
        result.reason or result.verdict,
    )


def _contradiction(answer: Answer, layer_ids: Sequence[int], states: HiddenStates) -> str:
    """Return how the file contradicts the request, or ""."""
    sent = answer.prompt.content
    if isinstance(sent, list) and answer.token_ids != sent:
        return "the response's prompt_token_ids are not the ids that were sent"
    if states.token_ids.tolist() != answer.token_ids:
        return (
            f"the file's token_ids ({len(states.token_ids)}) are not the request's "
            f"({len(answer.token_ids)})"
        )
    if states.layer_ids != list(layer_ids):
        return f"the file holds layers {states.layer_ids}, the request was for {list(layer_ids)}"
    return ""
