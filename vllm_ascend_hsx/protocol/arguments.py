"""Bounds and early checks of arguments of the Python API."""

from __future__ import annotations

import os
import re
import threading
import time
from numbers import Real
from pathlib import Path
from typing import Any

LONGEST_S = 24 * 3600  # upper bound of timeouts; poll() and threads accept little more
LARGEST = 1 << 40  # upper bound of sizes in bytes, of memory or a shard

_SIZE = re.compile(r"^\s*([0-9]{1,30})\s*(B|KiB|MiB|GiB)?\s*$")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def deadline_after(timeout: float | None) -> float | None:
    """Return the end of a wait by time.monotonic(), or None if the wait never ends.

    None, infinity and numbers too large for the system wait forever. Raises ValueError if the
    timeout is not a number of seconds.
    """
    if timeout is None:
        return None
    if (
        isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout >= 0
    ):  # false for NaN too
        raise ValueError(
            f"timeout={timeout!r}: give seconds, 0 or more; None or math.inf waits forever"
        )
    return None if timeout >= threading.TIMEOUT_MAX else time.monotonic() + timeout


def require_whole(name: str, value: Any, least: int, remedy: str) -> None:
    """Raise a ValueError unless the argument is a whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_text(name: str, value: Any, remedy: str) -> None:
    """Raise a ValueError unless the argument is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r:.100}: {remedy}")


def require_path(name: str, value: Any, remedy: str, *, named: bool = False) -> Path:
    """Return an argument as a path. Raise a ValueError unless it is a text path.

    An empty text is refused, because `Path("")` is the working directory.

    Args:
        name, value: of the argument.
        remedy: describes a right value.
        named: whether the path must end in a name; `.` and `/` do not.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text or (named and not Path(text).name):
        raise ValueError(f"{name}={value!r:.100}: {remedy}")
    return Path(text)


def parse_size(value: object) -> object:
    """Return the bytes of a size with a unit; pass other values on for pydantic to check."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise ValueError(
                "is not a size; use bytes or a number with B, KiB, MiB or GiB, such as '32MiB'"
            )
        return int(match[1]) * _UNITS[match[2]]
    return value
