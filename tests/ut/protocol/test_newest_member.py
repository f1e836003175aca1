"""The ends of a directory's indexes name the newest member of a name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.protocol import shard_index
from vllm_ascend_hsx.protocol.names import INDEX, shard_stem
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, encode, newest_member

SECOND = 10**9
STEM = shard_stem("01234567", 0)
NAMES = ["a.safetensors", "b.safetensors", "ab.safetensors"]


def newest(directory: Path, name: str, since_ns: int) -> Member | None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = newest_member(fd, name, since_ns)
    finally:
        os.close(fd)
    return None if found is None else found[1]


@st.composite
def lines(draw: st.DrawFn) -> list[Member | Tombstone]:
    made: list[Member | Tombstone] = []
    for time_ns in sorted(draw(st.lists(st.integers(100 * SECOND, 140 * SECOND), max_size=20, unique=True))):
        name = draw(st.sampled_from(NAMES))
        request_id = "r" * draw(st.integers(0, 300))
        made.append(draw(st.sampled_from([Tombstone(name, time_ns), Member(name, 512, 9, 1, request_id, "", time_ns)])))
    return made


@given(index=lines(), name=st.sampled_from(NAMES), since_s=st.integers(100, 140), torn=st.binary(max_size=90))
def test_the_newest_line_since_a_time_is_found_however_long_the_lines_are(
    index: list[Member | Tombstone], name: str, since_s: int, torn: bytes
) -> None:
    known = [line for line in index if line.name == name and line.time_ns >= (since_s - 10) * SECOND]
    expected = known[-1] if known and isinstance(known[-1], Member) else None
    with tempfile.TemporaryDirectory() as text, patch.object(shard_index, "_CHUNK", 64):
        Path(text, STEM + INDEX).write_bytes(b"".join(map(encode, index)) + torn.replace(b"\n", b""))
        assert newest(Path(text), name, since_s * SECOND) == expected


def test_a_line_of_megabytes_is_read_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / (STEM + INDEX)).write_bytes(encode(Member(NAMES[0], 512, 9, 1, "", "", 9)) + bytes(8 << 20) + b"\n")
    pread, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (sizes.append(size), pread(fd, size, at))[1])
    assert newest(tmp_path, NAMES[0], 5) is not None
    assert sum(sizes) <= 9 << 20
    assert len(sizes) < 12
