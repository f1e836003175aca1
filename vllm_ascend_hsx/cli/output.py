"""What all commands print to, whoever reads it: a terminal, a file, a pipe that is closed, or nobody."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from rich.console import Console

from vllm_ascend_hsx.protocol.names import printable

UNREAD = 128 + signal.SIGPIPE  # the exit code, as a shell gives it to a program that the signal has ended
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
SILENCE_S = 1.0


class OneConsole(Console):
    """What commands print to."""

    def tell(self, text: str, style: str = "") -> None:
        """Print one line, whatever is in it: nothing of it is markup or an instruction to the terminal, and none of it is wrapped."""
        self.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli.main`: rich would exit with 1, which has another meaning here."""
        raise


def make_console(width: int = 150, *, stderr: bool = False) -> OneConsole:
    """A console as wide as the terminal, or `width` where there is none."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return OneConsole(width=None if terminal else width, stderr=stderr)


def say(text: str, *, error: bool = False) -> None:
    """Print one line, whatever is in it, as `OneConsole.tell` does."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def escape_unwritable() -> None:
    """Have every output spell out what its encoding has not, such as the bytes of a file's name that are no UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
            _drop(stream)
            found = True
    return found


def drop_full() -> None:
    """Let go of each output that does not take what is buffered for it, such as one on a full disk."""
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
