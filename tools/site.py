"""Hooks of mkdocs: README.md is the home page of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOMES = {"README.md": "index.md", "README.zh.md": "index.zh.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs to the pages of docs/, with links that start there."""
    for readme, name in HOMES.items():
        text = (ROOT / readme).read_text()
        for other, page in HOMES.items():
            text = text.replace(f"]({other})", f"]({page})")
        files.append(File.generated(config, name, content=re.sub(r"\]\(docs/", "](", text)))
    return files
