"""Write the tests that ran on each release into docs/compatibility.md: `make matrix`.

`python tools/compatibility.py REPORT.xml ...` takes pytest's JUnit reports of tests/e2e, each named
after the release of vllm-ascend and the model runner, as 0.30.0rc2-v2.xml. It keeps the counts in
docs/compatibility.json; other releases stay unchanged there. A test compares page and counts.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
COUNTS = ROOT / "docs" / "compatibility.json"
BEGIN, END = "<!-- written by tools/compatibility.py -->\n", "<!-- end -->\n"
_FAILED = ("failure", "error")


class Counts(TypedDict):
    """Results of the tests of a file: the number that passed, and the names of failed tests."""

    passed: int
    failed: list[str]


Runs = Mapping[str, Mapping[str, Counts]]


def read_report(report: Path) -> dict[str, Counts]:
    """Return the counts of each file of tests, except files with only skipped tests."""
    files: dict[str, Counts] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        # A module that cannot be collected has an empty class, and the name of the module as name.
        module = (case.get("classname") or case.get("name", "")).rpartition(".")[2]
        counts = files.setdefault(module, Counts(passed=0, failed=[]))
        if any(case.find(kind) is not None for kind in _FAILED):
            counts["failed"].append(case.get("name", ""))
        else:
            counts["passed"] += 1
    return dict(sorted(files.items()))


def table(runs: Runs) -> str:
    """Return the files that passed alike everywhere, a table of the others, and failures."""
    names = sorted({file for run in runs.values() for file in run})
    counts = {name: [run.get(name) for run in runs.values()] for name in names}
    alike = {name: found[0] for name, found in counts.items() if found.count(found[0]) == len(runs)}
    same = ", ".join(f"`{name}.py` {_cell(found)}" for name, found in alike.items())
    lines = []
    if same:
        text = f"On all releases and runners: {same}."
        lines = [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]
    head = ["others", *(title(run) for run in runs)]
    lines += [_row(head), "|" + "---|" * len(head)]
    lines += [
        _row([f"`{name}.py`", *map(_cell, found)])
        for name, found in counts.items()
        if name not in alike
    ]
    failed = [
        f"* {title(run)}: `{file}.py`, `{name}`"
        for run, files in runs.items()
        for file, found in files.items()
        for name in found["failed"]
    ]
    return "\n".join(lines) + "\n" + ("\nFailed:\n\n" + "\n".join(failed) + "\n" if failed else "")


def title(run: str) -> str:
    """Return the title of a column: `0.30.0rc2-v2` is "0.30.0rc2, V2"."""
    release, _, runner = run.partition("-")
    return f"{release}, {runner.upper()}" if runner else release


def _cell(counts: Counts | None) -> str:
    if counts is None:
        return ""
    failed = len(counts["failed"])
    return f"{counts['passed']}, {failed} failed" if failed else str(counts["passed"])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(text: str, runs: Runs) -> str:
    """Return the page with the table between the two comments replaced."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: the comments that enclose the table are missing")
    return before + BEGIN + "\n" + table(runs) + "\n" + END + after


def main(reports: Sequence[str]) -> None:
    runs = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    runs.update({Path(report).stem: read_report(Path(report)) for report in reports})
    runs = dict(sorted(runs.items()))
    COUNTS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
