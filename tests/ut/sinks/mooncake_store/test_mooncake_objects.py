"""Objects in a Mooncake store: the layout of hs-connectors, manifests, checksums, readers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from hs_connectors.mooncake_store import packed_layout as packed_layout_of_hs_connectors
from hs_connectors.transfer import MooncakeTransfer
from hypothesis import given
from hypothesis import strategies as st
from mooncake_master import MooncakeMaster
from sink_cases import mooncake_options as options
from sink_harness import FORMAT, bits, finite_rows, put, token_ids

from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.mooncake.manifest import (
    MANIFEST_KEY_SUFFIX,
    handle_of,
    keys_of,
    packed_layout,
    transfer_params,
)
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeFile, MooncakeSink


@pytest.fixture(scope="module")
def sink(master: MooncakeMaster) -> Iterator[MooncakeSink]:
    with MooncakeSink(options(master.address), FORMAT) as sink:
        yield sink


@pytest.fixture(scope="module")
def transfer(master: MooncakeMaster) -> Iterator[MooncakeTransfer]:
    """speculators' reader."""
    config = MooncakeStoreConfig("127.0.0.1", "P2PHANDSHAKE", master.address, 0, 16 << 20)
    transfer = MooncakeTransfer(MooncakeHiddenStatesStore(config))
    transfer.setup()
    yield transfer
    transfer.store._store.close()


_numbers = itertools.count()


def open_file(sink: MooncakeSink, name: str = "", tokens: int = 0) -> MooncakeFile:
    request_id = name or f"cmpl-{next(_numbers)}"
    return sink.open(request_id, Path(handle_of(request_id)), tokens)


def committed(
    sink: MooncakeSink, tokens: int = 5, name: str = "", version: int = 0
) -> MooncakeFile:
    file = open_file(sink, name, tokens)
    put(file, tokens, version)
    return file


@given(
    tokens=st.integers(0, 5000), layers=st.integers(1, 4), hidden=st.sampled_from([8, 24, 64, 2880])
)
def test_layout_equals_that_of_hs_connectors(tokens: int, layers: int, hidden: int) -> None:
    row_format = RowFormat(tuple(range(layers)), hidden, "BF16")
    ours = transfer_params("handle", row_format, tokens, False)
    shapes = {
        "hidden_states": ([tokens, layers, hidden], torch.bfloat16),
        "token_ids": ([tokens], torch.int64),
    }
    tensors, size = packed_layout_of_hs_connectors(shapes)
    assert (ours["tensors"], ours["metadata"]["total_aligned_bytes"]) == (tensors, size)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_quantised_rows_come_with_their_scales_and_are_dequantised_by_our_reader(
    master: MooncakeMaster, reader: MooncakeReader, transfer: MooncakeTransfer, dtype: str
) -> None:
    row_format = RowFormat((2, 0, 3), 8, dtype, "tiny", "fp8")
    rows = torch.randn(5, 3, 8, dtype={"BF16": torch.bfloat16, "F32": torch.float32}[dtype])
    stored, scales = quantize_tensor_to_fp8(rows)
    with MooncakeSink(options(master.address), row_format) as sink:
        file = open_file(sink)
        for first in (3, 0):
            file.write(first, rows[first : first + 3].contiguous().view(torch.uint8).numpy())
        file.commit(token_ids(5), 4)
        params = transfer_params(file.handle, row_format, 5, True)
        states, as_stored, theirs = (
            reader.load(params, 10),
            reader.load(params, 10, dequantize=False),
            transfer.get_generated(params),
        )
    assert theirs is not None
    for found in (as_stored._asdict(), {**theirs, "scales": theirs["hidden_states_scales"]}):
        assert torch.equal(found["hidden_states"].view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(found["scales"], scales)
        assert found["token_ids"].tolist() == token_ids(5).tolist()
    assert torch.equal(states.hidden_states, dequantize_fp8_tensor(stored, scales, rows.dtype))
    assert states.metadata["quantization"] == "fp8_e4m3_per_token"


def test_speculators_reader_loads_and_deletes_the_object(
    sink: MooncakeSink, reader: MooncakeReader, transfer: MooncakeTransfer
) -> None:
    file = committed(sink, 7)
    params = json.loads(json.dumps(transfer_params(file.handle, FORMAT, 7, False)))  # as over HTTP
    found = transfer.get_generated(params)
    assert found is not None
    assert set(found) == {"hidden_states", "token_ids"}
    assert np.array_equal(bits(found["hidden_states"]), finite_rows(0, 7))
    transfer.delete(file.handle)
    with pytest.raises(
        HiddenStatesError, match="its data is no longer in the store: it was removed"
    ):
        reader.load(params, 10)


@pytest.mark.parametrize("timeout", [float("nan"), -1, True])
def test_invalid_timeout_is_refused(reader: MooncakeReader, timeout: float) -> None:
    with pytest.raises(
        ValueError, match=r"^timeout=.*give seconds, 0 or more; None or math\.inf waits forever$"
    ):
        reader.load(handle_of("cmpl-none"), timeout)
    with pytest.raises(TimeoutError, match="nothing is in the store under 'cmpl-none' after 0 s"):
        reader.load(handle_of("cmpl-none"), 0)


def test_missing_data_and_missing_manifest_have_different_errors(
    sink: MooncakeSink, reader: MooncakeReader
) -> None:
    one, other = committed(sink), committed(sink)
    sink.client.remove([one.handle])
    with pytest.raises(
        HiddenStatesError,
        match="its data is no longer in the store: it was removed, or the process",
    ):
        reader.load(one.handle, 1)
    sink.client.remove([f"{other.handle}:manifest"])
    with pytest.raises(
        HiddenStatesError,
        match="its data is in the store, but its manifest is missing: it was removed",
    ):
        reader.load(other.handle, 0.1)


# Checksums


def test_changed_data_is_refused(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = committed(sink, 5)
    right = reader.load(file.handle, 10)
    swap(sink, file.handle, finite_rows(0, 5, version=9))
    with pytest.raises(
        HiddenStatesError, match=f"its checksum is [0-9a-f]{{8}}, not {right.metadata['checksum']}"
    ):
        reader.load(file.handle, 10)
    assert np.array_equal(
        bits(reader.load(file.handle, 10, verify=False).hidden_states), finite_rows(0, 5, 9)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[2, 0, 3]", b"[2, 1, 3]"),
        (b'"num_prompt_tokens":"4"', b'"num_prompt_tokens":"3"'),
        (b'"model":"tiny"', b'"model":"tinx"'),
        (b'"checksum_algorithm"', b'"checksum_algorythm"'),
    ],
)
def test_changed_manifest_is_refused(
    sink: MooncakeSink, reader: MooncakeReader, old: bytes, new: bytes
) -> None:
    file = committed(sink, 5)
    key = file.handle + MANIFEST_KEY_SUFFIX
    text = sink.client.get(key)
    assert text is not None
    assert text.count(old) == 1
    sink.client.remove([key])
    sink.client.put(key, text.replace(old, new))
    reader.load(file.handle, 10, verify=False)
    with pytest.raises(HiddenStatesError, match="its checksum is|cannot be verified"):
        reader.load(file.handle, 10)


def test_data_of_version_1_is_verified(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = committed(sink, 5)
    key = file.handle + MANIFEST_KEY_SUFFIX
    text, data = sink.client.get(key), sink.client.get(file.handle)
    assert text is not None
    assert data is not None
    stated = reader.load(file.handle, 10).metadata["checksum"]
    digest = Digest()
    digest.update(data)
    sink.client.remove([key])
    old = text.replace(b'"format_version":"2"', b'"format_version":"1"').replace(
        stated.encode(), digest.hexdigest().encode()
    )
    sink.client.put(key, old)
    assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), finite_rows(0, 5))
    swap(sink, file.handle, finite_rows(0, 5, version=9))
    with pytest.raises(HiddenStatesError, match="its checksum is"):
        reader.load(file.handle, 10)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"tensors":{},"metadata":{}}',
        b'{"tensors":{"hidden_states":{"offset":1e400}}}',
        b"\xff",
    ],
    ids=range(4),
)
def test_invalid_manifest_is_one_error(
    sink: MooncakeSink, reader: MooncakeReader, text: bytes
) -> None:
    file = committed(sink, 5)
    key = file.handle + MANIFEST_KEY_SUFFIX
    sink.client.remove([key])
    sink.client.put(key, text)
    with pytest.raises(HiddenStatesError, match="its manifest is invalid|it has no hidden_states"):
        reader.load(file.handle, 10)


