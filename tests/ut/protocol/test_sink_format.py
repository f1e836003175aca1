"""The bytes of a file: reserved header, known offsets, metadata that safetensors readers accept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from sink_harness import FORMAT

import vllm_ascend_hsx
from vllm_ascend_hsx.protocol.format import PAGE, FileLayout, FormatError, read_header
from vllm_ascend_hsx.protocol.placeholders import Placeholder, placeholders_of
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.strict_json import LARGEST
from vllm_ascend_hsx.protocol.weights import (
    LONGEST,
    Origin,
    WeightVersion,
    checked_name,
    weight_versions_of,
)

A, B = "0a" * 16, "0b" * 16  # fingerprints


@given(
    st.text(st.characters(exclude_categories=()), max_size=300)
    | st.integers(0, 20_000).map(lambda n: "\0" * n),
    st.lists(st.integers(0, 200), min_size=1, max_size=80, unique=True),
    st.text(st.characters(exclude_categories=()), max_size=100),
    st.integers(0, 2**42),
    st.lists(
        st.builds(Placeholder, st.text(max_size=9), st.integers(0, 2**40), st.integers(1, 2**40)),
        max_size=300,
    ),
)
@example("", [0], "", 2**42, [])
@example("", [0], "", 2**42, [Placeholder("image", 2**40, 2**40)] * 300)
def test_header_always_fits_in_the_reserved_space(
    request_id: str, layer_ids: list[int], model: str, tokens: int, placeholders: list[Placeholder]
) -> None:
    layout = FileLayout(
        RowFormat(tuple(layer_ids), 4, "F16", model), request_id, 2**63, placeholders
    )
    header = layout.header(tokens, tokens, origin=LONGEST)
    assert len(header) == layout.data_start
    assert layout.data_start % PAGE == 0
    assert int.from_bytes(header[:8], "little") == layout.data_start - 8
    offsets = json.loads(header[8:])["token_ids"]["data_offsets"]
    assert layout.row_offset(tokens) == layout.data_start + offsets[0]
    assert layout.file_size(tokens) == layout.data_start + offsets[1]


@pytest.mark.parametrize("size", range(0, PAGE, 64))
def test_longest_versions_of_weights_fit_wherever_a_page_ends(size: int) -> None:
    layout = FileLayout(FORMAT, "x" * size, 2**63)
    assert len(layout.header(2**40, 2**40, checksum=True, origin=LONGEST)) == layout.data_start


def test_ordinary_header_takes_one_page() -> None:
    layers = tuple(range(62))
    assert (
        FileLayout(
            RowFormat(layers, 3072, "BF16", "/models/MiniMax-M2"), "cmpl-" + "f" * 60
        ).data_start
        == PAGE
    )


@pytest.mark.parametrize(
    ("versions", "fingerprint"),
    [
        ([], None),
        ([WeightVersion()], None),
        ([WeightVersion(0, "", A)], A),
        ([WeightVersion(3, "step 3", A), WeightVersion(4, "", A)], A),
        ([WeightVersion(3, "", A), WeightVersion(4, "step 4", B)], None),
        ([WeightVersion(3, "", A), WeightVersion(4)], None),
    ],
    ids=["unknown", "no checkpoint", "one", "loaded again", "two", "of a trainer"],
)
def test_fingerprint_is_stated_only_if_all_rows_share_it(
    tmp_path: Path, versions: list[WeightVersion], fingerprint: str | None
) -> None:
    layout, path = FileLayout(FORMAT, "a"), tmp_path / "f"
    path.write_bytes(layout.header(2, 1, origin=Origin(versions)).ljust(layout.file_size(2), b"\1"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.get("weights") == fingerprint
    assert [each[:2] for each in weight_versions_of(metadata)] == [each[:2] for each in versions]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "[3]", "[[3]]", '[["3",""]]', '[[-1,""]]', "[[1,2]]", '[[1,""],[2,""],[3,""]]'],
)
def test_invalid_weight_versions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="are not versions of weights"):
        weight_versions_of({"weight_versions": text})


@pytest.mark.parametrize("name", ["", "x" * 129, 'a"b', "a\\b", "\n", "雪", 3, None], ids=ascii)
def test_too_long_weight_version_name_is_refused(name: object) -> None:
    with pytest.raises(
        ValueError, match="cannot be named .* use 1 to 128 printable ASCII characters"
    ):
        checked_name(name)


@given(st.from_regex(r"[ !#-\[\]-~]{1,128}", fullmatch=True), st.integers(0, LARGEST))
def test_every_name_fits_and_reads_back(name: str, number: int) -> None:
    versions = [WeightVersion(number, checked_name(name))] * 2
    header = FileLayout(FORMAT, "a").header(2, 1, origin=Origin(versions, is_aborted=True))
    assert weight_versions_of(json.loads(header[8:])["__metadata__"]) == versions


@pytest.mark.parametrize(
    "request_id", ["cmpl-1", "a\0b", "\ud800", 'quote"back\\slash', "雪", "x" * 10_000], ids=ascii
)
def test_metadata_reads_back_with_safetensors(tmp_path: Path, request_id: str) -> None:
    path = tmp_path / "f"
    layout = FileLayout(FORMAT, request_id)
    path.write_bytes(layout.header(2, 1).ljust(layout.file_size(2), b"\1"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"hidden_states", "token_ids"}
    assert metadata == {
        "format_version": "2",
        "producer": "vllm-ascend-hsx",
        "producer_version": vllm_ascend_hsx.__version__,
        "model": "tiny",
        "layer_ids": "[2, 0, 3]",
        "layer_id_meaning": "residual stream after i layers, before the final norm (0: embedding output)",
        "dtype": "BF16",
        "num_prompt_tokens": "1",
        "num_output_tokens": "1",
        "request_id": request_id if request_id != "\ud800" else "\\ud800",
    }


@pytest.mark.parametrize(
    "text", ['[["image",0,2],["image",1,1]]', '[["image",3,2]]', '[["image",0,0]]', "[]"]
)
def test_images_that_overlap_or_are_not_within_the_prompt_are_refused(text: str) -> None:
    good = {"placeholders": '[["image",0,2],["image",2,2]]', "num_prompt_tokens": "4"}
    assert placeholders_of(good) == [("image", 0, 2), ("image", 2, 2)]
    with pytest.raises(ValueError, match="placeholders"):
        placeholders_of({"placeholders": text, "num_prompt_tokens": "4"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((), 8, "BF16"), "names no layer"),
        (((1,), 0, "BF16"), "hidden_size=0"),
        (((1,), 8, "F8"), "Use one of BF16, F16, F32"),
        (((1,), 3, "BF16"), "rows of 6 bytes"),
    ],
)
def test_row_format_that_cannot_be_stored_is_refused(
    arguments: tuple[tuple[int, ...], int, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        RowFormat(*arguments)


def test_header_reader_agrees_with_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tensors = {
        "hidden_states": torch.ones(5, 2, 3, dtype=torch.bfloat16),
        "token_ids": torch.arange(5),
        "extra": torch.ones(1),
    }
    save_file(tensors, path, metadata={"a": "b"})
    fd = os.open(path, os.O_RDONLY)
    try:
        header = read_header(fd)
    finally:
        os.close(fd)
    assert header.metadata == {"a": "b"}
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "hidden_states": ("BF16", (5, 2, 3)),
        "token_ids": ("I64", (5,)),
        "extra": ("F32", (1,)),
    }
    data = path.read_bytes()
    ids = header.tensors["token_ids"]
    assert data[ids.begin : ids.end] == torch.arange(5).numpy().tobytes()


def _file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few"),
        (b"\xff" * 100, "the first 8 state a header"),
        ((200).to_bytes(8, "little") + b"{}", "the first 8 state a header"),
        ((2).to_bytes(8, "little") + b"{x", "its header is invalid"),
        (_file([1]), "its header is invalid"),
        (
            _file({"t": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
            "its header is invalid",
        ),
        (
            _file({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}, b"x"),
            r"U8 \[2\] of 1 bytes",
        ),
        (
            _file({"t": {"dtype": "U8", "shape": [2], "data_offsets": [-2, 0]}}, b"x"),
            "its header is invalid",
        ),
        (
            _file({"t": {"dtype": "U8", "shape": [-1], "data_offsets": [1, 0]}}, b"x"),
            "its header is invalid",
        ),
        (
            _file({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"x"),
            "t ends at byte",
        ),
    ],
)
def test_incomplete_safetensors_file_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(FormatError, match=words):
            read_header(fd)
    finally:
        os.close(fd)
