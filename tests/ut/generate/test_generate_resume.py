"""A killed and resumed `hsx generate` gives the directory of an undisturbed run."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import depth, is_long
from generate_files import SINKS, Exchange, Seen, contents, ledger_lines, token_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_runs import ROWS, DeadlyServer, Death, Runs
from sink_harness import wait_for_sleepers

from vllm_ascend_hsx.generate import files


def play(runs: Runs, deaths: list[Death]) -> None:
    """Resume after each death, then finish. Each run requests an unfinished row at most once."""
    with runs.server:
        for death in [*deaths, None]:
            finished, asked = runs.finished, len(runs.server.seen)
            code = runs.run(death)
            again = Counter(seen.row for seen in runs.server.seen[asked:])
            assert not finished & again.keys()
            assert set(again.values()) <= {1}
            assert code in (0, -signal.SIGKILL), runs.log.read_text()
        assert code == 0
        runs.check_complete()


@pytest.mark.parametrize("kind", SINKS)
def test_an_undisturbed_run(tmp_path: Path, kind: str) -> None:
    runs = Runs(tmp_path, kind)
    play(runs, [])
    assert runs.server.asked == Counter(range(ROWS))


DEATHS = st.builds(
    Death,
    st.sampled_from(["asked", "begun", "written", "answered"]),
    st.integers(0, ROWS - 1),
    st.booleans(),
) | st.builds(Death, st.integers(1, 130))


@settings(max_examples=depth(32, share=10))
@given(deaths=st.lists(DEATHS, min_size=1, max_size=3), kind=st.sampled_from(sorted(SINKS)))
def test_killed_and_restarted_runs_give_the_same_directory_as_an_undisturbed_run(
    deaths: list[Death], kind: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play(Runs(Path(folder), kind), deaths)


@pytest.mark.parametrize("kind", SINKS)
def test_next_run_repairs_a_kill_before_any_system_call(kind: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, kind)
    with runs.server:
        assert runs.run() == 0
        calls = int(runs.log.with_suffix(".calls").read_text())
    assert calls > 45
    for call in range(1, calls, 1 if is_long() else 32):
        folder = tmp_path / str(call)
        folder.mkdir()
        runs = Runs(folder, kind)
        play(runs, [Death(call)])
        assert max(runs.server.asked.values()) <= 2


def test_next_run_waits_for_a_file_that_a_server_is_writing(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    published = threading.Event()

    class Slow(DeadlyServer):
        async def do_kill(self, exchange: Exchange) -> None:
            """The client dies. The file is published while the next client waits for the lock."""
            file = await self.begin(exchange)
            await self._kill()

            def publish() -> None:
                wait_for_sleepers(Path(f"{file.path}.lock"))
                file.commit(exchange_ids(exchange), len(exchange.seen.token_ids))
                published.set()

            threading.Thread(target=publish).start()

    runs.server.__class__ = Slow
    with runs.server:
        assert runs.run(Death("begun", 4)) == -signal.SIGKILL
        assert runs.run() == 0
        assert published.wait(30)
        assert runs.server.asked[4] == 1
        assert {line["row"]: line["status"] for line in ledger_lines(runs.output / "ledger.jsonl")}[
            4
        ] == "found"
        runs.check_complete()


def exchange_ids(exchange: Exchange) -> Any:
    import numpy as np

    return np.asarray(exchange.seen.stored, dtype=np.int64)


def test_leftovers_of_a_killed_run_are_not_adopted_for_another_dataset(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    write_jsonl(runs.data, [{"prompt": f"old {row}"} for row in range(ROWS)])
    with runs.server:
        assert runs.run(Death("written", 3)) == -signal.SIGKILL
        whole = contents(runs.output)
        assert "hs_3.safetensors" in whole
        runs.server.seen.clear()
        write_jsonl(runs.data, [{"prompt": f"new {row}"} for row in range(ROWS)])
        assert runs.run() == 2
        assert (runs.server.seen, contents(runs.output)) == ([], whole)
        (runs.output / "ledger.jsonl").unlink()
        assert runs.run() == 2
        assert (runs.server.seen, contents(runs.output)) == (
            [],
            {name: whole[name] for name in whole if name != "ledger.jsonl"},
        )


def test_run_ends_if_the_dataset_changes(tmp_path: Path) -> None:
    runs = Runs(tmp_path)

    def at(seen: Seen, stage: str) -> None:
        if seen.row == 2 and stage == "asked":
            write_jsonl(runs.data, token_rows(ROWS)[::-1])

    runs.server.at = at
    runs.options += ["--concurrency", "1", "--order", "given"]
    with runs.server:
        assert runs.run() == 2
        assert (
            "the file changed while it was read; restore the checked version"
            in runs.log.read_text()
        )
        assert runs.finished <= {0, 1, 2}
        write_jsonl(runs.data, token_rows(ROWS))
        runs.server.at = lambda seen, stage: None
        assert runs.run() == 0
        runs.check_complete()


def test_rows_read_before_a_change_of_the_dataset_are_sent_unchanged(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    runs.server.at = lambda seen, stage: (
        None if stage != "asked" else write_jsonl(runs.data, token_rows(ROWS)[::-1])
    )  # type: ignore[assignment]
    with runs.server:
        assert runs.run() == 0
        runs.check_complete()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_run_and_keeps_finished_rows(
    tmp_path: Path, number: signal.Signals
) -> None:
    runs = Runs(tmp_path)
    others_are_answered = threading.Semaphore(0)

    def at(seen: Seen, stage: str) -> None:
        if stage == "answered":
            others_are_answered.release()

    runs.server.at = at
    runs.server.behave = lambda seen: "hang" if seen.row == 3 else "ok"
    with runs.server:
        process = runs.start()
        for _ in range(ROWS - 1):
            assert others_are_answered.acquire(timeout=60)
        os.kill(process.pid, number)
        process.join()
        runs.server.wait_idle()
        assert process.exitcode == 128 + number
        assert "interrupted; finished rows are kept; run again to continue" in runs.log.read_text()
        finished = runs.finished  # others may have been in flight at the signal
        assert 3 not in finished
        assert runs.server.files() == [
            *(f"hs_{row}.safetensors" for row in sorted(finished)),
            "ledger.jsonl",
        ]
        assert runs.run() == 0
        assert runs.server.asked == Counter([*range(ROWS), *(set(range(ROWS)) - finished)])
        runs.check_complete()


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    hanging, gone = threading.Event(), threading.Event()

    class Stuck(DeadlyServer):
        async def do_stuck(self, exchange: Exchange) -> None:
            """Begin a file and never finish it."""
            file = await self.begin(exchange)
            await self.answer(exchange, str(file.path))

            def interrupt() -> None:
                wait_for_sleepers(Path(f"{file.path}.lock"))
                assert hanging.wait(60)
                os.kill(self.process.pid, signal.SIGINT)

            threading.Thread(target=interrupt).start()

        async def do_hang(self, exchange: Exchange) -> None:
            hanging.set()
            await exchange.gone()  # the first signal has arrived
            gone.set()

    runs.server.__class__ = Stuck
    # A server gets one request at a time until one has succeeded; rows may come in any order.
    runs.server.behave = lambda seen: {1: "hang", 2: "stuck"}.get(
        runs.server.seen.index(seen), "ok"
    )
    with runs.server:
        process = runs.start()
        assert gone.wait(60)
        assert process.is_alive(), "it waits some seconds for servers to finish their files"
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 128 + signal.SIGINT
        assert "stopping; a second signal ends the run immediately" in runs.log.read_text()
        assert "interrupted" not in runs.log.read_text()


def test_signal_does_not_wait_for_an_unfinished_file(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.options += ["--request-timeout", "1000"]

    async def do_stuck(exchange: Exchange) -> None:
        file = await runs.server.begin(exchange)
        await runs.server.answer(exchange, str(file.path))

        def interrupt() -> None:
            wait_for_sleepers(Path(f"{file.path}.lock"))
            os.kill(runs.server.process.pid, signal.SIGTERM)

        threading.Thread(target=interrupt).start()

    runs.server.do_stuck = do_stuck  # type: ignore[attr-defined]
    runs.server.behave = lambda seen: "stuck" if runs.server.seen.index(seen) == 1 else "ok"
    with runs.server:
        process = runs.start()
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
        assert "interrupted; finished rows are kept; run again to continue" in runs.log.read_text()


def test_file_still_being_written_at_the_end_is_reported_and_found_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_ascend_hsx.cli import generate

    monkeypatch.setattr(files, "SETTLE_S", 0.01)
    runs = Runs(tmp_path)
    runs.server.behave = lambda seen: (
        "file-when-asked-again" if seen.row == 2 and seen.time == 1 else "ok"
    )
    with runs.server:
        arguments = [
            "--data",
            str(runs.data),
            "--output",
            str(runs.output),
            "--endpoint",
            runs.server.url,
            *runs.options,
        ]
        arguments += [
            "--request-timeout",
            "1.5",
            "--concurrency",
            "1",
            "--max-consecutive-errors",
            "9",
        ]
        assert generate.main([*arguments, "--max-retries", "0"]) == 1
        assert (
            "is still being written by the server; the next run checks it"
            in capsys.readouterr().err
        )
        assert generate.main(arguments) == 0
        runs.log.touch()
        runs.check_complete()