def test_object_without_a_checksum_is_not_verified(
    master: MooncakeMaster, reader: MooncakeReader
) -> None:
    with MooncakeSink(options(master.address), FORMAT, checksum="none") as sink:
        file = committed(sink, 5)
        assert "checksum" not in reader.load(file.handle, 10).metadata


def test_padding_has_no_bytes_of_an_earlier_request(sink: MooncakeSink) -> None:
    committed(sink, 4000, version=1)
    tokens = 5  # 240 bytes of rows, 40 of ids
    file = committed(sink, tokens)
    data = sink.client.get(file.handle)
    layout = packed_layout(FORMAT, tokens)
    assert data is not None and len(data) == layout.size == 320
    assert data[240:256] == bytes(16) and data[296:] == bytes(24)


# Arguments of readers


@pytest.mark.parametrize("params", [{"hidden_states_error": "refused"}, {"handle": 3}, None, "", 3])
def test_params_without_a_handle_are_refused(reader: MooncakeReader, params: Any) -> None:
    for call in (reader.load, reader.remove):
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"there is no 'handle' in {params!r}; give the response's kv_transfer_params"
            ),
        ):
            call(params)


def page_blocks(label: str) -> list[str]:
    page = (Path(__file__).parents[4] / "docs" / "mooncake.md").read_text()
    found: list[str] = re.findall(rf"<!-- {label} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    return found


def test_object_can_be_read_with_the_code_of_the_page(
    master: MooncakeMaster, sink: MooncakeSink, capsys: pytest.CaptureFixture[str]
) -> None:
    file = committed(sink)
    (code,) = page_blocks("read")
    exec(
        code,
        {
            "master": master.address,
            "kv_transfer_params": transfer_params(file.handle, FORMAT, 5, False),
        },
    )
    assert capsys.readouterr().out.startswith("torch.Size([5, 3, 8]) tensor([1000000007,")
    assert sink.client.exist(keys_of(file.handle)) == [False, False, False]


def swap(sink: MooncakeSink, handle: str, rows: np.ndarray) -> None:
    """Replace the rows under a handle, and keep the manifest."""
    other = open_file(sink, "swapped", len(rows))
    other.write(0, rows)
    layout = packed_layout(FORMAT, len(rows))
    other._complete(layout, token_ids(len(rows)), None)
    sink.client.remove([handle])
    sink.client.put_parts(handle, other._buffer.parts(layout.size))
    other.discard()
