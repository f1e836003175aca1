"""The outcome of one line of the report, and how a step hands it to the process that writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

HELD: Final = "held"
MEASURED: Final = "measured"
BROKE: Final = "did not hold"
NOT_RUN: Final = "not run"
TELL_US: Final = "paste this report into an issue"  # where the plugin itself may be at fault
Outcome = Literal["held", "measured", "did not hold", "not run"]


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        line: its key in the table of steps.
        outcome: whether what is expected was seen; a figure that has no right value is "measured".
        found: what was seen, or the reason why nothing was, in words.
        data: figures, for programs and for later steps.
        log: the end of a log that explains it.
    """

    line: str
    outcome: Outcome
    found: str
    data: dict[str, Any] = field(default_factory=dict)
    log: str = ""


class Teller:
    """Appends results to a file as they come, so that they outlive a step that hangs or dies.

    Args:
        path: of the file, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, line: str, outcome: Outcome, found: str, log: str = "", **data: Any) -> None:
        self._append(asdict(Result(line, outcome, found, data, log)))

    def failed(self, reason: str) -> None:
        """Say why the step cannot go on."""
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
        except ValueError:  # the step was killed while it wrote
            continue
        if "failed" in content:
            reason = content["failed"]
        else:
            results.append(Result(**content))
    return results, reason
