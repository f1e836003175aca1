"""Admission: which new requests a rank can take without a step having to wait for storage."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from vllm_ascend_hsx.connector.metadata import RankState


class Cost(NamedTuple):
    """Most bytes of rows that a request makes.

    Attributes:
        prompt, output: bytes of its prompt's rows, and of those of generated tokens.
    """

    prompt: int
    output: int


class RankLoad:
    """What a rank has yet to write, as known to the scheduler.

    The sources are its last report and the requests started since.

    A fluid model predicts whether memory suffices. Rows of prompts arrive at P bytes per second,
    and those of generated tokens at D, one row per step and request. Storage takes W. Of F bytes
    that arrive at rate P, F * (1 - W / P) are in memory when the last one has arrived. Unknown
    rates are assumed to be the worst: W is 0, and P and D are infinite.

    Args:
        ring_bytes: memory for rows that wait to be written.
        row_bytes: bytes of one token's rows.

    Attributes:
        state: the rank's last report.
    """

    def __init__(self, ring_bytes: int, row_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._row_bytes = row_bytes
        self._unreported: deque[Cost] = deque()
        self._promised: list[Cost] = []
        self.state = RankState()

    def report(self, state: RankState) -> None:
        """Record the state that the rank has reported."""
        for _ in range(state.started - self.state.started):
            self._unreported.popleft()
        self.state = state

    def promise(self, cost: Cost) -> None:
        """Add a request that was admitted.

        Only `start` makes it certain that the request begins.
        """
        self._promised.append(cost)

    def start(self, costs: list[Cost]) -> None:
        """Add requests that begin, and drop all other admitted ones."""
        self._promised = []
        self._unreported.extend(costs)

    @property
    def owed(self) -> int:
        """Bytes that started requests may still make or have not written."""
        return self._future()[0] + self._future()[1] + self.state.backlog

    def admits(self, cost: Cost) -> bool:
        """Return whether memory suffices if this request is added.

        A request larger than the memory runs once all others need no more and half of the memory is
        free. To wait until all memory is free would leave storage idle until the first rows arrive.
        """
        if self.state.quiet or (self.state.opens_slowly and (self._unreported or self._promised)):
            return False
        prompt, output, generating = self._future()
        backlog = self.state.backlog
        peak = backlog + self._stays(prompt + cost.prompt, output + cost.output, generating + bool(cost.output))
        if peak <= self._ring_bytes:
            return True
        too_large = self._stays(*cost, bool(cost.output)) > self._ring_bytes
        return too_large and backlog <= self._ring_bytes / 2 and not self._stays(prompt, output, generating)

    def _future(self) -> tuple[int, int, int]:
        """Return the bytes to come, of prompts and of output, and how many requests generate."""
        state, waiting = self.state, [*self._unreported, *self._promised]
        prompt = state.prompt_owed - state.backlog
        output = state.output_owed + min(prompt, 0)
        return (
            max(prompt, 0) + sum(cost.prompt for cost in waiting),
            max(output, 0) + sum(cost.output for cost in waiting),
            state.generating + sum(cost.output > 0 for cost in waiting),
        )

    def _stays(self, prompt: int, output: int, generating: int) -> float:
        """Return how many of the bytes to come are in memory at most."""
        state = self.state
        steps = state.step_rate and state.step_rate * generating * self._row_bytes
        return prompt * self._surplus(state.prompt_rate) + output * self._surplus(steps)

    def _surplus(self, coming: float | None) -> float:
        if coming is None:
            return 1.0
        return max(0.0, 1 - (self.state.write_rate or 0.0) / coming) if coming else 0.0
