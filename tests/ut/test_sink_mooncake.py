"""MooncakeSink and its reader, with a real mooncake_master: all rows or none, in any order, whatever becomes of the store."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth import depth
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from hs_connectors.mooncake_store import packed_layout as packed_layout_of_hs_connectors
from hs_connectors.transfer import MooncakeTransfer
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine, two_machines
from mooncake_master import MooncakeMaster, free_port, require_mooncake
from sink_harness import FORMAT, make_rows, token_ids

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.connector.stats import failure_kind
from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake_manifest import MANIFEST_KEY_SUFFIX, handle_of, keys_of, packed_layout, transfer_params
from vllm_ascend_hsx.protocol.mooncake_store import MooncakeClient, MooncakeError, MooncakeOptions, own_address
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.arena import CHUNK, Arena, ArenaFullError, Gathering
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, SinkError
from vllm_ascend_hsx.sinks.mooncake import MooncakeFile, MooncakeSink

SEGMENT = 64 << 20
ARENA = 4 << 20
ROW = FORMAT.row_bytes


def options(master: MooncakeMaster, **changes: Any) -> MooncakeOptions:
    return MooncakeOptions(
        **{"master_server_address": master.address, "global_segment_size": SEGMENT, "local_buffer_size": ARENA, **changes}
    )


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    require_mooncake()
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(scope="module")
def sink(master: MooncakeMaster) -> Iterator[MooncakeSink]:
    with MooncakeSink(options(master), FORMAT) as sink:
        yield sink


@pytest.fixture(scope="module")
def reader(master: MooncakeMaster) -> Iterator[MooncakeReader]:
    with MooncakeReader(master.address) as reader:
        yield reader


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


def committed(sink: MooncakeSink, tokens: int = 5, name: str = "", version: int = 0) -> MooncakeFile:
    file = open_file(sink, name, tokens)
    file.write(0, make_rows(0, tokens, version))
    file.commit(token_ids(tokens), tokens)
    return file


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def is_free(sink: MooncakeSink) -> bool:
    return sink.arena.free == sink.arena.size


# What is stored


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_what_is_committed_is_read_in_the_models_dtype(master: MooncakeMaster, reader: MooncakeReader, dtype: str) -> None:
    row_format = RowFormat((2, 0, 3), 8, dtype, "tiny")
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    expected = torch.randn(5, 3, 8).to(torch_dtype)
    with MooncakeSink(options(master), row_format) as sink:
        file = open_file(sink)
        file.write(0, expected.view(torch.uint8).numpy())
        file.commit(token_ids(5), 4)
        states = reader.load(transfer_params(file.handle, row_format, 5, True), 10)
    assert states.hidden_states.dtype == torch_dtype
    assert torch.equal(states.hidden_states, expected)
    assert states.token_ids.tolist() == token_ids(5).tolist()
    assert (states.layer_ids, states.num_prompt_tokens) == ([2, 0, 3], 4)
    assert (states.metadata["model"], states.metadata["request_id"], states.metadata["num_output_tokens"]) == ("tiny", file.request_id, "1")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_order_of_spans_with_repeats_and_recomputation_equals_the_expected_rows(
    sink: MooncakeSink, reader: MooncakeReader, transfer: MooncakeTransfer, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 24), "tokens")
    span = st.tuples(st.integers(0, 28), st.integers(0, 9), st.integers(0, 3))
    writes = [(a, a + n, version) for a, n, version in data.draw(st.lists(span, max_size=12), "spans")]
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts")})
    covering = [(a, b, data.draw(st.integers(0, 3))) for a, b in itertools.pairwise(cuts)]
    writes = data.draw(st.permutations(writes + covering), "order")
    expected = np.zeros((40, *FORMAT.row_shape), np.uint16)
    file = open_file(sink, tokens=data.draw(st.integers(0, 30), "expected"))
    for first, last, version in writes:
        expected[first:last] = rows = make_rows(first, last, version)
        file.write(first, rows)
    file.commit(token_ids(tokens), tokens)
    params = transfer_params(file.handle, FORMAT, tokens, False)
    for found in (reader.load(params, 10)._asdict(), transfer.get_generated(params)):
        assert found is not None
        assert np.array_equal(bits(found["hidden_states"]), expected[:tokens])
        assert np.array_equal(found["token_ids"].numpy(), token_ids(tokens))
    reader.remove(params)
    assert is_free(sink)


@given(tokens=st.integers(0, 5000), layers=st.integers(1, 4), hidden=st.sampled_from([8, 24, 64, 2880]))
def test_the_layout_is_that_of_hs_connectors(tokens: int, layers: int, hidden: int) -> None:
    row_format = RowFormat(tuple(range(layers)), hidden, "BF16")
    ours = transfer_params("handle", row_format, tokens, False)
    shapes = {"hidden_states": ([tokens, layers, hidden], torch.bfloat16), "token_ids": ([tokens], torch.int64)}
    tensors, size = packed_layout_of_hs_connectors(shapes)
    assert (ours["tensors"], ours["metadata"]["total_aligned_bytes"]) == (tensors, size)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_quantised_rows_come_with_their_scales_and_are_dequantised_by_our_reader(
    master: MooncakeMaster, reader: MooncakeReader, transfer: MooncakeTransfer, dtype: str
) -> None:
    row_format = RowFormat((2, 0, 3), 8, dtype, "tiny", "fp8")
    rows = torch.randn(5, 3, 8, dtype={"BF16": torch.bfloat16, "F32": torch.float32}[dtype])
    stored, scales = quantize_tensor_to_fp8(rows)
    with MooncakeSink(options(master), row_format) as sink:
        file = open_file(sink)
        for first in (3, 0):
            file.write(first, rows[first : first + 3].contiguous().view(torch.uint8).numpy())
        file.commit(token_ids(5), 4)
        params = transfer_params(file.handle, row_format, 5, True)
        states, as_stored, theirs = reader.load(params, 10), reader.load(params, 10, dequantize=False), transfer.get_generated(params)
    assert theirs is not None
    for found in (as_stored._asdict(), {**theirs, "scales": theirs["hidden_states_scales"]}):
        assert torch.equal(found["hidden_states"].view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(found["scales"], scales)
        assert found["token_ids"].tolist() == token_ids(5).tolist()
    assert torch.equal(states.hidden_states, dequantize_fp8_tensor(stored, scales, rows.dtype))
    assert states.metadata["quantization"] == "fp8_e4m3_per_token"


def test_speculators_reader_takes_it_and_its_delete_removes_the_data(
    sink: MooncakeSink, reader: MooncakeReader, transfer: MooncakeTransfer
) -> None:
    file = committed(sink, 7)
    params = json.loads(json.dumps(transfer_params(file.handle, FORMAT, 7, False)))  # as over HTTP
    found = transfer.get_generated(params)
    assert found is not None
    assert set(found) == {"hidden_states", "token_ids"}
    assert np.array_equal(bits(found["hidden_states"]), make_rows(0, 7))
    transfer.delete(file.handle)
    with pytest.raises(HiddenStatesError, match="its data is not there any more: somebody has removed it"):
        reader.load(params, 10)


def test_the_handle_alone_is_enough(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = committed(sink, 3)
    assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), make_rows(0, 3))


def test_many_threads_write_one_request_of_many_chunks(sink: MooncakeSink, reader: MooncakeReader) -> None:
    tokens, threads = 3 * CHUNK // ROW + 5, 8
    file = open_file(sink)
    start = threading.Barrier(threads)

    def write(rank: int) -> None:
        start.wait()
        for first in range(rank * 500, tokens, threads * 500):
            file.write(first, make_rows(first, min(tokens, first + 500)))

    run_all(*[lambda rank=rank: write(rank) for rank in range(threads)])
    file.commit(token_ids(tokens), tokens)
    assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), make_rows(0, tokens))


def test_requests_that_grow_by_turns_have_chunks_far_apart_and_do_not_mix(sink: MooncakeSink, reader: MooncakeReader) -> None:
    step, count = CHUNK // ROW - 7, 4
    files = [open_file(sink) for _ in range(3)]
    for index in range(count):
        for version, file in enumerate(files):
            file.write(index * step, make_rows(index * step, (index + 1) * step, version))
    assert len(files[1]._gathering.parts(count * step * ROW)) > 2
    for version, file in enumerate(files):
        file.commit(token_ids(count * step), count * step)
        assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), make_rows(0, count * step, version))
        reader.remove(file.handle)
    assert is_free(sink)


# What is not


def test_a_request_that_fails_leaves_its_reason_and_nothing_else(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = open_file(sink)
    file.write(0, make_rows(0, 3))
    file.fail("the copy failed")
    with pytest.raises(HiddenStatesError) as failure:
        reader.load(file.handle, 10)
    assert failure.value.reason == "the copy failed"
    assert sink.client.exist(keys_of(file.handle)) == [False, True, False]
    reader.remove(file.handle)
    assert sink.client.exist(keys_of(file.handle)) == [False, False, False]
    assert is_free(sink)


@pytest.mark.parametrize("timeout", [float("nan"), -1, True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(reader: MooncakeReader, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout=.*give seconds, 0 or more; None or math\.inf waits forever$"):
        reader.load(handle_of("cmpl-none"), timeout)


def test_a_request_that_is_discarded_leaves_no_trace(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = open_file(sink, tokens=3)
    file.write(0, make_rows(0, 3))
    file.discard()
    assert sink.client.exist(keys_of(file.handle)) == [False, False, False]
    assert is_free(sink)
    with pytest.raises(TimeoutError, match="nothing is in the store under"):
        reader.load(file.handle, 0)


def test_what_an_earlier_request_left_is_gone_when_the_next_one_of_its_handle_begins(sink: MooncakeSink, reader: MooncakeReader) -> None:
    earlier = committed(sink, 5, "again", version=1)
    later = open_file(sink, "again")
    assert sink.client.exist(keys_of(earlier.handle)) == [False, False, False]
    later.fail("as a test")
    committed(sink, 2, "again", version=2)
    assert np.array_equal(bits(reader.load(earlier.handle, 10).hidden_states), make_rows(0, 2, 2))


def test_one_handle_belongs_to_one_request_at_a_time(sink: MooncakeSink) -> None:
    file = open_file(sink, "mine")
    with pytest.raises(SinkError, match="another request is writing under this handle"):
        open_file(sink, "mine")
    file.discard()
    open_file(sink, "mine").discard()


@pytest.mark.parametrize("handle", ["a/b", "a:error", "ä", "a\nb", "."])
def test_a_handle_that_could_be_somebody_elses_key_is_refused(sink: MooncakeSink, handle: str) -> None:
    if handle == ".":  # what pathlib makes of nothing
        assert handle_of("") != handle
        return
    with pytest.raises(SinkError, match="the handle cannot be used"):
        sink.open("r", Path(handle))


@given(st.lists(st.text(max_size=300), min_size=2, max_size=2, unique=True))
def test_two_ids_share_no_key(ids: list[str]) -> None:
    one, other = (keys_of(handle_of(each)) for each in ids)
    assert not set(one) & set(other)
    assert all(key.isascii() and key.isprintable() and "/" not in key for key in one)


@pytest.mark.parametrize(
    ("rows", "first"), [(make_rows(0, 1)[:, :, :7].copy(), 0), (make_rows(0, 2)[::2, ::2], 0), (make_rows(0, 1), -1)]
)
def test_what_are_no_rows_is_the_callers_mistake(sink: MooncakeSink, rows: np.ndarray, first: int) -> None:
    file = open_file(sink)
    with pytest.raises(ValueError, match=r"are not rows of|not C-contiguous"):
        file.write(first, rows)
    file.write(0, make_rows(0, 1))
    file.commit(token_ids(1), 1)


# Memory


def test_a_request_for_which_there_is_no_memory_fails_alone_and_all_of_it_comes_back(sink: MooncakeSink, reader: MooncakeReader) -> None:
    half = sink.arena.size // 2 // ROW
    first, second = open_file(sink, tokens=half), open_file(sink)
    with pytest.raises(SinkError, match=r"bytes more are wanted .* mooncake\.local_buffer_size=4194304 .* are free") as failure:
        open_file(sink, "too large", tokens=half + CHUNK // ROW)
    assert failure_kind(failure.value) == "ENOSPC"
    with pytest.raises(HiddenStatesError, match=r"mooncake\.local_buffer_size"):
        reader.load(handle_of("too large"), 10)
    with pytest.raises(SinkError, match=r"mooncake\.local_buffer_size"):
        second.write(10 * half, make_rows(0, 1))
    second.fail("as a test")
    first.write(0, make_rows(0, 4))
    first.commit(token_ids(4), 4)
    assert np.array_equal(bits(reader.load(first.handle, 10).hidden_states), make_rows(0, 4))
    assert is_free(sink)


def test_a_request_that_fails_while_it_is_written_keeps_its_memory_until_it_is_closed(sink: MooncakeSink) -> None:
    file = open_file(sink, tokens=5)
    file.fail("as a test", close=False)
    assert not is_free(sink)
    file.close()
    assert is_free(sink)


@settings(max_examples=depth(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=30))
def test_no_chunk_has_two_owners_and_none_is_lost(steps: list[tuple[int, int]]) -> None:
    arena = Arena(16 * 64, chunk=64)
    gatherings = [Gathering(arena) for _ in range(5)]
    for index, size in steps:
        if size == 0:
            gatherings[index].free()
            continue
        try:
            gatherings[index].reserve(size * 16)
        except ArenaFullError as error:
            assert error.wanted > error.free == arena.free
        owned = [chunk for each in gatherings for chunk in each._chunks]
        assert len(owned) == len(set(owned))
        assert len(owned) * 64 + arena.free == arena.size
    for each in gatherings:
        each.free()
        each.free()
    assert arena.free == arena.size


# A store that fails


def test_a_full_store_fails_the_request_and_nothing_that_was_published_is_evicted_for_it(tmp_path: Path) -> None:
    require_mooncake()
    tokens = (2 << 20) // ROW
    with (
        MooncakeMaster(tmp_path, "-eviction_high_watermark_ratio=0.3", "-eviction_ratio=0.5") as own,
        MooncakeReader(own.address) as reader,
        MooncakeSink(options(own, global_segment_size=16 << 20), FORMAT) as sink,
    ):
        sink.client.put("somebody else's", bytes(1000), may_go=True)
        kept: list[str] = []
        with pytest.raises(SinkError, match="the store has no room for it: have consumers remove what they have read") as failure:
            for _ in range(20):
                kept.append(committed(sink, tokens).handle)
        assert failure_kind(failure.value) == "ENOSPC"
        assert len(kept) >= 5
        assert is_free(sink)
        wait_until(lambda: not any(sink.client.exist(["somebody else's"])))  # so it does evict
        for handle in kept:
            assert np.array_equal(bits(reader.load(handle, 10).hidden_states), make_rows(0, tokens))
        reader.remove(kept[0])
        assert np.array_equal(bits(reader.load(committed(sink, tokens, version=3).handle, 10).hidden_states), make_rows(0, tokens, 3))


def test_manifests_do_not_pile_up_where_consumers_leave_them(sink: MooncakeSink, transfer: MooncakeTransfer) -> None:
    files = [committed(sink) for _ in range(3)]
    transfer.delete(files[0].handle)
    transfer.delete(files[2].handle)
    while len(sink.published._handles) > 16:  # what other tests have left is looked at first
        transfer.delete(committed(sink).handle)
    committed(sink)
    assert sink.client.exist([f"{file.handle}:manifest" for file in files]) == [False, True, False]


def test_a_master_that_dies_fails_requests_one_by_one_and_the_sink_survives(tmp_path: Path) -> None:
    require_mooncake()
    with MooncakeMaster(tmp_path) as own, MooncakeSink(options(own), FORMAT) as sink:
        under_way = open_file(sink, tokens=5)
        under_way.write(0, make_rows(0, 5))
        own.kill()
        with pytest.raises(SinkError, match="it could not be put into the store: mooncake_master does not answer") as failure:
            under_way.commit(token_ids(5), 5)
        assert failure_kind(failure.value) == "ENOTCONN"
        with pytest.raises(SinkError, match="could not be removed: mooncake_master does not answer"):
            open_file(sink)
        assert is_free(sink)
        with own:  # it is started again, at the same place
            wait_until(lambda: not fails(lambda: sink.client.exist(["x"])))
            wait_until(lambda: not fails(lambda: committed(sink, 5, "later")))
            with MooncakeReader(own.address) as reader:
                assert np.array_equal(bits(reader.load("later", 10).hidden_states), make_rows(0, 5))


def test_data_that_went_with_its_server_is_said_to_be_gone(tmp_path: Path) -> None:
    """In a store of its own: in another one, somebody else's segment could hold it."""
    require_mooncake()
    with MooncakeMaster(tmp_path) as own, MooncakeReader(own.address) as reader:
        with MooncakeSink(options(own), FORMAT) as sink:
            gone = committed(sink, 5)
            assert len(reader.load(gone.handle, 10).token_ids) == 5
        with pytest.raises((HiddenStatesError, TimeoutError), match="there any more|nothing is in the store|has ended"):
            reader.load(gone.handle, 1)


