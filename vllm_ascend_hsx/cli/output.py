"""Output of all commands, whether to a terminal, a file or a closed pipe."""

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

UNREAD = 128 + signal.SIGPIPE  # exit code, as shells report it for a program that the signal ended
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
SILENCE_S = 1.0
SILENT = frozenset(("-h", "--help", "-q", "--quiet"))  # options of commands without a sign of life


class OneConsole(Console):
    """The console of all commands."""

    def tell(self, text: str, style: str = "") -> None:
        """Print one line as it is: no markup or wrapping, and control characters escaped."""
        self.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        """Re-raise for `cli.main`: rich would exit with 1, which has another meaning here."""
        raise


def make_console(width: int = 150, *, stderr: bool = False, quiet: bool = False) -> OneConsole:
    """Return a console as wide as the terminal, or `width` if there is none."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    return OneConsole(width=None if terminal else width, stderr=stderr, quiet=quiet)


class Output:
    """The outputs of one command, by the options --json and --quiet (`Parser.add_output`).

    Attributes:
        result: stdout; nowhere with either option.
        progress: stderr, for progress and warnings; nowhere with --quiet.
        errors: stderr.
    """

    def __init__(self, options: argparse.Namespace, width: int = 150) -> None:
        self.result = make_console(width, quiet=options.quiet or options.json)
        self.progress = make_console(width, stderr=True, quiet=options.quiet)
        self.errors = make_console(width, stderr=True)
        self._as_json: bool = options.json

    def give(self, facts: Mapping[str, Any], show: Callable[[OneConsole], None]) -> None:
        """Print the result: one JSON object with --json, else the text that `show` prints."""
        if self._as_json:
            print(json.dumps(_finite(facts)))
        else:
            show(self.result)


def _finite(value: Any) -> Any:
    """Return a value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def say(text: str, *, error: bool = False) -> None:
    """Print one line with control characters escaped, like `OneConsole.tell`."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def escape_unwritable() -> None:
    """Escape characters that the encoding of an output lacks.

    Such as bytes of file names that are not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write buffered output now, because errors at exit can only be printed. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the descriptor is not open
            stream.flush()


def drop_unread() -> bool:
    """Redirect each output whose reader has gone to /dev/null, so that later writes do not fail.

    Returns:
        Whether there was one. A BrokenPipeError may also come from a socket.
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
    """Redirect each output that cannot be flushed to /dev/null, such as one on a full disk."""
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
    """Have SIGINT take effect at the end of the block, and never in processes started in it.

    To block the signal is not enough: another thread may take it, and Python still raises
    KeyboardInterrupt in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited by processes
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def ended_by_sigterm(name: str) -> Iterator[None]:
    """Have SIGTERM end the block with SystemExit, so that it stops the processes it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only that one may handle signals
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
    """Print `line` to stderr, once, if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, _say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that the line is never printed after the block


def _say(line: str) -> None:
    # no reader, or the interpreter is exiting; the command will notice
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
