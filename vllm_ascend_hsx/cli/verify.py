"""`hsx verify`: check all files below a directory in parallel, and report invalid files."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from rich.progress import track

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path, whole
from vllm_ascend_hsx.cli.output import OneConsole, Output, deferred_interrupt, ended_by_sigterm, say
from vllm_ascend_hsx.protocol.checksum import names_checksum
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, INDEX
from vllm_ascend_hsx.reader.check import Examination, Kind, examine
from vllm_ascend_hsx.reader.find import files_in, orphaned_locks
from vllm_ascend_hsx.reader.load import failure_reason
from vllm_ascend_hsx.reader.shard_check import shard_problems

_SHOWN = 20  # problems of each kind to print; others are only counted


@dataclass
class Tally:
    """The result, in the form of --json.

    Attributes:
        good: number of valid files.
        without_checksum: number of valid files without a checksum.
        bad: invalid files, shards and folders.
        absent: files that were removed after they were listed, or that a server is writing.
        failed: error files.
        orphaned_locks: free locks without data or error.
        kinds: number of valid files of each kind.
        weights: number of valid files by fingerprint of the model's weights, if the file has one.
        tokens, bytes: total size of the valid files.
        tiny_tokens: number of quantised rows at the smallest scale.
        tiny_files: number of files with such rows.
        unseen: number of data files without a verdict.
    """

    good: int = 0
    without_checksum: int = 0
    bad: list[dict[str, str]] = field(default_factory=list)
    absent: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    orphaned_locks: list[str] = field(default_factory=list)
    kinds: Counter[Kind] = field(default_factory=Counter)
    weights: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    bytes: int = 0
    tiny_tokens: int = 0
    tiny_files: int = 0
    unseen: int = 0

    def add(self, found: Examination) -> None:
        """Record a data file."""
        self.unseen -= 1
        if found.problem is not None:
            (self.bad if found.is_there else self.absent).append(
                {"path": str(found.path), "problem": found.problem}
            )
            return
        self.good += 1
        self.without_checksum += not names_checksum(found.metadata)
        self.tiny_tokens += found.tiny_tokens
        self.tiny_files += found.tiny_tokens > 0
        self.tokens += found.tokens
        self.bytes += found.num_bytes
        self.kinds[found.kind] += 1
        if found.weights is not None:
            self.weights[found.weights] += 1

    def add_bad(self, path: Path, problem: str) -> None:
        self.bad.append({"path": str(path), "problem": problem})

    def add_unreadable(self, error: OSError) -> None:
        """Record a folder, or the index of a shard, that cannot be read."""
        self.add_bad(error.filename, f"cannot be read: {error.strerror}")

    def add_failure(self, path: Path) -> None:
        """Record an error file, unless it was removed meanwhile."""
        try:
            reason = failure_reason(path)
        except OSError as error:
            if not os.path.lexists(path):
                return
            reason = f"cannot be read: {error.strerror or error}"
        self.failed.append({"path": str(path), "reason": reason})

    def facts(self) -> dict[str, Any]:
        return {
            **vars(self),
            "kinds": [{**kind._asdict(), "files": count} for kind, count in self.kinds.items()],
        }


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx verify`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx verify",
        description="Checks all files of hidden states and members of shards below a directory. "
        "Each must be complete, have finite numbers and match the checksum, and all must be of one "
        "kind. Index, tar file and manifest of each shard must agree. Skips files that a server is "
        "writing or that are removed meanwhile. Exit code 0: all are good; 1: some are not, or "
        "requests failed; 2: nothing could be checked.",
    )
    parser.add_argument("directory", type=non_empty_path)
    processors = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs",
        type=whole(1, 1024),
        default=processors,
        metavar="N",
        help="processes (default: one per processor)",
    )
    parser.add_argument("--no-checksum", action="store_true", help="do not compare checksums")
    parser.add_argument(
        "--allow-errors",
        action="store_true",
        help="exit with 0 even if failed requests have left error files",
    )
    parser.add_output("counts, and the files of each kind of problem")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx verify` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    tally = Tally()
    try:
        data = _look(options.directory, tally)
    except OSError as error:
        remedy = (
            "Run it as a user with read permission"
            if isinstance(error, PermissionError)
            else "Give the directory of the files"
        )
        say(f"hsx verify: {error}. {remedy}.", error=True)
        return 2
    if not (data or tally.failed or tally.bad or tally.orphaned_locks):
        say(f"hsx verify: {options.directory} has no files of hidden states.", error=True)
        return 2
    examinations = _examinations(data, options.jobs, not options.no_checksum)
    with ended_by_sigterm("hsx verify"):
        hidden = options.quiet or not out.progress.is_terminal
        for found in track(
            examinations, "files", len(data), console=out.progress, transient=True, disable=hidden
        ):
            tally.add(found)
    out.give(tally.facts(), lambda console: _show(console, tally, options.directory))
    if tally.unseen:
        killed = (
            f"a process was killed, possibly for lack of memory: {tally.unseen} files were not "
            "checked"
        )
        say(f"hsx verify: {killed}; try fewer --jobs", error=True)
    if tally.absent and not (tally.good or tally.bad or tally.failed or tally.unseen):
        return 2
    is_good = not (tally.bad or tally.unseen) and len(tally.kinds) <= 1
    return 0 if is_good and (options.allow_errors or not tally.failed) else 1


def _look(directory: Path, tally: Tally) -> list[Path]:
    """Return the files to check. Record failed requests, locks, and problems of shards.

    Raises:
        OSError: the directory cannot be read.
    """
    paths = files_in(directory, tally.add_unreadable)
    tally.orphaned_locks = [str(path) for path in orphaned_locks(directory)]
    for path in paths:
        if path.name.endswith(ERROR_SUFFIX):
            tally.add_failure(path)
    unreadable = {each["path"] for each in tally.bad}
    for path, problem in shard_problems(directory):
        if not unreadable & {str(path), str(path.with_suffix(INDEX))}:
            tally.add_bad(path, problem)
    data = [path for path in paths if not path.name.endswith(ERROR_SUFFIX)]
    tally.unseen = len(data)
    return data


def _examinations(paths: Sequence[Path], jobs: int, checksum: bool) -> Iterator[Examination]:
    """Yield the result for each file, in any order. Results of killed processes are missing."""
    look = partial(examine, listed=True, checksum=checksum)
    if jobs == 1 or len(paths) < 2:
        yield from map(look, paths)
        return
    # Spawned, because a fork may hang: libraries have threads.
    with ProcessPoolExecutor(
        min(jobs, len(paths)), mp_context=get_context("spawn"), initializer=_begin_process
    ) as pool:
        futures = []
        # A terminal also interrupts the child processes. They must ignore it.
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
    """End this process when the parent has ended. Otherwise it would wait for files forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _show(console: OneConsole, tally: Tally, directory: Path) -> None:
    for title, problems in (("bad", tally.bad), ("failed", tally.failed)):
        for problem in problems[:_SHOWN]:
            console.tell(f"{title}: {': '.join(problem.values())}", "red")
        if len(problems) > _SHOWN:
            console.tell(f"... and {len(problems) - _SHOWN} more {title}", "red")
    for absent in tally.absent[:_SHOWN]:
        console.tell(f"not checked: {': '.join(absent.values())}")
    for path in tally.orphaned_locks[:_SHOWN]:
        console.tell(f"lock without data: {path}")
    for kind, count in tally.kinds.most_common():
        console.tell(f"{count} files of {kind}")
    if len(tally.weights) > 1:
        counts = ", ".join(
            f"{count} of {weights}" for weights, count in tally.weights.most_common(_SHOWN)
        )
        console.tell(
            f"note: the files are from {len(tally.weights)} checkpoints, by weights: {counts}",
            "yellow",
        )
    if tally.tiny_tokens:
        some = f"{tally.tiny_tokens:,} tokens in {tally.tiny_files:,} files"
        console.tell(
            f"warning: {some} have rows below 4.5e-10, which fp8 stores inaccurately or as zeros; "
            "see docs/file-format.md",
            "yellow",
        )
    if len(tally.kinds) > 1:
        console.tell(
            "the files are of different kinds: a training run cannot use them together", "red"
        )
    unchecked = (
        f" ({tally.without_checksum} of them without checksum)" if tally.without_checksum else ""
    )
    counts = (
        f"{tally.good} good{unchecked}, {len(tally.bad)} bad, {len(tally.failed)} failed requests"
    )
    counts += f", {len(tally.absent)} not checked" if tally.absent else ""
    console.tell(f"{counts}; {tally.tokens:,} tokens, {tally.bytes / 1e9:.3f} GB")
    if tally.orphaned_locks:
        why = f"{len(tally.orphaned_locks)} locks without data, from consumers or dead servers"
        console.tell(f"{why}; hsx clean {directory} removes them")
