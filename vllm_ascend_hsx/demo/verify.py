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

    Attributes:
        tokens: tokens with rows in the file. generated: number of generated tokens among them.
        shape: shape of the rows; empty if nothing was read.
        max_difference: NaN if nothing was compared.
    """

    request: str
    tokens: int
    generated: int
    passed: bool
    verdict: str
    shape: tuple[int, ...] = ()
    size: int = 0
    max_difference: float = math.nan


def verify(
    answer: Answer, layer_ids: Sequence[int], reference: Reference | None, roundings: float = 1.0
) -> Row:
    """Check that an answer's file has the request's tokens and layers, and the reference's states.

    The reference gets the answer's own tokens after the prompt (teacher forcing).

    Without a reference (a model too large for this machine's memory) only shape, token ids and
    finiteness are checked. Roundings: see compare.
    """
    tokens = len(answer.token_ids)
    row = Row(answer.prompt.kind, tokens, tokens - len(answer.prompt_ids), False, "")
    try:
        states = load(answer.path, READ_SECONDS)
    except (HiddenStatesError, OSError) as error:  # includes TimeoutError
        return row._replace(verdict=f"no file: {error}")
    row = row._replace(shape=tuple(states.hidden_states.shape), size=answer.path.stat().st_size)
    if problem := _contradiction(answer, layer_ids, states):
        return row._replace(verdict=problem)
    if reference is None:
        finite = bool(states.hidden_states.isfinite().all())
        return row._replace(
            passed=finite, verdict="finite, not compared" if finite else "NaN or infinity"
        )
    result = compare(
        states.hidden_states, reference(answer.token_ids, layer_ids), layer_ids, roundings
    )
    return row._replace(
        passed=result.matches,
        verdict=result.reason or result.verdict,
        max_difference=result.max_abs_difference,
    )


def _contradiction(answer: Answer, layer_ids: Sequence[int], states: HiddenStates) -> str:
    """Return the difference between file and request, or ""."""
    sent = answer.prompt.content
    if isinstance(sent, list) and answer.prompt_ids != sent:
        return "the response's prompt_token_ids are not the ids that were sent"
    count, asked = len(answer.generated), answer.prompt.max_tokens
    if count != asked:
        return f"the response has {count} tokens, the request was for {asked}"
    if states.token_ids.tolist() != answer.token_ids:
        return (
            f"the file's token_ids ({len(states.token_ids)}) are not the request's "
            f"({len(answer.token_ids)})"
        )
    if states.num_prompt_tokens != len(answer.prompt_ids):
        told = states.num_prompt_tokens
        return f"the file records {told} prompt tokens, not {len(answer.prompt_ids)}"
    if states.layer_ids != list(layer_ids):
        return f"the file holds layers {states.layer_ids}, the request was for {list(layer_ids)}"
    return ""
