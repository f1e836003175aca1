"""Parse JSON from untrusted sources: strictly, and with ValueError as the only error."""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

LARGEST = 2**62  # largest size, position or time: the sum of two fits into an int64


class RepeatedKeyError(ValueError):
    """An object has a key twice. `key` is the key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r:.100} occurs twice")
        self.key = key


def parse(text: bytes | str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: if `text` is not JSON in UTF-8, nests too deep, repeats a key, or has a number
            that is not finite or too long.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it nests too deep") from None


def parse_unique(text: bytes | str) -> Any:
    """Parse a JSON text that repeats no key. Otherwise it accepts the same texts as `json.loads`.

    Raises:
        RepeatedKeyError: if an object has a key twice.
        ValueError: if `text` is not JSON in UTF-8.
        RecursionError: if it nests too deep.
    """
    return _UNIQUE.decode(text if isinstance(text, str) else text.decode("utf-8"))


def is_count(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer that can be a size, a position or a count."""
    return type(value) is int and 0 <= value <= LARGEST


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, _ in pairs:
            if key not in found:
                raise RepeatedKeyError(key)
            del found[key]
    return found


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_UNIQUE = json.JSONDecoder(object_pairs_hook=_object)
