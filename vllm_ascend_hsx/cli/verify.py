"""`hsx verify`: check every file below a directory, in parallel, and report invalid ones."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_ascend_hsx.cli.numbers import whole
from vllm_ascend_hsx.cli.output import TERMINATED, OneConsole, deferred_interrupt, make_console, say
from vllm_ascend_hsx.protocol.checksum import names_checksum
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.reader.check import Examination, Kind, examine
from vllm_ascend_hsx.reader.find import files_in, orphaned_locks
from vllm_ascend_hsx.reader.load import failure_reason
from vllm_ascend_hsx.reader.shard_check import shard_problems

_SHOWN = 20  # problems; the rest is counted


@dataclass
class Tally:
    """What was found so far.

    Attributes:
        good: files that are what they should be; without_checksum: how many of them name no checksum.
        orphans: locks that nobody holds, without data or error beside them.
        bad: path and problem of the others, and of shards. failed: error files, path and reason.
        kinds: number of files of each kind.
        tokens, num_bytes: of the good ones.
        tiny_tokens, tiny_files: quantised rows that were too small for their scale, and how many files have some.
        unseen: data files without a verdict.
    """

    good: int = 0
    without_checksum: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    kinds: dict[Kind, int] = field(default_factory=dict)
    tokens: int = 0
    num_bytes: int = 0
    tiny_tokens: int = 0
    tiny_files: int = 0
    unseen: int = 0

    def add(self, found: Examination) -> None:
        """Take note of a data file."""
        if found.problem is not None:
            self.bad.append((str(found.path), found.problem))
            return
        self.good += 1
        self.without_checksum += not names_checksum(found.metadata)
        self.tiny_tokens += found.tiny_tokens
        self.tiny_files += found.tiny_tokens > 0
        self.tokens += found.tokens
        self.num_bytes += found.num_bytes
        self.kinds[found.kind] = self.kinds.get(found.kind, 0) + 1

    def add_unreadable(self, error: OSError) -> None:
        """Record a folder that cannot be read."""
        self.bad.append((str(error.filename), f"it cannot be read: {error.strerror}"))

    def add_failure(self, path: Path) -> None:
        """Record an error file."""
        try:
            reason = failure_reason(path)
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
        self.failed.append((str(path), reason))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx verify`. Exits with code 2 and one line for an invalid one."""
    parser = argparse.ArgumentParser(
        prog="hsx verify",
        description="Looks at every file of hidden states below a directory, and every member of its shards: complete, finite, as its "
        "checksum says, all of one kind; and at the shards: index, tar file and manifest agree. "
        "Exit code 0: all are good; 1: some are not, or requests failed; 2: nothing could be looked at.",
    )
    parser.add_argument("directory", type=Path)
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=whole(1, 1024), default=processors, metavar="N", help="processes (default: one per processor)")
    parser.add_argument("--no-checksum", action="store_true", help="do not compare checksums")
    parser.add_argument("--allow-errors", action="store_true", help="error files of requests that failed are no reason for exit code 1")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx verify` and return its exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    console = make_console(stderr=options.json)
    try:
        paths = files_in(options.directory)
        tally = Tally()
        tally.orphans = [str(path) for path in orphaned_locks(options.directory, tally.add_unreadable)]
    except OSError as error:
        console.tell(f"hsx verify: {error}. Name the directory that holds the files.", "red")
        return 2
    data = [path for path in paths if not path.name.endswith(ERROR_SUFFIX)]
    for path in paths:
        if path.name.endswith(ERROR_SUFFIX):
            tally.add_failure(path)
    for path, problem in shard_problems(options.directory):
        tally.bad.append((str(path), problem))
    if not paths and not tally.bad and not tally.orphans:
        console.tell(f"hsx verify: {options.directory} has no files of hidden states.", "red")
        return 2
    tally.unseen = len(data)
    with _progress(console) as progress, _ended_by_sigterm():
        task = progress.add_task("files", total=len(data))
        for found in _examinations(data, options.jobs, not options.no_checksum):
            tally.add(found)
            tally.unseen -= 1
            progress.update(task, advance=1)
    if options.json:
        print(json.dumps(_as_json(tally)))
    else:
        _show(console, tally)
        if tally.orphans:
            why = f"{len(tally.orphans)} locks without data: consumers took it, or a server died"
            console.tell(f"{why}; hsx clean {options.directory} removes them")
    if tally.unseen:
        killed = f"one of its processes was killed, perhaps for want of memory: {tally.unseen} files have no verdict"
        say(f"hsx verify: {killed}; try fewer --jobs", error=True)
    one_kind = len(tally.kinds) <= 1
    return 0 if not tally.bad and not tally.unseen and one_kind and (options.allow_errors or not tally.failed) else 1


def _examinations(paths: Sequence[Path], jobs: int, checksum: bool) -> Iterator[Examination]:
    """Yield the result for each file, in any order. Files left by a killed process are omitted."""
    look = partial(examine, checksum=checksum)
    if jobs == 1 or len(paths) < 2:
        yield from map(look, paths)
        return
    # Not forked: libraries have threads, and a fork of them may hang.
    with ProcessPoolExecutor(min(jobs, len(paths)), mp_context=get_context("spawn"), initializer=_begin_process) as pool:
        futures = []
        # A terminal interrupts the processes, too, which must leave it to this one.
        with deferred_interrupt(), suppress(BrokenProcessPool):  # the futures have the exception
            for path in paths:
                futures.append(pool.submit(look, path))
        try:
            for done in as_completed(futures):
                if not isinstance(done.exception(), BrokenProcessPool):
                    yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has ended. Otherwise it would wait for files forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does, with the processes that it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        say("hsx verify: terminated", error=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show(console: OneConsole, tally: Tally) -> None:
    for title, problems in (("bad", tally.bad), ("failed", tally.failed)):
        for path, problem in problems[:_SHOWN]:
            console.tell(f"{title}: {path}: {problem}", "red")
        if len(problems) > _SHOWN:
            console.print(f"... and {len(problems) - _SHOWN} more {title}", style="red")
    for path in tally.orphans[:_SHOWN]:
        console.tell(f"lock without data: {path}")
    for kind, count in sorted(tally.kinds.items(), key=lambda each: -each[1]):
        console.print(f"{count} files of {kind}", highlight=False, markup=False)
    if tally.tiny_tokens:
        console.print(
            f"warning: {tally.tiny_tokens:,} tokens in {tally.tiny_files:,} files have rows below 4.5e-10, of which fp8 "
            "keeps little or nothing: docs/quantization.md",
            style="yellow",
            highlight=False,
        )
    if len(tally.kinds) > 1:
        console.print("these are files of different kinds: one training run cannot use them together", style="red")
    unchecked = f" ({tally.without_checksum} of them name no checksum)" if tally.without_checksum else ""
    console.print(
        f"{tally.good} good{unchecked}, {len(tally.bad)} bad, {len(tally.failed)} failed requests; "
        f"{tally.tokens:,} tokens, {tally.num_bytes / 1e9:.3f} GB",
        highlight=False,
    )


def _as_json(tally: Tally) -> dict[str, object]:
    kinds = [{**kind._asdict(), "files": count} for kind, count in tally.kinds.items()]
    return {
        "good": tally.good,
        "without_checksum": tally.without_checksum,
        "bad": [{"path": path, "problem": problem} for path, problem in tally.bad],
        "failed": [{"path": path, "reason": reason} for path, reason in tally.failed],
        "orphaned_locks": tally.orphans,
        "kinds": kinds,
        "tokens": tally.tokens,
        "bytes": tally.num_bytes,
        "tiny_tokens": tally.tiny_tokens,
        "unseen": tally.unseen,
    }
