"""The documentation builds into a site without broken links and external requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import DOCS, PAGES, ROOT, blocks, command_lines, page, path_of

SEARCH = Path(__file__).with_name("search_site.js")
# tools/site.py makes the READMEs home pages.
SITE_NAMES = {name: name.replace("README", "index") for name in PAGES}
EMPTY_NAMES = {"HSX_REPO_URL": "", "HSX_EDIT_URI": ""}


def build_site(root: Path, site: Path, **names: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key not in EMPTY_NAMES}
    options = ["--strict", "--config-file", str(root / "mkdocs.yml"), "--site-dir", str(site)]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**environ, **names},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build_site(ROOT, directory)
    assert done.returncode == 0, done.stdout
    return directory


def address(name: str) -> str:
    """Return the path of a page in the site, without index.html."""
    stem = SITE_NAMES[name].removesuffix(".md")
    return "" if stem == "index" else f"{stem}/"


def test_every_page_is_in_the_site_and_in_the_navigation(site: Path) -> None:
    navigation = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(SITE_NAMES.values())
    assert all((site / address(name) / "index.html").exists() for name in PAGES)


def test_the_home_page_shows_the_first_commands(site: Path) -> None:
    home = re.sub(r"<[^>]+>", "", (site / "index.html").read_text())
    for words in command_lines(blocks("README.md", "commands")[0]):
        assert " ".join(words) in home


class Requests(HTMLParser):
    """Addresses that a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get("src") if tag != "link" else values.get("href")
        if address is not None:
            self.found.append(address)


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        requests = Requests()
        requests.feed(path.read_text())
        assert requests.found
        assert [each for each in requests.found if re.match(r"(https?:)?//", each)] == []
    # For a diagram, the theme fetches mermaid from another host.
    assert all("```mermaid" not in page(name) for name in PAGES)


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("[gone](gone.md)", "'gone.md'"),
        ("[gone](options.md#gone)", "'options.md#gone'"),
        ("", 'not included in the "nav" configuration'),
    ],
    ids=["a missing page", "a missing heading", "a page outside the navigation"],
)
def test_broken_link_or_page_outside_the_navigation_fails_the_build(
    mistake: str, complaint: str, tmp_path: Path
) -> None:
    for name in ("mkdocs.yml", "tools", *(name for name in PAGES if name.startswith("README"))):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.copytree(DOCS, tmp_path / "docs")
    with open(tmp_path / "docs" / ("serve.md" if mistake else "another.md"), "a") as file:
        file.write(f"\n# A page\n\n{mistake}\n")
    done = build_site(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    assert complaint in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_lead_to_files_of_the_checkout(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if not target.startswith(("https://", "#")):
            assert path_of(name).parent.joinpath(target.partition("#")[0]).exists(), target


def test_a_repository_gives_each_page_a_link_to_the_source(tmp_path: Path, site: Path) -> None:
    assert 'title="Edit this page"' not in (site / "serve" / "index.html").read_text()
    names = {"HSX_REPO_URL": "https://repository.invalid/r", "HSX_EDIT_URI": "edit/main/docs/"}
    assert build_site(ROOT, tmp_path, **names).returncode == 0
    link = 'href="https://repository.invalid/r/edit/main/docs/serve.md"'
    assert link in (tmp_path / "serve" / "index.html").read_text()


# The search


def found_by_worker(site: Path, *queries: str) -> dict[str, list[list[str]]]:
    """Return the locations that the site's search finds for each query, by page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    done = subprocess.run([node, SEARCH, site, *queries], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_search_finds_chinese_words_within_a_sentence(site: Path) -> None:
    pages = {
        address(name)
        for name in PAGES
        if name.endswith(".zh.md") and re.search(r"\w硬件", page(name))
    }
    assert address("README.zh.md") in pages
    (found,) = found_by_worker(site, "硬件").values()
    assert {location.partition("#")[0] for page in found for location in page} >= pages


def test_a_search_finds_an_option(site: Path) -> None:
    (found,) = found_by_worker(site, "directory_budget_bytes").values()
    assert any(location.startswith("options/") for page in found for location in page)


def test_index_separates_chinese_words(site: Path) -> None:
    """A query finds words that begin with the query. This test does not need node."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    words = {
        word
        for entry in index["docs"]
        if entry["location"].startswith(address("README.zh.md"))
        for word in re.split(index["config"]["separator"], entry["text"])
    }
    assert "硬件" in words and index["config"]["lang"] == ["en", "zh"]
