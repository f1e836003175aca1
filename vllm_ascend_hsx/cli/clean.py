"""`hsx clean`: remove locks without data, old errors, orphans, and acknowledged files."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path
from vllm_ascend_hsx.cli.output import OneConsole, Output, say
from vllm_ascend_hsx.protocol.arguments import parse_size
from vllm_ascend_hsx.protocol.names import MAX_DEPTH
from vllm_ascend_hsx.sinks.acknowledged import Acknowledged
from vllm_ascend_hsx.sinks.orphans import Cleaning, Done

_SHOWN = 20  # paths to print; others are only counted
_AGE = re.compile(r"([0-9]{1,6})([smhd])")
_WOULD: dict[Done, str] = {"removed": "would remove", "sealed": "would seal"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx clean`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx clean",
        description="Removes leftovers of consumers and dead servers from a storage directory and "
        "all folders below it: free locks without data or error, and hidden directories of dead "
        "servers (their shards are sealed). With options, also removes old errors, and files and "
        "shards that consumers have acknowledged. Never touches files that a server writes or a "
        "reader waits for, so servers may keep running. Exit code 0: done; 1: something could not "
        "be removed; 2: the directory cannot be read.",
    )
    parser.add_argument("directory", type=non_empty_path)
    parser.add_argument(
        "--errors-older-than",
        metavar="AGE",
        help="remove errors older than this, such as 7d, 12h, 30m or 45s (default: none)",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="remove files and shards acknowledged longer ago than this (default: none)",
    )
    parser.add_argument(
        "--keep-bytes",
        metavar="SIZE",
        help="remove acknowledged files and shards, oldest acknowledgement first, until the rest "
        "has at most this size, such as 64GiB (default: none)",
    )
    parser.add_argument(
        "--lost-shards",
        action="store_true",
        help="remove indexes of shards without a tar file",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print the paths",
    )
    parser.add_output("removed and sealed paths (with --dry-run: to be removed), and problems")
    options = parser.parse_args(argv)
    options.errors_older_than = _seconds(parser, "--errors-older-than", options.errors_older_than)
    options.older_than = _seconds(parser, "--older-than", options.older_than)
    try:
        options.keep_bytes = parse_size(options.keep_bytes)
    except ValueError as error:
        parser.error(f"--keep-bytes {options.keep_bytes}: {error}")
    return options


def _seconds(parser: Parser, option: str, value: str | None) -> int | None:
    if value is None:
        return None
    age = _AGE.fullmatch(value)
    if age is None:
        parser.error(f"{option} {value}: give a number and a unit, as in 7d, 12h, 30m or 45s")
    return int(age[1]) * _SECONDS[age[2]]


class _Report:
    """The removed paths and the problems, printed at once or collected for --json."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._shown = 0
        self._unprinted: OSError | None = None
        self.facts: dict[str, list[str]] = {"removed": [], "sealed": [], "problems": []}

    def tell(self, done: Done, path: str) -> None:
        """Report a change. `path` is relative to the directory."""
        self._shown += 1
        path = str(self._options.directory / path)
        if self._options.json:
            self.facts[done].append(path)
        elif not self._options.quiet and self._shown <= _SHOWN:
            self._print(f"{_WOULD[done] if self._options.dry_run else done} {path}")

    def problem(self, problem: str) -> None:
        """Report a problem."""
        self.facts["problems"].append(problem)
        self._print(f"hsx clean: {problem}", error=True)

    def require_printed(self) -> None:
        """Raise the first error of the outputs."""
        if self._unprinted is not None:
            raise self._unprinted

    def show_end(self, console: OneConsole, cleaning: Cleaning, num_bytes: int | None) -> None:
        """Print the counts. `num_bytes` is the size of the files that remain, if known."""
        if self._shown > _SHOWN:
            console.tell(f"... and {self._shown - _SHOWN} more")
        would = "would be " if self._options.dry_run else ""
        words = cleaning.words(would + "sealed: {}", would + "removed: {}")
        console.tell(words or "nothing to remove")
        most = self._options.keep_bytes
        if most is not None and num_bytes is not None and num_bytes > most:
            console.tell(
                f"{num_bytes} bytes remain, more than --keep-bytes: they are in use or not "
                "acknowledged"
            )

    def _print(self, text: str, error: bool = False) -> None:
        try:
            if self._unprinted is None:
                say(text, error=error)
        # Kept from `Cleaning`, which would report it as a problem of the directory.
        except OSError as problem:
            self._unprinted = problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx clean` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        dir_fd = os.open(options.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        problem = (
            f"{options.directory} cannot be opened: {error.strerror}. Give the server's storage "
            "directory."
        )
        say(f"hsx clean: {problem}", error=True)
        return 2
    out, report = Output(options), _Report(options)
    cleaning = Cleaning(
        dir_fd,
        dry_run=options.dry_run,
        lost_shards=options.lost_shards,
        tell=report.tell,
        report=report.problem,
    )
    try:
        num_bytes = _clean(options, dir_fd, cleaning)
    finally:
        os.close(dir_fd)
    report.require_printed()
    out.give(
        {"dry_run": options.dry_run, **report.facts, "bytes_left": num_bytes},
        lambda console: report.show_end(console, cleaning, num_bytes),
    )
    return 1 if cleaning.problems else 0


def _clean(options: argparse.Namespace, dir_fd: int, cleaning: Cleaning) -> int | None:
    """Clean the directory. Return the bytes of the remaining files, if an option needs them."""
    with cleaning.noting(f"{options.directory} could not be read"):
        cleaning.run()
    folders = list(_folders(dir_fd, cleaning))
    for folder in folders:
        if folder:
            cleaning.clean_folder(folder)
        if options.errors_older_than is not None:
            cleaning.remove_errors(folder, time.time() - options.errors_older_than)
    if options.older_than is None and options.keep_bytes is None:
        return None
    acknowledged = Acknowledged(dir_fd, cleaning, options.dry_run)
    acknowledged.look(folders)
    before = None if options.older_than is None else time.time() - options.older_than
    acknowledged.remove(before, options.keep_bytes)
    return acknowledged.num_bytes


def _folders(dir_fd: int, cleaning: Cleaning) -> Iterator[str]:
    """Yield "" for the directory, and all folders below it that a server may have created."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        yield folder
        if folder.count("/") + bool(folder) >= MAX_DEPTH:
            continue
        with cleaning.noting(f"could not look for folders in {folder or '.'!r}"):
            fd = os.open(
                folder or ".",
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=dir_fd,
            )
            try:
                with os.scandir(fd) as entries:
                    names = [
                        each.name
                        for each in entries
                        if each.is_dir(follow_symlinks=False) and not each.name.startswith(".")
                    ]
            finally:
                os.close(fd)
            waiting += sorted((os.path.join(folder, name) for name in names), reverse=True)