def test_data_without_its_manifest_and_a_manifest_without_its_data_are_told_apart(sink: MooncakeSink, reader: MooncakeReader) -> None:
    one, other = committed(sink), committed(sink)
    sink.client.remove([one.handle])
    with pytest.raises(HiddenStatesError, match="its data is not there any more: somebody has removed it, or the process"):
        reader.load(one.handle, 1)
    sink.client.remove([f"{other.handle}:manifest"])
    with pytest.raises(HiddenStatesError, match="its data is there, but its manifest is not: somebody has removed it"):
        reader.load(other.handle, 0.1)


def test_a_reader_waits_for_what_is_not_there_yet(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = open_file(sink, tokens=5)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(reader.load(file.handle, 60)))
    waiting.start()
    file.write(0, make_rows(0, 5))
    assert not found
    file.commit(token_ids(5), 5)
    waiting.join(60)
    assert np.array_equal(bits(found[0].hidden_states), make_rows(0, 5))


# Checksums


def test_data_that_is_not_as_it_was_written_is_refused(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = committed(sink, 5)
    right = reader.load(file.handle, 10)
    swap(sink, file.handle, make_rows(0, 5, version=9))
    with pytest.raises(HiddenStatesError, match=f"its checksum is [0-9a-f]{{8}}, not {right.metadata['checksum']}"):
        reader.load(file.handle, 10)
    assert np.array_equal(bits(reader.load(file.handle, 10, verify=False).hidden_states), make_rows(0, 5, 9))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[2, 0, 3]", b"[2, 1, 3]"),
        (b'"num_prompt_tokens":"5"', b'"num_prompt_tokens":"4"'),
        (b'"model":"tiny"', b'"model":"tinx"'),
        (b'"checksum_algorithm"', b'"checksum_algorythm"'),
    ],
)
def test_a_manifest_that_is_not_as_it_was_written_is_refused(sink: MooncakeSink, reader: MooncakeReader, old: bytes, new: bytes) -> None:
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


