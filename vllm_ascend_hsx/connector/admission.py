"""Which new requests a rank can take without a step having to wait for storage: what is owed, and what comes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from vllm_ascend_hsx.connector.metadata import RankState

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Debt:
    prompt_end: int
    prompt: int
    output: int


class OwedRows(Generic[Key]):
    """Rows that requests under way have still to get written, at most. Not safe for threads by itself.

    Attributes:
        prompt, output: rows of prompts, and of generated tokens. generating: requests that owe some of these.
    """

    def __init__(self) -> None:
        self._debts: dict[Key, _Debt] = {}
        self.prompt = self.output = self.generating = 0

    def __iter__(self) -> Iterator[Key]:
        return iter(self._debts)

    def __len__(self) -> int:
        return len(self._debts)

    def begin(self, request: Key, prompt_rows: int, output_rows: int) -> None:
        """The request is under way."""
        self._debts[request] = _Debt(prompt_rows, prompt_rows, output_rows)
        self.prompt += prompt_rows
        self.output += output_rows
        self.generating += output_rows > 0

    def wrote(self, request: Key, first: int, end: int) -> None:
        """Rows of these token positions have left the memory. Nothing is known of a request that has ended."""
        debt = self._debts.get(request)
        if debt is not None:
            of_prompt = max(0, min(end, debt.prompt_end) - first)
            self._settle(debt, min(of_prompt, debt.prompt), min(end - first - of_prompt, debt.output))

    def end(self, request: Key) -> None:
        """Nothing more of it will be written."""
        debt = self._debts.pop(request, None)
        if debt is not None:
            self._settle(debt, debt.prompt, debt.output)

    def _settle(self, debt: _Debt, prompt: int, output: int) -> None:
        debt.prompt -= prompt
        debt.output -= output
        self.prompt -= prompt
        self.output -= output
        self.generating -= output > 0 and not debt.output


class Cost(NamedTuple):
    """Bytes of rows that a request makes at most.

    Attributes:
        prompt, output: of its prompt, and of the tokens that it generates.
    """

    prompt: int
    output: int


class RankLoad:
    """What a rank has to write, as the scheduler knows it: by its last report, and by what it was given since.

    Whether memory lasts is reckoned with a model in which everything flows. Rows of prompts come at P bytes per
    second, those of generated tokens at D, of each such request one row with each step; storage takes W. Of F
    bytes that come at rate P, F * (1 - W / P) are in memory when the last of them has come. What is not known is
    taken to be bad: no W is 0, no P or D infinite.

    Args:
        ring_bytes: memory that rows wait in.
        row_bytes: of one token.

    Attributes:
        state: its last report.
    """

    def __init__(self, ring_bytes: int, row_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._row_bytes = row_bytes
        self._unreported: deque[Cost] = deque()
        self._promised: list[Cost] = []
        self.state = RankState()

    def report(self, state: RankState) -> None:
        """The rank has told how far it is."""
        for _ in range(state.started - self.state.started):
            self._unreported.popleft()
        self.state = state

    def promise(self, cost: Cost) -> None:
        """A request was let through; until `start` it is not certain that it begins."""
        self._promised.append(cost)

    def start(self, costs: list[Cost]) -> None:
        """These requests begin, and of those that were promised no other."""
        self._promised = []
        self._unreported.extend(costs)

    @property
    def owed(self) -> int:
        """Bytes that requests which have begun may still make, or have not written."""
        return self._future()[0] + self._future()[1] + self.state.backlog

    def admits(self, cost: Cost) -> bool:
        """Whether memory will last with this request, too.

        One that memory would not last for in any case runs when the others need none of it any more, and half of
        it is free; not all, so that the storage has something to do until its first rows come.
        """
        if self.state.quiet:
            return False
        prompt, output, generating = self._future()
        backlog = self.state.backlog
        peak = backlog + self._stays(prompt + cost.prompt, output + cost.output, generating + bool(cost.output))
        if peak <= self._ring_bytes:
            return True
        too_large = self._stays(*cost, bool(cost.output)) > self._ring_bytes
        return too_large and backlog <= self._ring_bytes / 2 and not self._stays(prompt, output, generating)

    def _future(self) -> tuple[int, int, int]:
        """Bytes of prompts and of generated tokens that are still to come, and how many requests generate."""
        state, waiting = self.state, [*self._unreported, *self._promised]
        prompt = state.prompt_owed - state.backlog
        output = state.output_owed + min(prompt, 0)
        return (
            max(prompt, 0) + sum(cost.prompt for cost in waiting),
            max(output, 0) + sum(cost.output for cost in waiting),
            state.generating + sum(cost.output > 0 for cost in waiting),
        )

    def _stays(self, prompt: int, output: int, generating: int) -> float:
        """How much of what is to come is in memory at the worst."""
        state = self.state
        steps = state.step_rate and state.step_rate * generating * self._row_bytes
        return prompt * self._surplus(state.prompt_rate) + output * self._surplus(steps)

    def _surplus(self, coming: float | None) -> float:
        if coming is None:
            return 1.0
        return max(0.0, 1 - (self.state.write_rate or 0.0) / coming) if coming else 0.0
