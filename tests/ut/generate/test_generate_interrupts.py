"""After Ctrl-C at any instant, the next run requests only rows without a file."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import depth
from generate_files import SINKS, Exchange, Seen, contents, ledger_lines, right, write_jsonl
from killed_runs import DeadlyServer, Runs

from vllm_ascend_hsx.generate.generation import GRACE_S

INSTANTS = depth(20, share=10)
ROWS = 12 * INSTANTS
LATE = 0.08  # share of the answers that come after the run has stopped waiting


def record(row: int) -> dict[str, Any]:
    """Draw token ids, a text or a chat."""
    text = f"row {row} " * (1 + row % 3)
    return [
        {"token_ids": list(text.encode())},
        {"prompt": text},
        {"messages": [{"role": "user", "content": text}]},
    ][row % 3]


def token_ids(row: int) -> list[int]:
    text = f"row {row} " * (1 + row % 3)
    return list((f"<user>{text}<assistant>" if row % 3 == 2 else text).encode())


class SlowServer(DeadlyServer):
    """A server that publishes files and answers later. Interrupts the client at one stage.

    Attributes:
        chance: decides when answers come.
        stages_left: number of stages until the interrupt; None for no interrupt.
    """

    chance: random.Random
    stages_left: int | None = None

    async def do_slow(self, exchange: Exchange) -> None:
        path = await self.publish(exchange, await self.begin(exchange))
        await asyncio.wait([asyncio.ensure_future(exchange.gone())], timeout=self._seconds())
        await self.answer(exchange, path)

    def _seconds(self) -> float:
        return 3 * GRACE_S if self.chance.random() < LATE else self.chance.random() * 0.04

    def count_stage(self, seen: Seen, stage: str) -> None:
        with self._mutex:
            if self.stages_left is None:
                return
            self.stages_left -= 1
            if self.stages_left == 0:
                os.kill(self.process.pid, signal.SIGINT)


@pytest.mark.parametrize("kind", SINKS)
def test_after_an_interrupt_finished_rows_are_not_requested_again(
    tmp_path: Path, kind: str
) -> None:
    chance = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    runs = Runs(tmp_path, kind)
    write_jsonl(runs.data, [record(row) for row in range(ROWS)])
    runs.options += ["--concurrency", "6"]
    server = runs.server
    server.__class__ = SlowServer
    assert isinstance(server, SlowServer)
    server.chance, server.at = chance, server.count_stage
    unlogged = interrupted = 0
    with server:
        for at in [*(chance.randint(1, 40) for _ in range(INSTANTS)), None]:
            finished, asked = finished_rows(runs), len(server.seen)
            server.stages_left = at
            server.behave = lambda seen: "slow"
            process = runs.start()
            process.join()
            server.wait_idle()
            again = Counter(seen.row for seen in server.seen[asked:])
            assert not finished & again.keys(), f"interrupted at {at}: {runs.log.read_text()}"
            assert set(again.values()) <= {1}
            assert process.exitcode == (0 if at is None else 128 + signal.SIGINT), (
                runs.log.read_text()
            )
            interrupted += at is not None
            unlogged += len(finished_rows(runs) - logged_rows(runs))
    print(f"{interrupted} interrupts, after which {unlogged} rows with a file were in no ledger")
    assert finished_rows(runs) == set(range(ROWS)) == logged_rows(runs)


def finished_rows(runs: Runs) -> set[int]:
    """Return the rows with a file, and check each file."""
    found = contents(runs.output)
    rows = {row for row in range(ROWS) if f"hs_{row}.safetensors" in found}
    assert {name: found[name] for name in found if name != "ledger.jsonl"} == {
        f"hs_{row}.safetensors": right(token_ids(row)) for row in rows
    }
    return rows


def logged_rows(runs: Runs) -> set[int]:
    return {line["row"] for line in ledger_lines(runs.output / "ledger.jsonl")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_requests_in_flight_may_end_after_a_signal_and_are_logged(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Two of three requests are answered after the signal, the third is not."""
    runs = Runs(tmp_path)
    under_way, signalled = threading.Barrier(4), threading.Event()

    async def do_wait(exchange: Exchange) -> None:
        path = await runs.server.publish(exchange, await runs.server.begin(exchange))
        await asyncio.get_running_loop().run_in_executor(None, under_way.wait, 60)
        if exchange.seen.row == 3:
            return await exchange.gone()
        await asyncio.get_running_loop().run_in_executor(None, signalled.wait, 60)
        await runs.server.answer(exchange, path)

    runs.server.do_wait = do_wait  # type: ignore[attr-defined]
    runs.server.behave = lambda seen: "ok" if runs.server.seen.index(seen) == 0 else "wait"
    runs.options += ["--order", "given"]
    with runs.server:
        process = runs.start()
        under_way.wait(60)
        os.kill(process.pid, number)
        while "stopping" not in runs.log.read_text():
            process.join(0.01)
        signalled.set()
        process.join()
        runs.server.wait_idle()
        assert process.exitcode == 128 + number, runs.log.read_text()
        asked = {seen.row for seen in runs.server.seen}
        assert asked == {0, 1, 2, 3}, "no new row is asked for after the signal"
        assert {line["row"] for line in ledger_lines(runs.output / "ledger.jsonl")} == {0, 1, 2}
        assert runs.finished == asked
        assert runs.run() == 0
        assert runs.server.asked == Counter(range(5))
        runs.check_complete()


@pytest.mark.parametrize("behaviour", [502, "drop"])
def test_signal_interrupts_a_pause_or_a_retry_delay(tmp_path: Path, behaviour: str | int) -> None:
    runs = Runs(tmp_path)
    runs.options += ["--retry-delay", "600"]
    fails = threading.Event()
    with runs.server:
        runs.server.behave = lambda seen: fails.set() or behaviour if seen.row == 3 else "ok"
        process = runs.start()
        assert fails.wait(60)
        runs.server.wait_idle()
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 128 + signal.SIGINT, runs.log.read_text()
