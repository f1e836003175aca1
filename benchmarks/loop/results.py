"""Results of the loop: the file, the table and the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.table import Table

PLAIN = "bfloat16"
QUAROT = "W8A8, rotated"
OURS = "of hsx generate"
TRANSFORMERS = "of transformers"
VLLMS = "of vLLM's own connector"
KEPT = "not turned back"
# Correct rows. The verdict compares the first two; rows of vLLM's connector are only shown.
RIGHT = (OURS, TRANSFORMERS, VLLMS)
# Tolerance for the difference between our rows and rows of transformers, as a share of the drop of
# the acceptance length with wrong rows.
NOISE = 0.25


class Kind(NamedTuple):
    """Kind of a draft: one line of the table.

    Attributes:
        method: method of speculators.
        rows: origin of the rows.
        target: kind of the target, for extraction and for serving.
    """

    method: str
    rows: str
    target: str = PLAIN


@dataclass(frozen=True)
class Trained:
    """A draft. `seconds` is the training time; for the counts see Acceptance."""

    method: str
    rows: str
    target: str
    seed: int
    validation_loss: float
    seconds: float
    drafts: int
    draft_tokens: int
    accepted: int

    @property
    def kind(self) -> Kind:
        return Kind(self.method, self.rows, self.target)

    @property
    def length(self) -> float:
        """Mean tokens per step of a request: the accepted tokens and one token of the target."""
        return 1 + self.accepted / self.drafts


@dataclass
class Results:
    """All drafts of a run, in the order of training."""

    target_loss: float = float("nan")
    trained: list[Trained] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results of an earlier call. They are empty if the file does not exist."""
        if not path.is_file():
            return cls()
        content = json.loads(path.read_text())
        return cls(
            content["target_loss"],
            [Trained(**{"target": PLAIN, **each}) for each in content["trained"]],
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def of(self, kind: Kind, seed: int) -> Trained | None:
        return next((each for each in self.drafts(kind) if each.seed == seed), None)

    def add(self, trained: Trained) -> None:
        self.trained.append(trained)

    @property
    def kinds(self) -> list[Kind]:
        """Return the kinds in the order of training."""
        return list(dict.fromkeys(each.kind for each in self.trained))

    def drafts(self, kind: Kind) -> list[Trained]:
        return [each for each in self.trained if each.kind == kind]

    def lengths(self, kind: Kind) -> list[float]:
        return [each.length for each in self.drafts(kind)]

    def problems(self) -> list[str]:
        """Return a line for each kind of wrong rows that contradicts the expected results."""
        found = []
        for kind in self.kinds:
            if kind.rows in RIGHT:
                continue
            ours, theirs, wrong = (
                mean(self.lengths(kind._replace(rows=rows)))
                for rows in (OURS, TRANSFORMERS, kind.rows)
            )
            if abs(ours - theirs) >= NOISE * (theirs - wrong):
                found.append(
                    f"{kind.method}, {kind.target}: the acceptance lengths {ours:.2f} with rows {OURS} "
                    f"and {theirs:.2f} with rows {TRANSFORMERS} differ by at least {NOISE:.0%} of "
                    f"the drop with rows {kind.rows} ({wrong:.2f})"
                )
        return found


def cells(results: Results) -> Iterable[tuple[str, ...]]:
    """Yield the cells of a line for each kind; see HEADINGS."""
    for kind in results.kinds:
        own, lengths = results.drafts(kind), results.lengths(kind)
        accepted, drafted = (
            sum(getattr(each, name) for each in own) for name in ("accepted", "draft_tokens")
        )
        loss = mean(each.validation_loss for each in own)
        spread = f"{min(lengths):.2f} to {max(lengths):.2f}"
        yield (
            *kind,
            str(len(own)),
            f"{mean(lengths):.2f}",
            spread,
            f"{accepted / drafted:.0%}",
            f"{loss:.2f}",
        )


HEADINGS = (
    "draft",
    "rows",
    "target",
    "drafts",
    "acceptance length",
    "least to most",
    "accepted",
    "validation loss",
)
TEXTS = 3  # number of columns with text; the others have numbers


def table(results: Results) -> Table:
    """Return the table for a terminal."""
    found = Table(title="drafts by kind of training rows", title_justify="left")
    for number, heading in enumerate(HEADINGS):
        found.add_column(heading, justify="right" if number >= TEXTS else "left")
    for line in cells(results):
        found.add_row(*line)
    return found


def markdown(results: Results) -> str:
    """Return the same table in Markdown."""
    lines = [HEADINGS, (*["---"] * TEXTS, *["---:"] * (len(HEADINGS) - TEXTS)), *cells(results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