def test_data_of_version_1_is_verified_as_before(sink: MooncakeSink, reader: MooncakeReader) -> None:
    file = committed(sink, 5)
    key = file.handle + MANIFEST_KEY_SUFFIX
    text, data = sink.client.get(key), sink.client.get(file.handle)
    assert text is not None
    assert data is not None
    stated = reader.load(file.handle, 10).metadata["checksum"]
    digest = Digest()
    digest.update(data)
    sink.client.remove([key])
    old = text.replace(b'"format_version":"2"', b'"format_version":"1"').replace(stated.encode(), digest.hexdigest().encode())
    sink.client.put(key, old)
    assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), make_rows(0, 5))
    swap(sink, file.handle, make_rows(0, 5, version=9))
    with pytest.raises(HiddenStatesError, match="its checksum is"):
        reader.load(file.handle, 10)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"tensors":{},"metadata":{}}', b'{"tensors":{"hidden_states":{"offset":1e400}}}', b"\xff"],
    ids=range(4),
)
def test_a_manifest_that_makes_no_sense_is_one_error(sink: MooncakeSink, reader: MooncakeReader, text: bytes) -> None:
    file = committed(sink, 5)
    key = file.handle + MANIFEST_KEY_SUFFIX
    sink.client.remove([key])
    sink.client.put(key, text)
    with pytest.raises(HiddenStatesError, match="its manifest cannot be understood|it has no hidden_states"):
        reader.load(file.handle, 10)


