"""Read pages of the documentation for tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in (*DOCS.glob("*.md"), *ROOT.glob("README*.md")))
BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n)?^ *```(\w+)\n(.*?)```", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """A `vllm serve` command of a page: the model, the options, and the options without a value."""

    model: str
    options: dict[str, str]
    switches: set[str]


def path_of(name: str) -> Path:
    """Return the path of a page of docs/, or of a README by the path in the checkout."""
    return next(top / name for top in (DOCS, ROOT) if (top / name).exists())


def page(name: str) -> str:
    """Return the text of a page of docs/, or of a README."""
    return path_of(name).read_text(encoding="utf-8")


def blocks(name: str, label: str) -> list[str]:
    """Return the code blocks of a page that follow a `<!-- label -->`."""
    found = [text for each, _, text in BLOCK.findall(page(name)) if each == label]
    assert found, f"{name} has no block marked {label}"
    return found


def command_lines(block: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse_serve(block: str) -> Command:
    (words,) = command_lines(block)
    assert words[:2] == ["vllm", "serve"]
    options, switches = {}, set()
    for word, following in zip(words[3:], [*words[4:], "--"], strict=True):
        if word.startswith("--") and following.startswith("--"):
            switches.add(word)
        elif word.startswith("--"):
            options[word] = following
    return Command(words[2], options, switches)


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables in a text, without heads."""
    tables = re.findall(r"^\|.*\n\|[-| ]+\|\n((?:\|.*\|\n?)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in row[1:-1].split("|")]
        for table in tables
        for row in table.splitlines()
    ]
