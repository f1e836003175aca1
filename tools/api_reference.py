"""Write the part "Python API" of docs/reading.md from the code: `python tools/api_reference.py`.

The part is between two markers. A test compares it with the signatures and docstrings.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reading.md"
PACKAGE = "vllm_ascend_hsx"
BEGIN, END = "<!-- api -->\n", "<!-- /api -->\n"
LINE = 88  # most characters of a signature in one line

HEAD = """
## Python API

`tools/api_reference.py` generates this part from signatures and docstrings.
"""


def page(text: str) -> str:
    """Return docs/reading.md with the part between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} lacks the markers {BEGIN.strip()} and {END.strip()}"
    return before + begin + reference() + "\n" + end + after


def reference() -> str:
    """Return all public names of the package in Markdown."""
    # griffe warns about unknown sections. They become paragraphs here.
    logging.getLogger("griffe").setLevel(logging.ERROR)
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    package = loader.load(PACKAGE)
    loader.resolve_aliases(implicit=True)
    entries = [_entry(name, _found(package, name)) for name in public_names()]
    return HEAD + "".join(entries)


def public_names() -> list[str]:
    """Return the names of `__all__`: functions first, then classes."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return sorted((n for n in names if not n.startswith("_")), key=lambda n: (n[0].isupper(), n))


def _found(package: griffe.Object | griffe.Alias, name: str) -> griffe.Object:
    found = package[name]
    return found.final_target if isinstance(found, griffe.Alias) else found


def _entry(name: str, found: griffe.Object) -> str:
    parts = [f"### `{name}`"]
    if isinstance(found, griffe.Function):
        parts.append(_code(_signature(name, found.parameters, found.returns)))
    init = found.members.get("__init__")
    if isinstance(init, griffe.Function) and not name.endswith("Error"):
        parts.append(_code(_signature(name, init.parameters)))
    parts += _text(found)
    if isinstance(found, griffe.Class):
        for key, member in found.members.items():
            if not key.startswith("_") and member.docstring is not None:
                parts += _member(name, member)
    return "\n" + "\n\n".join(parts) + "\n"


def _member(owner: str, member: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a method or property."""
    yield f"#### `{owner}.{member.name}`"
    if isinstance(member, griffe.Function):
        yield _code(_signature(member.name, member.parameters, member.returns))
    yield from _text(member)


def _signature(
    name: str,
    parameters: griffe.Parameters,
    returns: str | griffe.Expr | None = None,
) -> str:
    shown: list[str] = []
    for each in parameters:
        if each.name == "self":
            continue
        if each.kind is griffe.ParameterKind.keyword_only and "*" not in shown:
            shown.append("*")
        text = f"{each.name}: {each.annotation}" if each.annotation is not None else each.name
        if each.default is not None:
            text += f" = {each.default}"
        shown.append(text)
    end = f") -> {returns}" if returns is not None else ")"
    line = f"{name}({', '.join(shown)}{end}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), end])


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _docstring(found: griffe.Object | griffe.Alias) -> Sequence[griffe.DocstringSection]:
    if found.docstring is None:
        return []
    options = {"returns_multiple_items": False, "returns_named_value": False}
    return found.docstring.parse("google", **options)


def _text(found: griffe.Object | griffe.Alias) -> list[str]:
    """Return the paragraphs and lists of a docstring."""
    return [part for section in _docstring(found) for part in _section(section)]


def _section(section: griffe.DocstringSection) -> Iterator[str]:
    if isinstance(section, griffe.DocstringSectionText):
        yield from map(_joined, section.value.split("\n\n"))
    elif isinstance(section, griffe.DocstringSectionAdmonition):
        yield f"{section.title}:"
        yield _items(_keys(section.value.contents))
    elif isinstance(section, griffe.DocstringSectionReturns):
        yield f"Returns: {_joined(' '.join(each.description for each in section.value))}"
    elif isinstance(
        section,
        griffe.DocstringSectionParameters
        | griffe.DocstringSectionAttributes
        | griffe.DocstringSectionRaises,
    ):
        title = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Raises"}
        yield f"{title[section.kind.value]}:"
        yield _items(
            (str(getattr(each, "name", None) or each.annotation), each.description)
            for each in section.value
        )
    else:
        raise TypeError(f"unknown section of a docstring: {section.kind}")


def _keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and description of `name: description`, with continuation lines indented."""
    yield from re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.MULTILINE)


def _items(pairs: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"* `{name}`: {_joined(described)}" for name, described in pairs)


def _joined(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
