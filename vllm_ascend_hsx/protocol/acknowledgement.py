"""A marker beside a file: consumers no longer need the file, and `hsx clean` may remove it.

The marker of `NAME` is `NAME.acknowledged`. It names the file by size and time of change, so it
says nothing about a later file of the same name. A marker is complete or absent.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from vllm_ascend_hsx.protocol.strict_json import parse


def encode_acknowledgement(status: os.stat_result) -> bytes:
    """Return the content of a marker for the file with this status."""
    return (json.dumps(_identity(status)) + "\n").encode("ascii")


def acknowledges(content: bytes, status: os.stat_result) -> bool:
    """Return whether a marker with this content is for the file with this status."""
    with suppress(ValueError):
        return parse(content) == _identity(status)
    return False


def _identity(status: os.stat_result) -> dict[str, int]:
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
