"""Symptoms of docs/troubleshooting.md are messages of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from documents import ROOT, page, rows


def texts(path: Path) -> list[str]:
    """Return every string of a source file, adjacent ones joined, with … for variable parts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sdrx]", "…", node.value))
        elif isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            )
    return found


def symptoms(name: str) -> list[str]:
    return [row[0] for row in rows(page(name)) if len(row) == 3]


def test_each_symptom_is_a_message_of_the_code() -> None:
    sources = [*(ROOT / "vllm_ascend_hsx").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    messages = [text for path in sources for text in texts(path)]
    found = [
        match[1]
        for each in symptoms("troubleshooting.md")
        if (match := re.match(r"`([^`]+)`", each))
    ]
    assert len(found) > 100
    # The code composes names of metrics from a prefix and a series. PermissionError is from Python.
    ours = [
        re.sub(r"^vllm:hsx_(\w+?)(_total)?$", r"\1", each)
        for each in found
        if each != "PermissionError"
    ]
    assert [each for each in ours if not any(each in text for text in messages)] == []
