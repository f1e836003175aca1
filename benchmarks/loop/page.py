"""Write the table of the README.md beside it: `python -m benchmarks.loop.page RESULTS`.

RESULTS is the results.json of `python -m benchmarks.loop`. It is copied to loop.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.loop.results import Results, markdown

PAGE = Path(__file__).with_name("README.md")
DATA = PAGE.with_name("loop.json")
BEGIN, END = "<!-- table: benchmarks/loop/page.py -->\n", "<!-- end of the table -->\n"


def page(text: str, results: Results) -> str:
    """Return the page with the table of these results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown(results)}{END}{after}"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    if not source.is_file():
        sys.exit(f"{source} does not exist; name the results.json of `python -m benchmarks.loop`")
    measured = Results.read(source)
    measured.write(DATA)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")
