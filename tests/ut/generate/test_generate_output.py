"""Existing files in the output of `hsx generate`, and outputs that several runs share."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import Exchange, Seen, change_a_bit, contents, stored_ids
from generate_harness import FakeServer

from vllm_ascend_hsx import load
from vllm_ascend_hsx.generate import files
from vllm_ascend_hsx.generate import ledger as ledger_module
from vllm_ascend_hsx.generate.errors import Interrupted, RequestError
from vllm_ascend_hsx.generate.files import RowFiles, identity_in
from vllm_ascend_hsx.generate.generation import Generation, Work
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions


@pytest.mark.parametrize("below", [False, True])
def test_a_folder_below_the_storage_directory_receives_rows(any_bench: Bench, below: bool) -> None:
    bench = any_bench
    bench.output /= "a/b" if below else "a"
    for _ in range(2):
        assert bench.run("--validate")[0] == 0
    assert bench.server.asked == Counter(range(6))
    bench.check(list(range(6)))


def test_output_may_have_another_path_on_the_server(any_bench: Bench, tmp_path: Path) -> None:
    bench = any_bench
    (tmp_path / "mounted").symlink_to(bench.output)
    maps = [
        "--map-path",
        f"/nowhere={tmp_path}",
        "--map-path",
        f"{bench.output}={tmp_path / 'mounted'}",
    ]
    assert bench.run("--output", tmp_path / "mounted", *maps, "--limit", 3)[0] == 0
    assert bench.run()[0] == 0
    assert bench.server.asked == Counter(range(6))
    bench.check(list(range(6)))


def test_rows_removed_during_the_run_are_reported_missing(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = any_bench
    assert bench.run("--limit", 2)[0] == 0
    tidy = RowFiles.remove_companions

    def lose(files: RowFiles) -> list[Path]:
        remove(files.path(1))  # of an earlier run
        remove(files.path(4))
        return tidy(files)

    with monkeypatch.context() as patch:
        patch.setattr(RowFiles, "remove_companions", lose)
        code, printed = bench.run()
    assert code == 1
    assert (
        "2 finished rows were removed during the run: 1, 4; run the same command again" in printed
    )
    assert "not done │ 2 │" in printed
    assert {row for row, line in bench.lines().items() if line["status"] == "failed"} == {1, 4}
    assert bench.run()[0] == 0
    assert bench.server.asked == Counter([*range(6), 1, 4])
    bench.check(list(range(6)))
    remove(bench.output / "hs_5.safetensors")
    assert bench.run("--limit", 4)[0] == 0, "row 5 is not of this run"


def test_run_fails_if_files_cannot_be_listed_at_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(output: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "theirs.jsonl")

    monkeypatch.setattr("vllm_ascend_hsx.generate.run.files_of_rows", refuse)
    code, printed = bench.run()
    assert code == 1
    assert "cannot check whether all files still exist: Permission denied (EACCES)" in printed


def test_replaced_ledger_does_not_adopt_rows_of_texts(
    any_bench: Bench,
) -> None:
    """As after `mv a a_old; mv b a` below a server of shards. Members keep their paths."""
    bench, storage = any_bench, any_bench.output
    for folder in ("a", "b"):
        bench.output = storage / folder
        assert (
            bench.run("--validate", records=[{"prompt": f"{folder} {row}"} for row in range(6)])[0]
            == 0
        )
    rows_of_b = contents(storage / "b")
    os.replace(storage / "b" / "ledger.jsonl", storage / "a" / "ledger.jsonl")
    bench.output = storage / "a"
    for _ in range(2):
        code, printed = bench.run(
            "--validate", records=[{"prompt": f"b {row}"} for row in range(6)]
        )
        assert code == 0
        assert contents(storage / "a") == rows_of_b
    assert "asked for again" not in printed, "in the second run"


@pytest.mark.parametrize("after", [3, 6])
@pytest.mark.parametrize(
    "how", [shutil.move, lambda here, there: shutil.rmtree(here)], ids=["moved", "removed"]
)
def test_run_ends_if_the_output_is_moved_or_removed(
    any_bench: Bench, tmp_path: Path, how: Callable[[Path, Path], object], after: int
) -> None:
    """Servers create the folder again. Later rows would be there without the earlier rows."""
    bench, answered = any_bench, Counter[str]()
    bench.output /= "a"

    def take_away(seen: object, stage: str) -> None:
        answered[stage] += 1
        if stage == "written" and answered[stage] == after:
            how(bench.output, tmp_path / "elsewhere")

    bench.server.at = take_away
    code, printed = bench.run("--concurrency", 1)
    assert code == 1
    assert "was moved, removed or replaced during the run" in printed


@pytest.mark.parametrize("is_replaced", [True, False])
def test_run_fails_if_the_output_is_replaced_after_the_last_row(
    any_bench: Bench, tmp_path: Path, monkeypatch: Any, is_replaced: bool
) -> None:
    log, any_bench.output = ledger_module.Ledger.append, any_bench.output / "a"

    def append(ledger: ledger_module.Ledger, *arguments: Any, **facts: Any) -> None:
        log(ledger, *arguments, **facts)
        if all(ledger.finished.marks[:6]) and len(ledger.finished.marks) == 6:
            shutil.move(any_bench.output, tmp_path / "elsewhere")
            if is_replaced:
                shutil.copytree(tmp_path / "elsewhere", any_bench.output)

    monkeypatch.setattr(ledger_module.Ledger, "append", append)
    code, printed = any_bench.run("--concurrency", 1)
    assert code == 1
    assert (
        f"stopped: {any_bench.output} was moved, removed or replaced during the run" in printed
    ), printed


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_run_ends_if_its_ledger_is_truncated(any_bench: Bench, whole: bool, last: bool) -> None:
    """Later lines would begin an invalid ledger, or continue in the middle of a line."""
    bench, ledger = any_bench, any_bench.output / "ledger.jsonl"
    before: list[bytes] = []

    def cut(seen: Seen, stage: str) -> None:
        if stage == "written" and seen.row == 3 and not before:
            before.append(ledger.read_bytes())
            os.truncate(ledger, 0 if whole else len(before[0]) - 20)

    bench.server.at = cut
    code, printed = bench.run("--concurrency", 1, *(["--limit", 4] if last else []))
    size, left = len(before[0]), 0 if whole else len(before[0]) - 20
    assert code == 1
    assert f"{ledger} was truncated during the run, from {size} to {left} bytes" in printed
    assert ledger.stat().st_size == left, "nothing was written after it"
    code, printed = bench.run()
    if whole:
        assert code == 2
        assert (
            "has files of rows but no ledger that records their requests; give another --output"
        ) in printed
        ledger.write_bytes(before[0])  # the remedy in the error
        code, printed = bench.run()
    assert code == 0, printed
    bench.check(list(range(6)))
    assert bench.server.asked == Counter(range(6)), "their tokens are known: what is there counts"


@pytest.mark.parametrize("output", ["out", "other/../out", "."])
def test_the_output_may_be_relative(
    bench: Bench, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(bench.output if output == "." else tmp_path)
    code, printed = bench.run("--output", output)
    assert code == 0, printed
    bench.check(list(range(6)))


def test_a_server_without_locks_may_publish_after_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(
        tmp_path / "out", options=FileOptions(checksum="none", use_lock=False)
    ) as server:
        server.behave = lambda seen: "answer-then-publish"
        bench = Bench(tmp_path, server, capsys)
        assert bench.run("--validate", "--retry-delay", 0.2, "--concurrency", 8)[0] == 0
        assert server.asked == Counter(range(6))
        bench.check(list(range(6)))


# Existing files


def test_existing_files_are_checked_and_bad_files_generated_again(any_bench: Bench) -> None:
    bench = any_bench
    assert bench.run()[0] == 0
    whole = contents(bench.output)
    change_a_bit(bench.output / "hs_1.safetensors")
    assert bench.run()[0] == 0
    assert len(bench.server.seen) == 6  # without --validate rows are not read
    code, printed = bench.run("--validate")
    assert (
        code == 0
        and "hs_1.safetensors: it has changed since it was written" in printed
        and printed.count("; requesting the row again") == 1
    )
    assert bench.server.asked == Counter({**dict.fromkeys(range(6), 1), 1: 2})
    assert contents(bench.output) == whole


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda path: os.truncate(path, 4100), "this is not a file of hidden states: "),
    "another row's": (
        lambda path: os.replace(path.with_name("hs_3.safetensors"), path),
        "the file belongs to another row or another request",
    ),
    "an error": (
        lambda path: path.with_name(f"{path.name}.error").write_text('{"reason": "old"}'),
        "hs_2.safetensors: old",
    ),
    "a link to itself": (
        lambda path: (path.unlink(), path.symlink_to(path.name)),
        "is a broken symbolic link, not a regular",
    ),
    "a link below a file": (
        lambda path: (path.unlink(), path.symlink_to("hs_1.safetensors/x")),
        "is a broken symbolic link",
    ),
    "a FIFO for its lock": (
        lambda path: os.mkfifo(f"{path}.lock"),
        "is a FIFO, not a regular file",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_existing_file_is_replaced_without_validate(bench: Bench, name: str) -> None:
    change, message = BAD[name]
    assert bench.run()[0] == 0
    change(bench.output / "hs_2.safetensors")
    code, printed = bench.run()
    assert code == 0 and message in printed and "; requesting the row again" in printed
    bench.check(list(range(6)))


def test_copied_rows_of_another_dataset_of_texts_are_not_adopted(
    bench: Bench,
) -> None:
    records, elsewhere = [{"prompt": f"text {row}"} for row in range(6)], bench.root / "elsewhere"
    assert bench.run(records=[{"prompt": f"other {row}"} for row in range(6)])[0] == 0
    shutil.copytree(bench.output, elsewhere)
    for name in (*(f"hs_{row}.safetensors" for row in range(6)), "ledger.jsonl"):
        (bench.output / name).unlink()
    assert bench.run("--limit", 3, records=records)[0] == 0
    for row in range(3, 6):
        shutil.copy2(elsewhere / f"hs_{row}.safetensors", bench.output)
    code, printed = bench.run(records=records)
    assert code == 0, printed
    assert [
        bytes(stored_ids(bench.output / f"hs_{row}.safetensors")).decode() for row in range(6)
    ] == [each["prompt"] for each in records]


def test_bad_file_is_removed_even_if_the_server_cannot_replace_it(bench: Bench) -> None:
    assert bench.run()[0] == 0
    os.truncate(bench.output / "hs_2.safetensors", 4100)
    bench.server.behave = lambda seen: 400
    assert bench.run()[0] == 1
    bench.check([0, 1, 3, 4, 5])


@pytest.mark.parametrize("proven", [True, False])
def test_wrong_file_of_a_text_is_removed_however_the_run_ends(
    any_bench: Bench, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run does not know the tokens of a text and would accept any valid file."""
    bench = any_bench
    records = [{"prompt": f"text {row}"} for row in range(6)]

    def end(generation: Generation, work: Work, error: RequestError) -> float:
        generation.stop(Interrupted(signal.SIGTERM))
        return 0.0

    bench.server.behave = lambda seen: "other-tokens" if seen.row == 2 * proven else "ok"
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "_delay", end)  # before the row is requested again
        assert (
            bench.run("--concurrency", 1, "--max-consecutive-errors", 9, records=records)[0]
            == 128 + signal.SIGTERM
        )
    assert bench.rows == [0, 1] * proven
    bench.server.behave = lambda seen: "ok"
    assert bench.run(records=records)[0] == 0
    assert [
        bytes(stored_ids(bench.output / f"hs_{row}.safetensors")).decode() for row in range(6)
    ] == [each["prompt"] for each in records]


