"""Turns on the rows of one request: what overlaps keeps its order, what does not comes side by side, and every turn comes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from vllm_ascend_hsx.connector.row_order import EVERY_POSITION, Positions, RowOrder, Turn
from vllm_ascend_hsx.connector.threads import WriterJob

spans = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda span: (span[0], span[0] + span[1]))


def overlap(left: Positions, right: Positions) -> bool:
    return left[0] < right[1] and right[0] < left[1]


@given(work=st.lists(st.one_of(spans, st.just(EVERY_POSITION)), max_size=10), side_by_side=st.booleans(), data=st.data())
def test_a_turn_comes_as_soon_as_it_is_ready_and_all_earlier_ones_on_its_rows_have_ended(
    work: list[Positions], side_by_side: bool, data: st.DataObject
) -> None:
    order = RowOrder(side_by_side)
    jobs: list[WriterJob] = [lambda: () for _ in work]
    turns: list[Turn] = []
    ready: set[int] = set()
    running: set[int] = set()
    ended: set[int] = set()

    def may_run(index: int) -> bool:
        return index in ready and not any(
            other not in ended and (not side_by_side or overlap(work[index], work[other])) for other in range(index)
        )

    while len(ended) < len(work):
        steps = [("enter", len(turns))] if len(turns) < len(work) else []
        steps += [("ready", index) for index in range(len(turns)) if index not in ready]
        steps += [("end", index) for index in sorted(running)]
        step, index = data.draw(st.sampled_from(steps))  # none to draw from: a turn never came
        if step == "enter":
            turns.append(order.enter(work[index]))
        elif step == "ready":
            ready.add(index)
            if order.ready(turns[index], jobs[index]):
                running.add(index)
        else:
            running.remove(index)
            ended.add(index)
            running |= {jobs.index(job) for job in order.end(turns[index])}
        assert running == {each for each in range(len(turns)) if each not in ended and may_run(each)}