def test_without_a_checksum_none_is_compared(master: MooncakeMaster, reader: MooncakeReader) -> None:
    with MooncakeSink(options(master), FORMAT, checksum="none") as sink:
        file = committed(sink, 5)
        assert "checksum" not in reader.load(file.handle, 10).metadata


def test_padding_holds_nothing_of_an_earlier_request(sink: MooncakeSink) -> None:
    committed(sink, 4000, version=1)
    tokens = 5  # 240 bytes of rows, 40 of ids
    file = committed(sink, tokens)
    data = sink.client.get(file.handle)
    layout = packed_layout(FORMAT, tokens)
    assert data is not None and len(data) == layout.size == 320
    assert data[240:256] == bytes(16) and data[296:] == bytes(24)


# Begin and end


def test_what_is_open_when_the_server_stops_says_so(master: MooncakeMaster, sink: MooncakeSink, reader: MooncakeReader) -> None:
    """Its own segment goes with it, so the reason is kept in that of another one."""
    stopping = MooncakeSink(options(master, global_segment_size=0), FORMAT)
    file = open_file(stopping, tokens=3)
    stopping.close()
    stopping.close()
    with pytest.raises(HiddenStatesError) as failure:
        reader.load(file.handle, 10)
    assert failure.value.reason == SERVER_STOPPED
    with pytest.raises(SinkError, match="the sink is closed"):
        open_file(stopping)