def test_unremovable_wrong_file_fails_only_its_row(bench: Bench) -> None:
    assert bench.run("--limit", 1)[0] == 0
    (bench.output / "hs_2.safetensors").mkdir()
    bench.server.behave = lambda seen: 503 if seen.row == 2 else "ok"
    code, printed = bench.run()
    assert (
        code == 1
        and "hs_2.safetensors is a directory, not a regular file; the file cannot be removed: "
        in printed
    )
    assert bench.lines()[2]["status"] == "failed" and {
        bench.lines()[row]["status"] for row in (0, 1, 3, 4, 5)
    } == {"done"}


def test_lock_left_by_a_killed_run_is_removed_by_the_next(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    for name in ("hs_0.safetensors.lock", "hs_5.safetensors.error"):
        (bench.output / name).write_text('{"reason": "old"}')
    assert bench.run("--limit", 3)[0] == 0
    bench.check([0, 1, 2])


def test_row_of_a_concurrent_run_is_not_removed(bench: Bench) -> None:
    """A run of another world size has its own ledger. The server refuses to reuse a name."""

    async def do_race(exchange: Exchange) -> None:
        first = await bench.server.begin(exchange)
        with pytest.raises(SinkError, match="another request is writing this file") as refused:
            await bench.server.begin(exchange)
        await bench.server.publish(exchange, first)
        await bench.server.answer(
            exchange, None, kv_transfer_params={"hidden_states_error": str(refused.value)}
        )

    bench.server.do_race = do_race  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "race" if seen.row == 3 else "ok"
    assert bench.run("--max-retries", 0)[0] == 0
    bench.check(list(range(6)))


def test_unreadable_file_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run()[0] == 0
    whole = contents(bench.output)

    def refuse(path: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.reader.load.open_regular", refuse)
        code, printed = bench.run("--validate")
    assert code == 1 and ".safetensors cannot be read: Input/output error (EIO)" in printed
    assert contents(bench.output) == whole


def test_existing_file_missing_in_the_ledger_gets_a_line(bench: Bench) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text(
        "".join(line for line in lines if not line.startswith('{"row":3,')) + '{"row":3,"stat'
    )
    assert bench.run()[0] == 0
    path = bench.output / "hs_3.safetensors"
    loaded = load(path)
    facts = {
        "identity": identity_in(loaded.metadata),
        "tokens": len(loaded.token_ids),
        "bytes": path.stat().st_size,
    }
    assert {**bench.lines()[3], "time": 0} == {"row": 3, "status": "found", "time": 0, **facts}
    assert len(bench.server.seen) == 6


def test_first_lines_of_the_ledger_have_request_run_and_server(bench: Bench) -> None:
    assert bench.run()[0] == 0
    first, run, state, second = map(
        json.loads, (bench.output / "ledger.jsonl").read_text().splitlines()[:4]
    )
    assert run.pop("time") > 0 and run == {"run": {"rows": 6, "invalid": 0}}
    assert state.pop("time") > 0 and state == {"state": "running"}
    assert first["request"] == {"max_tokens": 1, "temperature": 0.0}
    server = {
        "model": "tiny",
        "layer_ids": [2, 0, 3],
        "layers": 3,
        "hidden_size": 8,
        "dtype": "bfloat16",
        "rotated": False,
    }
    server |= {"lora": "", "weights": None}
    assert second.pop("time") > 0 and second == {"server": server}


def test_full_disk_is_reported_when_a_run_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if not line.startswith('{"row":3,')))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger_module, "_write", full)
    code, printed = bench.run()
    assert code == 1
    assert f"cannot write {ledger}: No space left on device (ENOSPC)" in printed


def test_unremovable_lock_fails_no_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, **_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), os.fspath(path))

    monkeypatch.setattr(files, "remove", broken)
    code, printed = bench.run(records=3)
    assert code == 0, printed
    assert (
        "cannot remove locks and error files of this run: [Errno 37] No locks available" in printed
    )
