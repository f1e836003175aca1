"""What all commands print to, whoever reads it: a terminal, a file, a pipe that is closed, or nobody."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from rich.console import Console

UNREAD = 128 + signal.SIGPIPE  # the exit code, as a shell gives it to a program that the signal has ended
SILENCE_S = 1.0


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli.main`: rich would exit with 1, which has another meaning here."""
        raise


def make_console(width: int = 150, *, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or `width` where there is none."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return _Console(width=None if terminal else width, stderr=stderr)


def flush() -> None:
    """Write out what is buffered, now and not at exit, where an error can only be printed. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # Python's own for a descriptor that is not open
            stream.flush()


def drop_unread() -> bool:
    """Let go of each output whose reader has gone, so that what is still buffered for it raises nothing more.

    Returns:
        Whether there was one: a BrokenPipeError may also come from a socket.
    """
    found = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are always reported
        if poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            found = True
    return found


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
        timer.join()  # not after what comes next


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it, or the interpreter ends: the command finds out by itself
        print(line, file=sys.stderr, flush=True)
