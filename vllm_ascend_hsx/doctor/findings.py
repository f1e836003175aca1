"""What a check has found, and what to do about it."""

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
        name: what was looked at.
        verdict: "problem" if extraction will not work, or not as it should; "note" for what should be known.
        found: what is there, or what is wrong, in one line.
        what_to_do: one sentence.

    Raises:
        ValueError: a problem without anything to do about it.
    """

    topic: str
    name: str
    verdict: Verdict
    found: str
    what_to_do: str = NOTHING

    def __post_init__(self) -> None:
        if self.verdict == "problem" and self.what_to_do == NOTHING:
            raise ValueError(f"{self.name}: a problem needs something to do about it")
