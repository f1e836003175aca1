"""Write the table of docs/loop.md: `python tools/loop_page.py RESULTS`.

RESULTS is `results.json` of `hsx demo --loop`, which becomes docs/loop.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.loop.results import Results, markdown

PAGE = Path(__file__).parents[1] / "docs" / "loop.md"
DATA = PAGE.with_suffix(".json")
BEGIN, END = "<!-- table: tools/loop_page.py -->\n", "<!-- end of the table -->\n"


def page(text: str, results: Results) -> str:
    """Return the page with the table of these results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown(results)}{END}{after}"


if __name__ == "__main__":
    measured = Results.read(Path(sys.argv[1]))
    measured.write(DATA)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")
