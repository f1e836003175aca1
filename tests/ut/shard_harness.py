"""Directories of shards for tests of readers, and lines of indexes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sink_harness import FORMAT, MIB, publish

from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def sealed_shards(where: Path) -> Path:
    """Write two sealed shards, one with folders, and a plain file."""
    with ShardSink(where, FORMAT, shard_bytes=20_000) as sink:
        for i in range(5):
            publish(sink, where, f"r{i}", 3 + i, i)
        publish(sink, where, "folder/in/r5", 8, 5)
    with FileSink(where, FORMAT) as files:
        publish(files, where, "s", 2, 9)
    return where


def unsealed_shard(where: Path) -> Path:
    """Write six members of different lengths to a shard without a manifest."""
    with ShardSink(where, FORMAT, shard_bytes=MIB) as sink:
        for i in range(6):
            publish(sink, where, f"r{i}", 3 + i, version=i)
    next(where.glob("hsx-*.json")).unlink()
    return where


def index_of(storage: Path) -> Path:
    return next(storage.glob("hsx-*-*.jsonl"))


def line(name: str, **changes: Any) -> bytes:
    """Return an index line about a member, newer than any line that a test writes."""
    values = {
        "name": name,
        "offset": 4096,
        "size": 4096,
        "tokens": 1,
        "request_id": "",
        "checksum": "",
        "time_ns": 2**61,
        **changes,
    }
    return json.dumps(values).encode() + b"\n"


def member_name(number: int) -> str:
    return f"r{number}-0123abcd.safetensors"
