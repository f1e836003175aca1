"""Which writes of one request's rows may run at the same time: a row that is computed again is written behind its first version."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from vllm_ascend_hsx.connector.threads import WriterJob

Positions = tuple[int, float]  # [first, end) of tokens
EVERY_POSITION: Positions = (0, math.inf)


@dataclass(eq=False)
class Turn:
    """Somebody's place in a RowOrder.

    Attributes:
        positions: what it is about.
        job: what waits for the turn, once it is ready.
        begun: whether it has been given out.
    """

    positions: Positions
    job: WriterJob | None = None
    begun: bool = False


class RowOrder:
    """A turn comes when all earlier ones that concern the same rows have ended; others may come at the same time.

    A request computes its rows in order, so its pieces can be written by several threads. Only after a preemption does it come back to rows
    that may still be on their way to the file.

    Args:
        side_by_side: whether turns that concern different rows may come at the same time, or all come one after the other.
    """

    def __init__(self, side_by_side: bool = True) -> None:
        self._side_by_side = side_by_side
        self._mutex = threading.Lock()
        self._turns: list[Turn] = []  # that have not ended, in order

    def enter(self, positions: Positions) -> Turn:
        """A turn behind those that were entered earlier. Each must become ready, and then end."""
        turn = Turn(positions)
        with self._mutex:
            self._turns.append(turn)
        return turn

    def ready(self, turn: Turn, job: WriterJob) -> bool:
        """`job` can run. True: now, and the caller runs it. False: the end of another turn will return it."""
        with self._mutex:
            turn.job = job
            turn.begun = self._has_come(turn, self._turns.index(turn))
            return turn.begun

    def end(self, turn: Turn) -> list[WriterJob]:
        """Its job has run. Returns those whose turn has come now: the caller has them run."""
        jobs: list[WriterJob] = []
        with self._mutex:
            self._turns.remove(turn)
            for index, each in enumerate(self._turns):
                if each.job is not None and not each.begun and self._has_come(each, index):
                    each.begun = True
                    jobs.append(each.job)
        return jobs

    def _has_come(self, turn: Turn, index: int) -> bool:
        if not self._side_by_side:
            return index == 0
        first, end = turn.positions
        return not any(first < other.positions[1] and other.positions[0] < end for other in self._turns[:index])
