"""What the loop has measured: a file of it, a table, and the verdict."""

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
# Which rows must make equally good drafts; those of vLLM's connector are only shown.
RIGHT = (OURS, TRANSFORMERS, VLLMS)
# The drafts on our rows and on those of transformers may differ by this share of what a draft on
# wrong rows loses.
NOISE = 0.25


class Kind(NamedTuple):
    """What drafts of one line of the table have in common.

    Attributes:
        target: whose rows were extracted, and with which the draft is served.
    """

    method: str
    rows: str
    target: str = PLAIN


@dataclass(frozen=True)
class Trained:
    """One draft. `seconds` is the time of its training; the counts are those of Acceptance."""

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
        """Tokens per step of a request: those accepted, and the target's own one."""
        return 1 + self.accepted / self.drafts


@dataclass
class Results:
    """All drafts of a run, in the order in which they were trained."""

    target_loss: float = float("nan")
    trained: list[Trained] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results of an earlier call, or none."""
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
        """Return the kinds in the order in which they were trained."""
        return list(dict.fromkeys(each.kind for each in self.trained))

    def drafts(self, kind: Kind) -> list[Trained]:
        return [each for each in self.trained if each.kind == kind]

    def lengths(self, kind: Kind) -> list[float]:
        return [each.length for each in self.drafts(kind)]

    def problems(self) -> list[str]:
        """Return how the drafts contradict what is expected of right and wrong rows."""
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
                    f"{kind.method}, {kind.target}: rows {OURS} give {ours:.2f} and those "
                    f"{TRANSFORMERS} {theirs:.2f}, which "
                    f"differ by at least {NOISE:.0%} of what rows {kind.rows} lose ({wrong:.2f})"
                )
        return found


def cells(results: Results) -> Iterable[tuple[str, ...]]:
    """Return a line for each kind of rows, with the cells of HEADINGS."""
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
TEXTS = 3  # the others are numbers


def table(results: Results) -> Table:
    """Return the table for a terminal."""
    found = Table(title="drafts by the rows that they were trained on", title_justify="left")
    for number, heading in enumerate(HEADINGS):
        found.add_column(heading, justify="right" if number >= TEXTS else "left")
    for line in cells(results):
        found.add_row(*line)
    return found


def markdown(results: Results) -> str:
    """Return the same table for docs/loop.md."""
    lines = [HEADINGS, (*["---"] * TEXTS, *["---:"] * (len(HEADINGS) - TEXTS)), *cells(results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
