"""The rows that all contestants write, and the steps that requests in flight share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.protocol.rows import RowFormat

# MiniMax-M2 with four layers in bfloat16: 24,576 bytes per token.
MINIMAX_M2 = RowFormat(
    layer_ids=(2, 31, 59, 62), hidden_size=3072, dtype="BF16", model="MiniMaxAI/MiniMax-M2"
)
# For the smoke test, as small as direct I/O allows: 4,096 bytes per token.
TINY = RowFormat(layer_ids=(2, 0), hidden_size=1024, dtype="BF16", model="tiny")

DTYPE = torch.bfloat16
PAGE = 4096  # alignment of offsets, sizes and memory for O_DIRECT
STEP_TOKENS = 2048  # tokens of one step of the engine (max_num_batched_tokens)


def npu() -> Any:
    """Return torch.npu, provided by torch_npu."""
    return torch.npu  # type: ignore[attr-defined]


class Source:
    """Rows with the same bytes in pinned host memory and on the NPU.

    Args:
        row_format: BF16.
        tokens: number of rows; they exceed the processor's caches, so all reads go to memory.

    Attributes:
        host: pinned [tokens, layers, hidden], page-aligned.
        device: the same on the NPU.
    """

    def __init__(self, row_format: RowFormat, tokens: int, device: torch.device) -> None:
        self.row_format = row_format
        self.tokens = tokens
        num_bytes = tokens * row_format.row_bytes
        memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8, pin_memory=True)
        begin = -memory.data_ptr() % PAGE
        self.host = (
            memory[begin : begin + num_bytes].view(DTYPE).view(tokens, *row_format.row_shape)
        )
        # Finite values of bfloat16 (exponent below 0xff); all rows differ.
        bits = np.random.default_rng(0).integers(
            0, 0x7F80, size=(tokens, *row_format.row_shape), dtype=np.int16
        )
        self.host.view(torch.int16).copy_(torch.from_numpy(bits))
        self.device = self.host.to(device)

    def bytes_of(self, first: int, count: int) -> memoryview:
        """Return the bytes of rows [first, first + count) of the pinned copy, not copied."""
        view: memoryview = (
            self.host[first : first + count].view(torch.uint8).numpy().reshape(-1).data
        )
        return view


# Part of a step: request id, first token position, number of rows.
Part = tuple[str, int, int]


@dataclass(frozen=True)
class Step:
    """Work of one step.

    Attributes:
        source: first row of the step in the source.
        spans: spans of the requests; `Span.row` counts from `source`.
    """

    source: int
    spans: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        return sum(span.num_rows for span in self.spans)

    @property
    def begins(self) -> list[str]:
        """Return the requests whose first row is in this step."""
        return [span.request_id for span in self.spans if span.first == 0]


@dataclass(frozen=True)
class Load:
    """Equal requests, with a fixed number in flight.

    Attributes:
        tokens: tokens per request.
        requests: total number.
        in_flight: number in flight; when these are done, the next ones begin.
        source_tokens: rows of the source.
        step_tokens: rows of a step.
        evenly: all requests in flight share each step. Otherwise a step serves them first come,
            first served, like vLLM's scheduler: whole prompts as long as they fit, then a part of
            one. The rest of this prompt comes first in the next step.
    """

    tokens: int
    requests: int
    in_flight: int
    source_tokens: int
    step_tokens: int = STEP_TOKENS
    evenly: bool = False

    def __post_init__(self) -> None:
        if self.requests % self.in_flight:
            raise ValueError(
                f"{self.requests} requests cannot be divided into groups of "
                f"{self.in_flight} in flight"
            )
        if max(self.tokens, self.step_tokens, self.in_flight) > self.source_tokens:
            raise ValueError(
                f"requests of {self.tokens} tokens and steps of {self.step_tokens} need "
                "a source of at least this size"
            )

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Return ids like vLLM's, unique by the last 8 digits: no two requests share a file."""
        return tuple(f"cmpl-{index}-0-{index:08x}" for index in range(self.requests))

    @cached_property
    def waves(self) -> tuple[tuple[Step, ...], ...]:
        """Yield the steps of each group of requests that are in flight together."""
        cut = self._cut_evenly if self.evenly else self._cut_in_turn
        at, waves = 0, []
        for begin in range(0, self.requests, self.in_flight):
            steps = []
            for parts in cut(self.ids[begin : begin + self.in_flight]):
                total = sum(count for _, _, count in parts)
                at = 0 if at + total > self.source_tokens else at
                spans, row = [], 0
                for request_id, first, count in parts:
                    spans.append(Span(request_id, first, count, row))
                    row += count
                steps.append(Step(at, tuple(spans)))
                at += total
            waves.append(tuple(steps))
        return tuple(waves)

    def _cut_in_turn(self, ids: Sequence[str]) -> Iterator[list[Part]]:
        step: list[Part] = []
        room = self.step_tokens
        for request_id in ids:
            first = 0
            while first < self.tokens:
                count = min(room, self.tokens - first)
                step.append((request_id, first, count))
                first, room = first + count, room - count
                if room == 0:
                    yield step
                    step, room = [], self.step_tokens
        if step:
            yield step

    def _cut_evenly(self, ids: Sequence[str]) -> Iterator[list[Part]]:
        share = max(1, min(self.tokens, self.step_tokens // len(ids)))
        for first in range(0, self.tokens, share):
            yield [(request_id, first, min(share, self.tokens - first)) for request_id in ids]

    @property
    def num_rows(self) -> int:
        return self.tokens * self.requests

    def first_row(self, index: int) -> int:
        """Return the first source row of request `index`, for contestants that write one piece."""
        places = self.source_tokens - self.tokens + 1
        return (
            index * 977 % places
        )  # spread out: no request finds data of the previous one in the caches

    def expected(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the expected rows of each request, [tokens, layers, hidden]."""
        pieces: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in self.ids}
        for step in (step for wave in self.waves for step in wave):
            for span in step.spans:
                begin = step.source + span.row
                pieces[span.request_id].append(source[begin : begin + span.num_rows])
        return {request_id: torch.cat(rows) for request_id, rows in pieces.items()}


def token_ids(tokens: int) -> np.ndarray:
    """int64 [tokens]."""
    return np.arange(tokens, dtype=np.int64) * 3 + 1


def assert_files_are_right(files: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
    """Compare loaded tensors with the expected rows, bit by bit.

    Raises:
        AssertionError: they differ, so the figures are worthless.
    """
    for tensors, rows in files:
        if not torch.equal(tensors["hidden_states"].view(torch.int16), rows.view(torch.int16)):
            raise AssertionError("a file does not hold the written rows")
        if not np.array_equal(tensors["token_ids"].numpy(), token_ids(len(rows))):
            raise AssertionError("a file does not hold the written token ids")
