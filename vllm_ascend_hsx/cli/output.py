"""Output of all commands, to a terminal, a file or a pipe."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

from rich.console import Console

from vllm_ascend_hsx.protocol.names import printable

UNREAD = 128 + signal.SIGPIPE  # exit codes that shells report for programs ended by a signal
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
SILENCE_S = 1.0
SILENT = frozenset(("-h", "--help", "-q", "--quiet"))  # options of commands without a sign of life


class OneConsole(Console):
    """The console of all commands."""

    def tell(self, text: str, style: str = "") -> None:
        """Print one line literally: no markup or wrapping, and control characters escaped."""
        self.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        """Re-raise for `cli.main`. rich would exit with 1."""
        raise


def make_console(width: int = 150, *, stderr: bool = False, quiet: bool = False) -> OneConsole:
    """Return a console of the terminal's width, or of `width` without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    return OneConsole(width=None if terminal else width, stderr=stderr, quiet=quiet)


class Output:
    """The outputs of one command with the options --json and --quiet (`Parser.add_output`).

    Attributes:
        result: stdout, unless one of the options is given.
        progress: stderr for progress and warnings, unless --quiet is given.
        errors: stderr.
    """

    def __init__(self, options: argparse.Namespace, width: int = 150) -> None:
        self.result = make_console(width, quiet=options.quiet or options.json)
        self.progress = make_console(width, stderr=True, quiet=options.quiet)
        self.errors = make_console(width, stderr=True)
        self._as_json: bool = options.json

    def give(self, facts: Mapping[str, Any], show: Callable[[OneConsole], None]) -> None:
        """Print the result: one JSON object with --json, else with `show`."""
        if self._as_json:
            print(json.dumps(_finite(facts)))
        else:
            show(self.result)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities in a value with None, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def say(text: str, *, error: bool = False) -> None:
    """Print one line with control characters escaped, like `OneConsole.tell`."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def escape_unwritable() -> None:
    """Escape characters that an output cannot encode, such as bytes of names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Flush outputs now, because an error at exit could not be handled. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the descriptor is not open
            stream.flush()


def drop_unread() -> bool:
    """Redirect outputs without a reader to /dev/null, so that later writes do not fail.

    Returns:
        True if there was such an output. A BrokenPipeError may also come from a socket.
    """
    found = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are always reported
        if poll.poll(0):
            _drop(stream)
            found = True
    return found


def drop_full() -> None:
    """Redirect outputs that cannot be flushed to /dev/null, for example after a full disk."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                _drop(stream)


def _drop(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer SIGINT to the end of the block, and block it in processes started there.

    Blocking the signal is not enough: another thread may receive it, and Python would still raise
    KeyboardInterrupt in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by child processes
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def ended_by_sigterm(name: str) -> Iterator[None]:
    """Raise SystemExit in the block on SIGTERM, so that child processes are stopped."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        say(f"{name}: terminated", error=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sign_of_life(line: str, seconds: float = SILENCE_S) -> Iterator[None]:
    """Print `line` to stderr if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, _say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the line must not appear after the block


def _say(line: str) -> None:
    # The output has no reader, or the interpreter is exiting. The command itself reports it.
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
