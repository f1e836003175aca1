"""What can go wrong in a run, by what follows from it."""

from __future__ import annotations

from enum import Enum


class InputError(Exception):
    """Dataset, options, output directory or server are not what they must be; the message names the remedy. Nothing was generated yet."""


class RunError(Exception):
    """The run cannot go on: what stopped it would stop every other row too. Finished rows stay."""


class Fault(Enum):
    """What a failed request says of its endpoint."""

    NONE = "none"
    ILL = "ill"  # it answers, but not as it should, or too late
    DOWN = "down"  # it does not answer at all


class RequestError(Exception):
    """One request for one row failed.

    Attributes:
        reason: one sentence.
        again: whether it is worth asking for the row again.
        fault: what it says of the endpoint.
        lost: whether there was no answer to a request that was sent, so that its file may be there nevertheless.
        retry_after: seconds that the server wants to be left alone.
    """

    def __init__(
        self, reason: str, *, again: bool = True, fault: Fault = Fault.NONE, lost: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        self.fault = fault
        self.lost = lost
        self.retry_after = retry_after


class NoFileError(RequestError):
    """An answer that is fine but for the file, which it does not name: if that is the first, the server extracts nothing."""