@pytest.mark.parametrize(
    "address", ["nowhere", "h:x", ":1", "h:70000"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"master_server_address='{address}' is not host:port.* Start `mooncake_master`"):
        own_address(address)


def test_a_master_that_is_not_there_is_refused_at_once() -> None:
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"'{address}' cannot be reached: Connection refused"):
        MooncakeClient(MooncakeOptions(master_server_address=address), segment=0)


def test_memory_that_cannot_be_registered_is_refused_by_its_option(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MooncakeClient, address: int, size: int) -> None:
        raise MooncakeError(-600)

    monkeypatch.setattr(MooncakeClient, "register", refuse)
    with pytest.raises(UserError, match=r"local_buffer_size=4194304 cannot be registered: .* status -600.*ulimit -l"):
        MooncakeSink(options(master), FORMAT)


def test_params_without_a_handle_are_refused(reader: MooncakeReader) -> None:
    with pytest.raises(ValueError, match="there is no 'handle' in .*hidden_states_error"):
        reader.load({"hidden_states_error": "refused"})


# What the page says


def blocks(label: str) -> list[str]:
    page = (Path(__file__).parents[2] / "docs" / "mooncake.md").read_text()
    found: list[str] = re.findall(rf"<!-- {label} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    return found


def test_an_object_can_be_read_as_the_page_says(master: MooncakeMaster, sink: MooncakeSink, capsys: pytest.CaptureFixture[str]) -> None:
    file = committed(sink)
    (code,) = blocks("read")
    exec(code, {"master": master.address, "kv_transfer_params": transfer_params(file.handle, FORMAT, 5, False)})
    assert capsys.readouterr().out.startswith("torch.Size([5, 3, 8]) tensor([1000000007,")
    assert sink.client.exist(keys_of(file.handle)) == [False, False, False]


def test_the_server_of_the_page_would_start() -> None:
    (command,) = blocks("serve")
    words = shlex.split(command.replace("\\\n", " "))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    config = HsxConfig.parse(transfer["kv_connector_extra_config"])
    assert config.mooncake is not None
    assert (config.sink, config.mooncake.global_segment_size) == ("mooncake", 16 << 30)


# Machines


def test_rows_cross_the_network_to_readers_on_another_machine(tmp_path: Path) -> None:
    """The master and the readers are on one machine, the server and the memory that it gives are on the other."""
    require_mooncake()

    def process(machine: Machine, part: str, master: MooncakeMaster) -> subprocess.Popen[str]:
        command = machine.command([sys.executable, "-m", "tests.ut.fakes.mooncake_process", part, master.address])
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with (
        two_machines() as (first, second),
        first.network(),
        MooncakeMaster(tmp_path, host=first.address) as master,
        process(second, "write", master) as server,
        process(first, "read", master) as reader,
    ):
        assert server.stdin is not None and server.stdout is not None
        said = json.loads(server.stdout.readline())
        read, _ = reader.communicate(json.dumps(said["params"]))
        server.stdin.close()
        assert server.wait(60) == 0
    assert json.loads(read) == [said["digest"], said["digest"]], "ours, theirs"


def run_all(*actions: Callable[[], None]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def fails(action: Callable[[], object]) -> bool:
    try:
        action()
    except (SinkError, OSError):
        return True
    return False


def wait_until(reached: Callable[[], bool]) -> None:
    """Mooncake looks after its master every second."""
    pause = threading.Event()
    for _ in range(600):
        if reached():
            return
        pause.wait(0.05)
    raise AssertionError("not reached")


def swap(sink: MooncakeSink, handle: str, rows: np.ndarray) -> None:
    """Put other rows in place of those under a handle, whose manifest stays."""
    other = open_file(sink, "swapped", len(rows))
    other.write(0, rows)
    layout = packed_layout(FORMAT, len(rows))
    other._complete(layout, token_ids(len(rows)), None)
    sink.client.remove([handle])
    sink.client.put_parts(handle, other._gathering.parts(layout.size))
    other.discard()
