"""Jobs of a lane keep their order, and run concurrently only if they share it."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_ascend_hsx.connector.lane import Lane
from vllm_ascend_hsx.connector.threads import Job


class LaneMachine(RuleBasedStateMachine):
    """A lane, and a model: the list of all jobs in order, waiting, running or ended."""

    shares = True

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane(self.shares)
        self.alone: list[bool] = []  # by job
        self.running: set[int] = set()
        self.ended: set[int] = set()

    def _add(self, alone: bool) -> int:
        self.alone.append(alone or not self.shares)
        return len(self.alone) - 1

    @rule(alone=st.booleans())
    def enter(self, alone: bool) -> None:
        number = self._add(alone)
        if self.lane.enter(partial(self._number, number), alone):
            self.running.add(number)

    @rule()
    def enter_if_empty(self) -> None:
        was_empty = len(self.ended) == len(self.alone)
        assert self.lane.enter_if_empty() == was_empty
        if was_empty:
            self.running.add(self._add(alone=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(number)
        self.ended.add(number)
        ready: list[Job] = self.lane.leave()
        begun = [job() for job in ready]
        assert begun == sorted(begun), "they begin in order"
        self.running.update(begun)  # type: ignore[arg-type]

    @staticmethod
    def _number(number: int) -> int:
        return number

    @invariant()
    def jobs_keep_their_order(self) -> None:
        begun = self.running | self.ended
        assert begun == set(range(len(begun))), "a job has overtaken another one"
        if any(self.alone[number] for number in self.running):
            assert len(self.running) == 1, "a job is not alone"

    @invariant()
    def no_job_waits_without_need(self) -> None:
        first = len(self.running) + len(self.ended)
        if first < len(self.alone):
            assert self.running
            assert self.alone[first] or any(self.alone[number] for number in self.running)


class ExclusiveLaneMachine(LaneMachine):
    """A lane in which every job runs alone."""

    shares = False


TestLane = LaneMachine.TestCase
TestExclusiveLane = ExclusiveLaneMachine.TestCase
