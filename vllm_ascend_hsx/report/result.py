"""Outcome of one line of the report, passed from a step to the process that writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

HELD: Final = "held"
MEASURED: Final = "measured"
BROKE: Final = "did not hold"
NOT_RUN: Final = "not run"
TELL_US: Final = "paste this report into an issue"  # where the plugin itself may be wrong
Outcome = Literal["held", "measured", "did not hold", "not run"]


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        line: key in the table of steps.
        outcome: whether the expectation was met, or "measured" for a figure without a right value.
        found: the observation in words, or the reason for a missing one.
        data: figures, for programs and later steps.
        log: end of a log that explains the outcome.
    """

    line: str
    outcome: Outcome
    found: str
    data: dict[str, Any] = field(default_factory=dict)
    log: str = ""


class Teller:
    """Append results to a file as they come, to keep them if the step hangs or dies.

    Args:
        path: the file, with one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, line: str, outcome: Outcome, found: str, log: str = "", **data: Any) -> None:
        self._append(asdict(Result(line, outcome, found, data, log)))

    def failed(self, reason: str) -> None:
        """Record why the step cannot go on."""
        self._append({"failed": reason})

    def _append(self, content: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


def read_told(path: Path) -> tuple[list[Result], str]:
    """Return the results in a Teller's file, and the reason why the step could not go on, or ""."""
    results, reason = [], ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            content = json.loads(line)
        except ValueError:  # the step was killed while writing
            continue
        if "failed" in content:
            reason = content["failed"]
        else:
            results.append(Result(**content))
    return results, reason
