"""A Mooncake store with memory in several processes, one of which ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake_master import MooncakeMaster, require_mooncake
from sink_cases import mooncake_options as options
from sink_harness import FORMAT, bits, finite_rows
from test_mooncake_objects import committed, open_file

from vllm_ascend_hsx.protocol.mooncake.store import MooncakeClient, MooncakeError
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.mooncake.sink import RETRY_S, MooncakeSink

ROW = FORMAT.row_bytes


@pytest.fixture(scope="module")
def sink(master: MooncakeMaster) -> Iterator[MooncakeSink]:
    with MooncakeSink(options(master.address), FORMAT) as sink:
        yield sink


@contextmanager
def lending_memory(master: MooncakeMaster) -> Iterator[subprocess.Popen[str]]:
    """A process that lends the store memory."""
    command = [sys.executable, "-m", "tests.ut.fakes.mooncake_process", "lend", master.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_objects_survive_when_another_server_is_killed(tmp_path: Path) -> None:
    """This includes objects stored before the master notices the death."""
    require_mooncake()
    with (
        MooncakeMaster(tmp_path) as own,
        MooncakeSink(options(own.address), FORMAT) as sink,
        MooncakeReader(own.address) as reader,
        lending_memory(own) as other,
    ):
        before = [committed(sink, 5).handle for _ in range(12)]
        other.kill()
        after = [committed(sink, 5).handle for _ in range(12)]
        failed = open_file(sink)
        failed.fail("as a test")
        for handle in before + after:
            assert np.array_equal(bits(reader.load(handle, 1).hidden_states), finite_rows(0, 5))
        with pytest.raises(HiddenStatesError, match="as a test"):
            reader.load(failed.handle, 1)


def test_objects_go_to_other_servers_when_own_memory_is_full(tmp_path: Path) -> None:
    require_mooncake()
    tokens = (2 << 20) // ROW
    with (
        MooncakeMaster(tmp_path) as own,
        MooncakeReader(own.address) as reader,
        lending_memory(own),
    ):
        with MooncakeSink(options(own.address, global_segment_size=16 << 20), FORMAT) as sink:
            handles = [committed(sink, tokens).handle for _ in range(12)]
            for handle in handles:
                assert len(reader.load(handle, 10).token_ids) == tokens
        assert 3 <= sum(reader._client.exist(handles)) <= 6, "data that went to the other process"


def test_server_without_own_memory_stores_with_the_remaining_servers(tmp_path: Path) -> None:
    require_mooncake()
    with (
        MooncakeMaster(tmp_path) as own,
        MooncakeReader(own.address) as reader,
        lending_memory(own) as gone,
        lending_memory(own),
        MooncakeSink(options(own.address, global_segment_size=0), FORMAT) as sink,
    ):
        gone.kill()
        for _ in range(12):
            assert np.array_equal(
                bits(reader.load(committed(sink, 5).handle, 10).hidden_states), finite_rows(0, 5)
            )
            failed = open_file(sink)
            failed.fail("as a test")
            with pytest.raises(HiddenStatesError, match="as a test"):
                reader.load(failed.handle, 1)


# Puts that fail


class Flaky:
    """A client whose puts fail with these statuses in order, and then succeed.

    Attributes:
        now: seconds that were slept.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses: list[int] = []
        self.now = 0.0
        for name in ("put", "put_parts"):
            monkeypatch.setattr(MooncakeClient, name, self._failing(getattr(MooncakeClient, name)))
        monkeypatch.setattr("vllm_ascend_hsx.sinks.mooncake.sink.monotonic", lambda: self.now)
        monkeypatch.setattr("vllm_ascend_hsx.sinks.mooncake.sink.sleep", self._sleep)

    def _failing(self, real: Callable[..., None]) -> Callable[..., None]:
        def put(client: MooncakeClient, *arguments: Any, **options: Any) -> None:
            if self.statuses:
                raise MooncakeError(self.statuses.pop(0))
            real(client, *arguments, **options)

        return put

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    return Flaky(monkeypatch)


@pytest.mark.parametrize("status", [-800, -704])
def test_put_is_retried_when_the_chosen_memory_is_lost(
    sink: MooncakeSink, reader: MooncakeReader, flaky: Flaky, status: int
) -> None:
    flaky.statuses = [status] * 6
    assert len(reader.load(committed(sink).handle, 1).token_ids) == 5
    assert not flaky.statuses and 0 < flaky.now < 2
    file = open_file(sink)
    flaky.statuses = [status] * 6
    file.fail("as a test")
    with pytest.raises(HiddenStatesError, match="as a test"):
        reader.load(file.handle, 1)


def test_other_failures_are_not_repeated(sink: MooncakeSink, flaky: Flaky) -> None:
    for status in (-200, -900):
        flaky.statuses = [status, -600]  # of the reason
        with pytest.raises(SinkError):
            committed(sink)
        assert not flaky.statuses and not flaky.now


def test_after_the_retry_time_puts_fail_at_once_until_one_succeeds(
    sink: MooncakeSink, flaky: Flaky
) -> None:
    """During a long outage, writers must not wait some seconds for each request."""
    flaky.statuses = [-800] * 10_000
    with pytest.raises(
        SinkError,
        match=r"the process that provides the memory cannot be reached: .*mooncake\.local_hostname",
    ):
        committed(sink)
    assert RETRY_S <= flaky.now < RETRY_S + 1
    before = flaky.now, len(flaky.statuses)
    with pytest.raises(SinkError):
        committed(sink)
    assert (flaky.now, len(flaky.statuses)) == (before[0], before[1] - 2)  # the rows and the reason
    flaky.statuses = []
    committed(sink)
    flaky.statuses = [-800] * 3
    committed(sink)


def test_open_does_not_wait_until_the_reason_is_stored(sink: MooncakeSink, flaky: Flaky) -> None:
    """A step waits for `open`, and the response has the reason."""
    flaky.statuses = [-800] * 100
    with pytest.raises(SinkError, match=r"mooncake\.local_buffer_size"):
        open_file(sink, tokens=sink.buffer_pool.size)
    assert not flaky.now
    flaky.statuses = []
    committed(sink)
