"""How a run went, and what can end it before it is through."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_ascend_hsx.generate.endpoints import Endpoint

SHOWN_FAILURES = 10


class StoppedError(Exception):
    """The run is being ended; whoever waits for something gives up."""


class Interrupted(StoppedError):
    """Somebody wants the run to end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Outcome:
    """How a run went.

    Attributes:
        total: rows of this rank.
        before: rows that were finished already.
        done, recovered: rows that were asked for, and rows for which an earlier request's file was there.
        failed: rows that have no file.
        failures: the first of them, with the reason.
        requests: that were sent for rows.
        tokens, bytes: of the files of this run.
        seconds: it took.
        left: files on the servers' side that could not be removed.
        stopped_by: what ended the run before it was through, or None.
        endpoints: the servers.
    """

    total: int
    before: int = 0
    done: int = 0
    recovered: int = 0
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    left: list[Path] = field(default_factory=list)
    stopped_by: BaseException | None = None
    endpoints: list[Endpoint] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.total - self.before - self.done - self.recovered
