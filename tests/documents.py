"""Read commands and tables from the documentation, for tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Command(NamedTuple):
    """A `vllm serve` command of a page: the model, the options, and the options without a value."""

    model: str
    options: dict[str, str]
    switches: set[str]


def page(name: str) -> str:
    """Return the text of a page of docs/, or of a README."""
    return ((ROOT if name.startswith("README") else DOCS) / name).read_text()


def blocks(name: str, label: str) -> list[str]:
    """Return the code blocks of a page that follow a `<!-- label -->`."""
    found = re.findall(rf"<!-- {label} -->\n```\w+\n(.*?)```", page(name), re.DOTALL)
    assert found, f"{name} has no block marked {label}"
    return found


def parse_serve(block: str) -> Command:
    (serve,) = block.replace("\\\n", " ").strip().splitlines()
    words = shlex.split(serve)
    assert words[:2] == ["vllm", "serve"]
    options, switches = {}, set()
    for word, following in zip(words[3:], [*words[4:], "--"], strict=True):
        if word.startswith("--") and following.startswith("--"):
            switches.add(word)
        elif word.startswith("--"):
            options[word] = following
    return Command(words[2], options, switches)


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows in a text, without heads."""
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for table in tables
        for row in table.splitlines()
    ]
