"""What can go wrong in a run, by its consequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ascend_hsx.protocol.names import printable


class InputError(Exception):
    """Dataset, options, output directory or server cannot be used; the message has the remedy.

    Args:
        lines: of the message. Line breaks within them, of names and values, are escaped.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n  ".join(map(printable, lines)))


class UnauthorizedError(InputError):
    """A server, or a proxy before it, does not accept the key."""


class RunError(Exception):
    """The run cannot go on: every other row would fail for the same reason."""


class UnreachedError(RunError):
    """No server has ever answered."""


class StoppedError(Exception):
    """The run is ending: waiting workers give up."""


class Interrupted(StoppedError):
    """A signal ends the run. number: of the signal."""

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


# The row's file may exist, or appear.
MAY_HAVE_FILE = frozenset((Failure.BROKEN, Failure.UNCLEAR, Failure.UNSTORED, Failure.ABSENT))
# The server does not answer.
DOWN = frozenset((Failure.UNREACHED, Failure.BROKEN))


@dataclass(eq=False)
class RequestError(Exception):
    """One request for one row failed.

    Attributes:
        reason: one sentence.
        failure: its kind.
        retry_after: seconds for which the server asks to get no request.
    """

    reason: str
    failure: Failure = Failure.WRONG
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.reason
