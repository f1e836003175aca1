"""Chinese pages have the commands, figures, links and sections of the English pages."""

import re
from collections import Counter

import pytest
from documents import BLOCK, page

PAGES = [
    (f"{name}.md", f"{name}.zh.md") for name in ("README", "train", "generate", "troubleshooting")
]


def commands(name: str) -> list[tuple[str, ...]]:
    """Return label, language and text of each code block without the translated comments."""
    return [
        (label, language, re.sub(r" +# .*", "", text))
        for label, language, text in BLOCK.findall(page(name))
    ]


def prose(name: str) -> str:
    return BLOCK.sub("", page(name))


def facts(name: str) -> Counter[str]:
    """Return names, options and numbers of a page, without one-digit numbers."""
    text = " ".join(re.sub(r"\]\([^)]*\)", "]", prose(name)).split())
    found = Counter(re.findall(r"`[^`]+`", text))
    found.update(
        re.findall(
            r"(?<![\w.])\d[\w.]*\d|\b(?:DP|TP)=?\d+\b|W8A8|QuaRot|SP\b|EP\b",
            re.sub("`[^`]+`", "", text),
        )
    )
    return found


def links(name: str) -> Counter[str]:
    """Count the targets of links, except the link to the page in the other language."""
    targets = Counter(re.findall(r"\]\(([^)\s]+)\)", page(name)))
    for english, chinese in PAGES:
        if name in (english, chinese):
            del targets[chinese if name == english else english]
    return Counter({target.replace(".zh.md", ".md"): count for target, count in targets.items()})


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_both_languages_have_the_same_commands(english: str, chinese: str) -> None:
    assert commands(chinese) == commands(english)


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_both_languages_have_the_same_facts_links_and_sections(english: str, chinese: str) -> None:
    assert facts(chinese) == facts(english)
    assert links(chinese) == links(english)
    for mark in (r"^#+ ", r"^\* ", r"^\|", r"\*\*[^*]+\*\*"):
        assert len(re.findall(mark, prose(chinese), re.MULTILINE)) == len(
            re.findall(mark, prose(english), re.MULTILINE)
        ), mark


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_each_language_links_to_the_other_near_the_top(english: str, chinese: str) -> None:
    assert f"]({chinese})" in "\n".join(page(english).splitlines()[:10])
    assert f"]({english})" in "\n".join(page(chinese).splitlines()[:10])


def test_the_chinese_home_page_says_that_nothing_has_run_on_hardware() -> None:
    assert re.search(r"尚未在.*硬件上运行", "".join(page("README.zh.md").splitlines()[:30]))
