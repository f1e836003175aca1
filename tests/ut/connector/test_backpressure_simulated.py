"""Back-pressure in a simulated engine: steps never wait, and fast storage costs nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest

from vllm_ascend_hsx.connector.admission import Cost, RankLoad
from vllm_ascend_hsx.connector.metadata import RankState
from vllm_ascend_hsx.connector.progress import StepRate

BUDGET = 1024  # tokens of a step
RING = 2 * BUDGET  # rows; a row has one byte
SEATS = 256
STEP_S, TOKEN_S = 0.01, 0.0001
NEEDED = BUDGET / (STEP_S + BUDGET * TOKEN_S)  # rows per second of prompts that fill the steps


@dataclass(eq=False)
class Request:
    """The rows of a request that are not computed yet."""

    prompt: int
    output: int = 0


class Engine:
    """An engine of one rank that always has `in_flight` requests of one size.

    A report arrives one step late. A step waits if the ring is full and neither of the two staging
    slots is free.

    Args:
        storage: rows per second that storage takes.
        chunk: most tokens of one prompt in a step.
    """

    def __init__(
        self,
        storage: float,
        prompt: int,
        output: int = 0,
        in_flight: int = SEATS,
        chunk: int = BUDGET,
    ) -> None:
        self.storage, self.in_flight, self.chunk = storage, in_flight, chunk
        self.size = Cost(prompt, output)
        self.load = RankLoad(RING, row_bytes=1)
        self.now = 0.0
        self.rate = StepRate(lambda: self.now)
        self.running: list[Request] = []
        self.reports = deque([RankState()])
        self.begun, self.computed, self.last_rows = 0, 0, 0
        self.backlog, self.written, self.longest_wait, self.most = 0.0, 0.0, 0.0, 0.0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        self.load.report(self.reports.popleft())
        rows, budget, new = 0, BUDGET, []
        for request in self.running:
            count = min(budget, self.chunk, request.prompt or 1)
            rows, budget = rows + count, budget - count
            if request.prompt:
                request.prompt -= count
            elif count:
                request.output -= 1
        while budget and len(self.running) < self.in_flight and self.load.admits(self.size):
            self.load.promise(self.size)
            new.append(self.size)
            count = min(budget, self.chunk, self.size.prompt)
            rows, budget = rows + count, budget - count
            self.running.append(Request(self.size.prompt - count, self.size.output))
        self.load.start(new)
        self.begun += len(new)
        for _ in range(
            len(self.running)
            - len(left := [each for each in self.running if each.prompt or each.output > 0])
        ):
            self.load.end(self.size)
        self.running = left
        self.stage(rows)
        self.pass_time(STEP_S + (BUDGET - budget) * TOKEN_S)
        self.rate.stepped(rows)
        self.reports.append(
            RankState(
                backlog=int(self.backlog),
                coming=sum(each.prompt for each in self.running),
                started=self.begun,
                write_rate=self.storage if self.written else None,
                prompt_rate=self.rate.bytes_per_s,
                step_rate=self.rate.steps_per_s,
            )
        )

    def stage(self, rows: int) -> None:
        if not rows:
            return
        wait = max(0.0, self.backlog - RING - self.last_rows) / self.storage
        self.pass_time(wait)
        self.rate.waited(wait)
        self.longest_wait = max(self.longest_wait, wait)
        self.backlog += rows
        self.most = max(self.most, self.backlog)
        self.computed += rows
        self.last_rows = rows

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        written = min(self.backlog, self.storage * seconds)
        self.backlog -= written
        self.written += written


SLOW = pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.01], ids="{} of the needed rate".format)


@SLOW
@pytest.mark.parametrize("prompt", [250, 1500, RING])
def test_no_step_waits_for_slow_storage_and_storage_is_never_idle(
    share: float, prompt: int
) -> None:
    engine = Engine(share * NEEDED, prompt, in_flight=16)
    engine.run(120.0)
    assert engine.longest_wait == 0.0
    assert engine.written >= 0.9 * engine.storage * engine.now


@pytest.mark.parametrize("share", [0.1, 0.01])
def test_prompts_computed_concurrently_all_count(share: float) -> None:
    """As with vLLM's option long_prefill_token_threshold."""
    engine = Engine(share * NEEDED, 1500, in_flight=16, chunk=BUDGET // 8)
    engine.run(120.0)
    assert engine.longest_wait == 0.0


@SLOW
def test_burst_after_idle_time_does_not_make_a_step_wait(share: float) -> None:
    engine = Engine(share * NEEDED, 250, in_flight=16)
    engine.run(60.0)
    engine.in_flight = 0
    engine.run(60.0)
    assert engine.backlog == 0.0
    engine.in_flight, engine.most = SEATS, 0.0
    engine.run(60.0)
    assert engine.longest_wait == 0.0
    assert engine.most <= RING + BUDGET


@pytest.mark.parametrize("prompt", [250, 1500, 8 * BUDGET])
def test_prompts_of_any_length_fill_the_steps_of_an_engine_with_fast_storage(prompt: int) -> None:
    engine = Engine(1.3 * NEEDED, prompt, in_flight=16)
    engine.run(60.0)
    assert engine.computed >= 0.99 * NEEDED * engine.now


def test_all_requests_that_generate_run_at_once_on_fast_storage() -> None:
    engine = Engine(3 * NEEDED, 100, output=4096)
    engine.run(10.0)
    assert len(engine.running) == SEATS


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_number_of_generating_requests_is_limited_by_storage(share: float) -> None:
    engine = Engine(share * NEEDED, 100, output=4096)
    engine.run(120.0)
    assert engine.longest_wait <= STEP_S + BUDGET * TOKEN_S
    assert engine.written >= 0.9 * engine.storage * engine.now or len(engine.running) == 1
    assert len(engine.running) / (STEP_S + len(engine.running) * TOKEN_S) <= max(
        1.1 * engine.storage, 1 / STEP_S
    )


@SLOW
def test_prompts_larger_than_the_ring_start_one_at_a_time(share: float) -> None:
    engine = Engine(share * NEEDED, 8 * BUDGET, in_flight=16)
    engine.run(10 * 8 * BUDGET / engine.storage)
    assert engine.begun >= 10
