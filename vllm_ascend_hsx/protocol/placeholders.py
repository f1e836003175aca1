"""The rows of each image in a prompt: ranges of token positions, in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_hsx.protocol.strict_json import is_count, parse

PLACEHOLDERS = "placeholders"


class Placeholder(NamedTuple):
    """The rows of one item of a prompt, such as an image.

    Attributes:
        modality: "image".
        start: token position of the first row.
        length: number of rows, at least 1.
    """

    modality: str
    start: int
    length: int


def within(placeholders: Sequence[Placeholder], end: int) -> list[Placeholder]:
    """Return the items, or their first rows, that are before row `end`."""
    return [
        each._replace(length=min(each.length, end - each.start))
        for each in placeholders
        if each.start < end
    ]


def encode_placeholders(placeholders: Sequence[Placeholder]) -> dict[str, str]:
    """Return the metadata of a prompt's items; empty if there are none."""
    return {PLACEHOLDERS: json.dumps(placeholders, separators=(",", ":"))} if placeholders else {}


def placeholders_of(metadata: Mapping[str, str]) -> list[Placeholder]:
    """Return the items of a prompt in order.

    Raises ValueError if they are invalid, overlap, or are not all within the prompt.
    """
    text = metadata.get(PLACEHOLDERS)
    if text is None:
        return []
    try:
        found = parse(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not found or not all(map(_is_placeholder, found)):
        raise ValueError(f"{PLACEHOLDERS}={text[:100]!a} are not ranges of rows")
    items = [Placeholder(*each) for each in found]
    prompt = metadata.get("num_prompt_tokens", "")
    starts = [each.start for each in items[1:]] + [int(prompt)] * prompt.isdecimal()
    for item, start in zip(items, starts, strict=False):
        if item.start + item.length > start:
            raise ValueError(
                f"{PLACEHOLDERS}: rows [{item.start}, {item.start + item.length}) reach beyond "
                f"row {start}"
            )
    return items


def _is_placeholder(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    modality, start, length = value
    return isinstance(modality, str) and is_count(start) and is_count(length) and length > 0
