"""The result of a check, with a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NOTHING = "nothing"

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        topic: "software", "patch points", "storage" or "target".
        name: name of the checked item.
        verdict: "problem" if extraction will fail or give wrong results; "note" for information.
        found: the value or the problem, in one line.
        what_to_do: remedy, in one sentence.

    Raises:
        ValueError: a problem has no remedy.
    """

    topic: str
    name: str
    verdict: Verdict
    found: str
    what_to_do: str = NOTHING

    def __post_init__(self) -> None:
        if self.verdict == "problem" and self.what_to_do == NOTHING:
            raise ValueError(f"{self.name}: a problem needs a remedy")
