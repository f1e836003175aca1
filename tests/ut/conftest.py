"""Unit tests run on emulated NPUs, in late and queue mode, where torch_npu is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import threading

    from generate_bench import Bench
    from mooncake_master import MooncakeMaster
    from worker_harness import Engine

    from vllm_ascend_hsx.reader.mooncake import MooncakeReader
    from vllm_ascend_hsx.sinks.file import FileSink

if find_spec("torch_npu") is None:
    from ascend_npu_emulator.launch import activate

    activate(npus=8, late=True, queue=True)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A Mooncake store."""
    from mooncake_master import MooncakeMaster, require_mooncake

    require_mooncake()
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(scope="module")
def reader(master: MooncakeMaster) -> Iterator[MooncakeReader]:
    """A reader of the Mooncake store."""
    from vllm_ascend_hsx.reader.mooncake import MooncakeReader

    with MooncakeReader(master.address) as reader:
        yield reader


@pytest.fixture
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit fsync, for tests of visible files that do not simulate power failures."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Create workers in `out` with options of worker_harness.Engine. Close them after the test."""
    from worker_harness import Engine

    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(tmp_path / "out", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.worker.close()


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[FileSink]:
    """A sink of files. Tests of other sinks define other fixtures."""
    from sink_harness import FORMAT

    from vllm_ascend_hsx.sinks.file import FileSink

    with FileSink(tmp_path, FORMAT) as sink:
        yield sink


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """A dataset and a fake server of files for `hsx generate`."""
    from generate_bench import Bench
    from generate_harness import FakeServer

    with FakeServer(tmp_path / "out") as server:
        yield Bench(tmp_path, server, capsys)


@pytest.fixture(params=["files", "shards"])
def any_bench(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    """The same, once with a server of files and once with a server of shards."""
    from generate_bench import Bench
    from generate_files import SINKS
    from generate_harness import FakeServer

    with FakeServer(tmp_path / "out", make_sink=SINKS[request.param]) as server:
        yield Bench(tmp_path, server, capsys)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event. The storage answers while it is set: writes begin, and locks are acquired."""
    from worker_harness import waiting

    from vllm_ascend_hsx.protocol.lock import HeldLock
    from vllm_ascend_hsx.sinks.request_file import RequestFile

    yield from waiting(monkeypatch, (RequestFile, "_made_data"), (HeldLock, "acquire"))


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Like `storage`, for locks only."""
    from worker_harness import waiting

    from vllm_ascend_hsx.protocol.lock import HeldLock

    yield from waiting(monkeypatch, (HeldLock, "acquire"))
