"""Names of shards and of the files beside them."""

from __future__ import annotations

import re

# Says that there are shards in a directory: a reader that misses a file need not read all names to know that there are none.
SHARDS_MARK = "hsx-shards"
TAR, INDEX, MANIFEST = ".tar", ".jsonl", ".json"
# An index of no shard, to which consumers add the names of members that are not to be seen any more.
REMOVED = f"hsx-removed{INDEX}"
_SHARD = re.compile(r"(hsx-([0-9a-f]{8})-[0-9]{6,9})(\.tar|\.jsonl|\.json)")


def stem(token: str, number: int) -> str:
    """What the three names of a shard have in common."""
    return f"hsx-{token}-{number:06d}"


def parse_name(name: str) -> tuple[str, str, str] | None:
    """Stem, token and suffix of one of a shard's files; None: `name` is none."""
    match = _SHARD.fullmatch(name)
    return match and (match[1], match[2], match[3])
