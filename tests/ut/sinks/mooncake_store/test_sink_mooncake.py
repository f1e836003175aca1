"""MooncakeSink beyond the contract: memory, and stores that are full, fail or end."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine, two_machines
from mooncake_master import MooncakeMaster, free_port, require_mooncake
from sink_cases import mooncake_options as options
from sink_harness import FORMAT, bits, finite_rows, token_ids
from test_mooncake_objects import committed, open_file, page_blocks

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.connector.stats import failure_kind
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake.manifest import handle_of, keys_of
from vllm_ascend_hsx.protocol.mooncake.store import (
    MooncakeClient,
    MooncakeError,
    MooncakeOptions,
    own_address,
)
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.mooncake.buffer_pool import (
    CHUNK,
    BufferPool,
    BufferPoolFullError,
    PooledBuffer,
)
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeSink

ROW = FORMAT.row_bytes


@pytest.fixture(scope="module")
def sink(master: MooncakeMaster) -> Iterator[MooncakeSink]:
    with MooncakeSink(options(master.address), FORMAT) as sink:
        yield sink


def is_free(sink: MooncakeSink) -> bool:
    return sink.buffer_pool.free == sink.buffer_pool.size


def test_requests_that_grow_in_turns_do_not_mix(sink: MooncakeSink, reader: MooncakeReader) -> None:
    step, count = CHUNK // ROW - 7, 4
    files = [open_file(sink) for _ in range(3)]
    for index in range(count):
        for version, file in enumerate(files):
            file.write(index * step, finite_rows(index * step, (index + 1) * step, version))
    assert len(files[1]._buffer.parts(count * step * ROW)) > 2
    for version, file in enumerate(files):
        file.commit(token_ids(count * step), count * step)
        assert np.array_equal(
            bits(reader.load(file.handle, 10).hidden_states), finite_rows(0, count * step, version)
        )
        reader.remove(file.handle)
    assert is_free(sink)


@pytest.mark.parametrize("handle", ["a/b", "a:error", "ä", "a\nb", "."])
def test_handle_that_could_collide_with_another_key_is_refused(
    sink: MooncakeSink, handle: str
) -> None:
    if handle == ".":  # pathlib's form of an empty path
        assert handle_of("") != handle
        return
    with pytest.raises(SinkError, match="the handle cannot be used"):
        sink.open("r", Path(handle))


@given(st.lists(st.text(max_size=300), min_size=2, max_size=2, unique=True))
def test_two_ids_share_no_key(ids: list[str]) -> None:
    one, other = (keys_of(handle_of(each)) for each in ids)
    assert not set(one) & set(other)
    assert all(key.isascii() and key.isprintable() and "/" not in key for key in one)


# Memory


def test_request_without_memory_fails_alone_and_frees_its_chunks(
    sink: MooncakeSink, reader: MooncakeReader
) -> None:
    half = sink.buffer_pool.size // 2 // ROW
    first, second = open_file(sink, tokens=half), open_file(sink)
    with pytest.raises(
        SinkError, match=r"needs \d+ more bytes, .* mooncake\.local_buffer_size=4194304 .* are free"
    ) as failure:
        open_file(sink, "too large", tokens=half + CHUNK // ROW)
    assert failure_kind(failure.value) == "ENOSPC"
    with pytest.raises(HiddenStatesError, match=r"mooncake\.local_buffer_size"):
        reader.load(handle_of("too large"), 10)
    with pytest.raises(SinkError, match=r"mooncake\.local_buffer_size"):
        second.write(10 * half, finite_rows(0, 1))
    second.fail("as a test")
    first.write(0, finite_rows(0, 4))
    first.commit(token_ids(4), 4)
    assert np.array_equal(bits(reader.load(first.handle, 10).hidden_states), finite_rows(0, 4))
    assert is_free(sink)


@settings(max_examples=depth(200))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=30))
def test_each_chunk_has_one_owner_and_is_returned(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(16 * 64, chunk=64)
    buffers = [PooledBuffer(pool) for _ in range(5)]
    for index, size in steps:
        if size == 0:
            buffers[index].free()
            continue
        try:
            buffers[index].reserve(size * 16)
        except BufferPoolFullError as error:
            assert error.wanted > error.free == pool.free
        owned = [chunk for each in buffers for chunk in each._chunks]
        assert len(owned) == len(set(owned))
        assert len(owned) * 64 + pool.free == pool.size
    for each in buffers:
        each.free()
        each.free()
    assert pool.free == pool.size


# A store that fails


def test_full_store_fails_the_request_and_evicts_no_rows(
    tmp_path: Path,
) -> None:
    require_mooncake()
    tokens = (2 << 20) // ROW
    with (
        MooncakeMaster(
            tmp_path, "-eviction_high_watermark_ratio=0.3", "-eviction_ratio=0.5"
        ) as own,
        MooncakeReader(own.address) as reader,
        MooncakeSink(options(own.address, global_segment_size=16 << 20), FORMAT) as sink,
    ):
        sink.client.put("somebody else's", bytes(1000), evictable=True)
        kept: list[str] = []
        with pytest.raises(
            SinkError,
            match="the store is full: let consumers remove requests after reading",
        ) as failure:
            for _ in range(20):
                kept.append(committed(sink, tokens).handle)
        assert failure_kind(failure.value) == "ENOSPC"
        assert len(kept) >= 5
        assert is_free(sink)
        wait_until(lambda: not any(sink.client.exist(["somebody else's"])))  # so it does evict
        for handle in kept:
            assert np.array_equal(
                bits(reader.load(handle, 10).hidden_states), finite_rows(0, tokens)
            )
        reader.remove(kept[0])
        assert np.array_equal(
            bits(reader.load(committed(sink, tokens, version=3).handle, 10).hidden_states),
            finite_rows(0, tokens, 3),
        )


def test_manifests_of_removed_data_are_removed(sink: MooncakeSink) -> None:
    files = [committed(sink) for _ in range(3)]
    sink.client.remove([files[0].handle, files[2].handle])
    while len(sink.published._handles) > 16:  # leftovers of other tests are checked first
        sink.client.remove([committed(sink).handle])
    committed(sink)
    assert sink.client.exist([f"{file.handle}:manifest" for file in files]) == [False, True, False]


def test_dead_master_fails_requests_and_the_sink_survives(tmp_path: Path) -> None:
    require_mooncake()
    with MooncakeMaster(tmp_path) as own, MooncakeSink(options(own.address), FORMAT) as sink:
        under_way = open_file(sink, tokens=5)
        under_way.write(0, finite_rows(0, 5))
        own.kill()
        with pytest.raises(
            SinkError, match="it could not be put into the store: mooncake_master does not answer"
        ) as failure:
            under_way.commit(token_ids(5), 5)
        assert failure_kind(failure.value) == "ENOTCONN"
        with pytest.raises(
            SinkError, match="could not be removed from the store: mooncake_master does not answer"
        ):
            open_file(sink)
        assert is_free(sink)
        with own:  # it is started again, at the same place
            wait_until(lambda: not fails(lambda: sink.client.exist(["x"])))
            wait_until(lambda: not fails(lambda: committed(sink, 5, "later")))
            with MooncakeReader(own.address) as reader:
                assert np.array_equal(
                    bits(reader.load("later", 10).hidden_states), finite_rows(0, 5)
                )


def test_data_of_a_dead_server_is_reported_as_lost(tmp_path: Path) -> None:
    """Uses a separate store: in a shared store, another segment could hold the data."""
    require_mooncake()
    with MooncakeMaster(tmp_path) as own, MooncakeReader(own.address) as reader:
        with MooncakeSink(options(own.address), FORMAT) as sink:
            gone = committed(sink, 5)
            assert len(reader.load(gone.handle, 10).token_ids) == 5
        with pytest.raises(
            (HiddenStatesError, TimeoutError),
            match="there any more|nothing is in the store|has ended",
        ):
            reader.load(gone.handle, 1)


# Begin


@pytest.mark.parametrize("address", ["nowhere", "h:x", ":1", "h:70000"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(
        UserError,
        match=f"master_server_address='{address}' is not host:port.* Start `mooncake_master`",
    ):
        own_address(address)


def test_unreachable_master_is_refused_at_once() -> None:
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"'{address}' cannot be reached: Connection refused"):
        MooncakeClient(MooncakeOptions(master_server_address=address), segment=0)


def test_unregistrable_memory_is_refused_with_the_option(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MooncakeClient, address: int, size: int) -> None:
        raise MooncakeError(-600)

    monkeypatch.setattr(MooncakeClient, "register", refuse)
    with pytest.raises(
        UserError,
        match=r"local_buffer_size=4194304 cannot be registered: .* status -600.*ulimit -l",
    ):
        MooncakeSink(options(master.address), FORMAT)


def test_server_configuration_of_the_page_is_valid() -> None:
    (command,) = page_blocks("serve")
    words = shlex.split(command.replace("\\\n", " "))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    config = HsxConfig.parse(transfer["kv_connector_extra_config"])
    assert config.mooncake is not None
    assert (config.sink, config.mooncake.global_segment_size) == ("mooncake", 16 << 30)


# Machines


def test_rows_cross_the_network_to_readers_on_another_machine(tmp_path: Path) -> None:
    """Master and readers are on one machine, the server with the memory on the other."""
    require_mooncake()

    def process(machine: Machine, part: str, master: MooncakeMaster) -> subprocess.Popen[str]:
        command = machine.command(
            [sys.executable, "-m", "tests.ut.fakes.mooncake_process", part, master.address]
        )
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


def fails(action: Callable[[], object]) -> bool:
    try:
        action()
    except (SinkError, OSError):
        return True
    return False


def wait_until(reached: Callable[[], bool]) -> None:
    """Mooncake checks the master every second."""
    pause = threading.Event()
    for _ in range(600):
        if reached():
            return
        pause.wait(0.05)
    raise AssertionError("not reached")
