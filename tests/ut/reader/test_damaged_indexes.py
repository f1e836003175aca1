"""Indexes that are damaged, or cannot be read for a moment."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from sink_harness import MIB

from vllm_ascend_hsx.protocol.names import INDEX, shard_stem
from vllm_ascend_hsx.protocol.shard_index import Member, encode
from vllm_ascend_hsx.reader.shards import Shards

NAME = "a.safetensors"


def test_index_is_read_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / (shard_stem("89abcdef", 0) + INDEX)
    index.write_bytes(encode(Member(NAME, 512, 9, 1, "", "", time.time_ns())))
    shards = Shards(tmp_path)

    def fail(*arguments: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output error"):
        broken.setattr(os, "pread", fail)
        shards.find(NAME)
    assert shards.find(NAME) is not None


def test_index_that_lost_a_part_is_read_to_the_end(tmp_path: Path) -> None:
    index = tmp_path / (shard_stem("89abcdef", 0) + INDEX)
    line = encode(Member(NAME, 512, 9, 1, "", "", time.time_ns()))
    index.write_bytes(bytes(40 * MIB) + b"\n" + line)
    assert Shards(tmp_path).find(NAME) is not None
