"""Errors of a run, by consequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ascend_hsx.protocol.names import printable


class InputError(Exception):
    """Dataset, options, output directory or server cannot be used. The message has the remedy.

    Args:
        lines: lines of the message. Line breaks in names and values are escaped.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n  ".join(map(printable, lines)))


class UnauthorizedError(InputError):
    """A server, or a proxy in front of it, does not accept the key."""


class RunError(Exception):
    """The run cannot continue: all other rows would fail for the same reason."""


class UnreachedError(RunError):
    """No server has ever answered."""


class StoppedError(Exception):
    """The run is ending, and waiting workers return."""


class Interrupted(StoppedError):
    """A signal ends the run. `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Failure(Enum):
    """How one request for one row failed."""

    REFUSED = "the server refuses this row and would refuse it again"
    UNREACHED = "the request was never sent"
    BROKEN = "the connection broke; the file may exist"
    UNCLEAR = "there is no usable answer in time; the file may exist"
    UNSTORED = "the server answers, and could not store the rows; the file may exist"
    GONE = "the server does not know the model"
    ABSENT = "the server answers, and there is no file here; one may appear"
    WRONG = "the server answers, and there is no right file"
    FOREIGN = "the file is a row of another model, layers or weights than the other rows"


# The row's file may exist or appear later.
MAY_HAVE_FILE = frozenset((Failure.BROKEN, Failure.UNCLEAR, Failure.UNSTORED, Failure.ABSENT))
# The server does not answer.
DOWN = frozenset((Failure.UNREACHED, Failure.BROKEN))


@dataclass(eq=False)
class RequestError(Exception):
    """One request for one row failed.

    Attributes:
        reason: one sentence.
        failure: kind of the failure.
        retry_after: seconds until the server accepts the next request, if the answer has them.
    """

    reason: str
    failure: Failure = Failure.WRONG
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.reason
