"""Hooks of mkdocs: add pages of the repository root, and adapt links to the site."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the site outside of docs/. The navigation has only the READMEs.
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report-a-vulnerability.md",
}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs, the changelog and the security policy to the pages of docs/."""
    for source, name in PAGES.items():
        if not (ROOT / source).exists():
            continue
        inclusion = InclusionLevel.UNDEFINED if "README" in source else InclusionLevel.NOT_IN_NAV
        text = relinked((ROOT / source).read_text(), ".")
        files.append(File.generated(config, name, content=text, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Return a page of docs/ with links that work in the site."""
    return markdown if page.file.generated_by else relinked(markdown, "docs")


def relinked(markdown: str, folder: str) -> str:
    """Return the text of a page in `folder` of the repository, with links for the site.

    A link to a file outside of the site becomes the text of the link.
    """

    def link(match: re.Match[str]) -> str:
        text, address, anchor = match[1], match[2], match[3] or ""
        path = normpath(f"{folder}/{address}")
        if path in PAGES and (ROOT / path).exists():
            return f"[{text}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return text if (ROOT / path).exists() else match[0]

    return LINK.sub(link, markdown)
