"""Bounds of numbers, and checks of those that callers of the Python API give: refused where they are given, not when they are used."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

LONGEST_S = 24 * 3600  # upper bound of every timeout: poll() and threads take no number of seconds that is much larger
LARGEST = 1 << 40  # upper bound of a size in bytes, of memory or a shard

_SIZE = re.compile(r"^\s*([0-9]{1,30})\s*(B|KiB|MiB|GiB)?\s*$")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def deadline_after(timeout: float | None) -> float | None:
    """When a wait is over, by time.monotonic(), or None if it never is.

    Args:
        timeout: seconds; None and infinity wait for ever, and so does what no system can count.

    Raises:
        ValueError: not a number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not timeout >= 0:  # nan is neither less nor more
        raise ValueError(f"timeout={timeout!r}: give seconds, 0 or more; None or math.inf waits for ever")
    return None if timeout >= threading.TIMEOUT_MAX else time.monotonic() + timeout


def require_whole(name: str, value: Any, least: int, remedy: str) -> None:
    """Refuse what is not a whole number of at least `least`.

    Args:
        name: of the argument.
        value: whatever was given.
        least: the smallest number that is taken.
        remedy: what to give instead.

    Raises:
        ValueError: the message names argument, value and remedy.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name}={value!r}: {remedy}")


def parse_size(value: object) -> object:
    """Bytes, if it is a size in words; what cannot be one is pydantic's to refuse."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise ValueError("is not a size; use bytes or a number with B, KiB, MiB or GiB, such as '32MiB'")
        return int(match[1]) * _UNITS[match[2]]
    return value
