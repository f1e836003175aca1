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


class StoppedError(Exception):
    """The run is ending: waiting workers give up."""


class Interrupted(StoppedError):
    """A signal ends the run. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Fault(Enum):
    """What a request says about its endpoint."""

    NONE = "none"
    DEGRADED = "degraded"  # it answers, but wrongly or too late
    DOWN = "down"  # it does not answer


@dataclass(eq=False)
class RequestError(Exception):
    """One request for one row failed.

    Attributes:
        reason: one sentence.
        again: True if the row is worth another request.
        fault: what the failure says about the endpoint.
        lost: True if the row's file may exist all the same.
        missing: True if the server wrote no file, or none that can be found here.
        retry_after: seconds that the server asks to be left alone.
    """

    reason: str
    again: bool = True
    fault: Fault = Fault.DEGRADED
    lost: bool = False
    missing: bool = False
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.reason

    @property
    def is_unreached(self) -> bool:
        """True if the request was never sent, so that it counts as no attempt."""
        return self.fault is Fault.DOWN and not self.lost


class ForeignRowError(RequestError):
    """A server wrote a row of another model, layers or weights than the rest, and will again."""


class LeftoverError(RequestError):
    """A row that no ledger names as done has a file of other weights than the other rows."""
