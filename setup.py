"""The fields of the package metadata that depend on the address of the published repository.

Set `HSX_REPO_URL` for a release. Without it the metadata has no address and no relative links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def description(readme: str, repository: str) -> str:
    """Return the README for a package index, where relative links are broken.

    Args:
        readme: the README, with links relative to the repository.
        repository: URL of the repository. Without one, links become their text.
    """
    return _LINK.sub(rf"[\1]({repository}/blob/main/\2)" if repository else r"\1", readme)


def project_urls(repository: str) -> dict[str, str]:
    """Return the links for a package index; none without the URL of the repository."""
    pages = {
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + page for name, page in pages.items()} if repository else {}


if __name__ == "__main__":
    url = os.environ.get("HSX_REPO_URL", "").rstrip("/")
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme, url),
        long_description_content_type="text/markdown",
        project_urls=project_urls(url),
    )
