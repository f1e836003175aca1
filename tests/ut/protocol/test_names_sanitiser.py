"""File names of request ids: one safe path component each, and no collisions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.ledger import rank_file
from vllm_ascend_hsx.protocol.names import (
    COMPANION_ROOM,
    DATA_SUFFIX,
    ERROR_SUFFIX,
    INDEX,
    LOCK_SUFFIX,
    MANIFEST,
    NAME_MAX,
    REMOVED,
    SHARDS_MARK,
    TAR,
    file_name,
    partial_name,
    path_refusal,
    refusal,
    shard_stem,
)

ANY_TEXT = st.text(
    st.characters(exclude_categories=()), max_size=400
)  # surrogates, NUL and control characters included
HOSTILE = st.text("aA0._-~/\\\0 \n\té\ud800\u202e‮", max_size=12)

ORDINARY = [
    "cmpl-0a1b2c3d4e5f-0-deadbeef",
    "chatcmpl-9f86d081884c7d659a2feaa0c55ad015-1f2e3d4c",
    "0",
    "a.b_c-d",
    "_x",
    "a" * (NAME_MAX - COMPANION_ROOM - len(DATA_SUFFIX)),
]

CHANGED = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\0b",
    ".hidden",
    "-rf",
    "a b",
    "a\nb",
    "naïve",
    "\u202egnp.exe",
    "\ud800",
    "a~b",
    "a" * (NAME_MAX - COMPANION_ROOM - len(DATA_SUFFIX) + 1),
    "x" * 10_000,
]


@pytest.mark.parametrize("request_id", ORDINARY)
def test_ordinary_id_stays_readable(request_id: str) -> None:
    assert file_name(request_id) == f"{request_id}.safetensors"


@pytest.mark.parametrize("request_id", CHANGED, ids=ascii)
def test_id_that_must_be_changed_gets_a_hash(request_id: str) -> None:
    assert "~" in file_name(request_id)


@given(ANY_TEXT | HOSTILE)
@example("../" * 100)
@example("." * 300)
def test_every_name_is_one_safe_path_component(request_id: str) -> None:
    name = file_name(request_id)
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set("/\\ ")
    assert not name.startswith((".", "-"))
    assert name.endswith(DATA_SUFFIX)
    assert refusal(name) is None
    assert Path("/d", name).parent == Path("/d")


@given(ANY_TEXT | HOSTILE)
@example("a" * 300)
def test_longest_companion_still_fits(request_id: str) -> None:
    name = file_name(request_id)
    for companion in (
        name + LOCK_SUFFIX,
        name + ERROR_SUFFIX,
        partial_name(name + ERROR_SUFFIX, "01234567"),  # of `hsx generate`
    ):
        assert len(os.fsencode(companion)) <= NAME_MAX


@given(st.lists(ANY_TEXT | HOSTILE, unique=True, min_size=2, max_size=30))
@example(["a/b", "a_b", "a\0b", "a b"])
@example(["a" * 300, "a" * 301])
def test_two_ids_never_share_a_file(request_ids: list[str]) -> None:
    assert len({file_name(request_id) for request_id in request_ids}) == len(request_ids)


@given(HOSTILE)
def test_no_id_collides_with_a_sanitised_id(request_id: str) -> None:
    name = file_name(request_id)
    chosen = name.removesuffix(DATA_SUFFIX)
    assert chosen == request_id or file_name(chosen) != name


@given(HOSTILE, HOSTILE)
def test_no_data_file_has_the_name_of_a_companion(request_id: str, other: str) -> None:
    name = file_name(other)
    assert file_name(request_id) not in {
        name + LOCK_SUFFIX,
        name + ERROR_SUFFIX,
        partial_name(name),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "not a plain, printable name"),
        (".", "not a plain, printable name"),
        ("..", "not a plain, printable name"),
        ("a/b.safetensors", "not a plain, printable name"),
        ("a\0.safetensors", "not a plain, printable name"),
        ("a\n.safetensors", "not a plain, printable name"),
        ("\udcff.safetensors", "not a plain, printable name"),
        (".a.safetensors", "starts with a dot"),
        ("a.lock", "does not end with .safetensors"),
        ("é" * 110 + ".safetensors", "longer than"),
    ],
    ids=ascii,
)
def test_invalid_client_name_is_refused_with_the_reason(name: str, words: str) -> None:
    assert words in str(refusal(name))


@pytest.mark.parametrize(
    "ours",
    [
        SHARDS_MARK,
        REMOVED,
        *(shard_stem("0123abcd", 0) + suffix for suffix in (TAR, INDEX, MANIFEST)),
        rank_file("ledger", 1, 0),
        rank_file("ledger", 4, 2),
        *("x.safetensors" + suffix for suffix in ("", LOCK_SUFFIX, ERROR_SUFFIX)),
    ],
)
@pytest.mark.parametrize("path", ["{}/x.safetensors", "a/{}/x.safetensors", "{}/b/x.safetensors"])
def test_folder_with_a_reserved_name_is_refused(ours: str, path: str) -> None:
    assert "is reserved for files" in str(path_refusal(path.format(ours)))


@pytest.mark.parametrize("folder", ["hsx-run1", "shards", "a.tar.d", "json", "v1.2"])
def test_folder_with_an_almost_reserved_name_is_accepted(folder: str) -> None:
    assert path_refusal(f"{folder}/x.safetensors") is None
