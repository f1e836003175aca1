"""Very many small requests, with aborts and faults: all outcomes are right, and nothing grows.

`--soak N` sends N of them.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from depth import depth
from sink_harness import checksum_of, open_fds
from tracing import trace

import vllm_ascend_hsx
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart
from vllm_ascend_hsx.connector.stats import HsxStats
from vllm_ascend_hsx.connector.storage_watch import StorageRules
from vllm_ascend_hsx.connector.worker import ExtractionWorker
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, TOKEN_IDS, read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

REQUESTS = depth(100_000, 16)
RUNNING = 64  # requests of a batch
UNDECIDED = 256  # requests with unfinished files
CHUNK = 8  # rows of a request in one step
MAX_TOKENS = RUNNING * CHUNK
FORMAT = RowFormat(layer_ids=(3, 1), hidden_size=4, dtype="F32", model="tiny")
DEVICE = torch.device("npu:0")
CHECKED = 20  # one of this many files is read
GROWTH = 2 << 20  # growth of the process in bytes, in the last two thirds
# glibc's initial threshold, in bytes: larger blocks have pages of their own. Left alone, it rises
# to the largest block ever freed, up to 32 MiB. CPython rebuilds its table of interned strings (7.3
# MiB with vLLM) after some 33,000 requests, because pathlib interns the parts of paths. In the
# heap, the former table would leave a gap that looks like growth.
OWN_PAGES = 128 << 10

# Ends of requests, with weights: "complete"; "output", with generated tokens; "aborted" in the
# middle of the prompt; or one failure of a system call in a method of the file.
KINDS = {
    "complete": 140,
    "output": 16,
    "aborted": 20,
    "open open EMFILE": 2,
    "open flock ENOLCK": 2,
    "open unlink EIO": 2,
    "write open EACCES": 3,
    "write pwrite ENOSPC": 6,
    "commit pwrite EDQUOT": 3,
    "commit close EIO": 3,
    "commit link EROFS": 3,
}
FAULTS = [kind for kind in KINDS if " " in kind]


@dataclass(slots=True)
class Job:
    """A request: the tokens, the way it ends, and the number of computed rows."""

    request_id: str
    kind: str
    prompt: int
    outputs: int
    stops_at: int
    done: int = 0

    @property
    def rows(self) -> int:
        return self.prompt + self.outputs


class _Armed(threading.local):
    """The fault of the next matching system call in this thread."""

    fault: tuple[str, int] | None = None


@contextmanager
def faults() -> Iterator[None]:
    """Inject the fault of each request once, in the given method and system call."""
    armed = _Armed()

    def checkpoint(call: str) -> None:
        if armed.fault is not None and armed.fault[0] == call:
            number, armed.fault = armed.fault[1], None
            raise OSError(number, os.strerror(number))

    def arming(
        method: Callable[..., Any], name: str, id_of: Callable[..., str]
    ) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            kind = id_of(self, *args).partition("+")[2].split("+")
            if kind[0] == name:
                armed.fault = kind[1], getattr(errno, kind[2])
            try:
                return method(self, *args, **kwargs)
            finally:
                armed.fault = None

        return call

    with pytest.MonkeyPatch.context() as patch:
        trace(patch, checkpoint)
        patch.setattr(
            FileSink, "open", arming(FileSink.open, "open", lambda sink, request_id, *_: request_id)
        )
        for name in ("write", "commit"):
            patch.setattr(
                RequestFile,
                name,
                arming(getattr(RequestFile, name), name, lambda file, *_: file.request_id),
            )
        yield


class Soak:
    """A worker, an engine that sends batches of requests, and a consumer of all files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._staging = StagingCache(
            num_slots=2,
            slot_rows=MAX_TOKENS,
            num_layers=FORMAT.num_layers,
            hidden_size=FORMAT.hidden_size,
            dtype=torch.float32,
            device=DEVICE,
            layer_order=(1, 0),
        )
        self._sink = FileSink(directory, FORMAT)
        self._ring = PinnedRing(8 * RUNNING * FORMAT.row_bytes, FORMAT.row_shape, torch.float32)
        self._worker = ExtractionWorker(
            rank=0,
            staging=self._staging,
            ring=self._ring,
            sink=self._sink,
            num_writers=lambda: 2,
            storage=StorageRules(),
        )
        self._luck = random.Random(0)
        self._kinds = self._luck.choices(list(KINDS), list(KINDS.values()), k=10_000)
        self._serial = 0
        self._running: dict[str, Job] = {}
        self._ended: list[RequestEnd] = []
        self._undecided: dict[str, Job] = {}
        self._rows = np.zeros((MAX_TOKENS, FORMAT.hidden_size), np.float32)
        self.stats = HsxStats(data={})
        self.expected: Counter[str] = Counter()

    def serve(self, requests: int) -> None:
        """Send requests, and wait until each is decided and each file is consumed."""
        last = self._serial + requests
        while self._serial < last or self._running or self._undecided or self._ended:
            starts = []
            while (
                self._serial < last
                and len(self._running) < RUNNING
                and len(self._undecided) < UNDECIDED
            ):
                starts.append(self._next())
            self._step(starts)

    def _next(self) -> RequestStart:
        kind = self._kinds[self._serial % len(self._kinds)]
        # Ids repeat, like ids that clients choose. The id names the fault.
        number = self._serial % 5000
        self._serial += 1
        request_id = f"r{number}+{kind.replace(' ', '+')}"
        prompt = self._luck.randint(2, 12)
        outputs = self._luck.randint(1, 3) if kind == "output" else 0
        job = Job(
            request_id,
            kind,
            prompt,
            outputs,
            self._luck.randint(1, prompt - 1) if kind == "aborted" else prompt + outputs,
        )
        self._running[request_id] = self._undecided[request_id] = job
        return RequestStart(
            request_id, str(self._path(job)), 0, np.arange(prompt, dtype=np.int64), outputs > 0
        )

    def _path(self, job: Job) -> Path:
        return self._directory / f"{job.request_id.partition('+')[0]}.safetensors"

    def _step(self, starts: list[RequestStart]) -> None:
        self._worker.start_step(HsxConnectorMetadata(ended=self._ended, started=starts))
        self._ended = []
        staged, at = [], 0
        for job in list(self._running.values()):
            count = min(CHUNK if job.done < job.prompt else 1, job.stops_at - job.done)
            wanted = self._staging.wanted.get(job.request_id, 0)
            if wanted > job.done:
                self._rows[at : at + count] = (
                    _value(job.request_id) + np.arange(job.done, job.done + count)[:, None]
                )
                staged.append(Span(job.request_id, job.done, min(count, wanted - job.done), at))
                at += count
            job.done += count
            if job.done == job.stops_at:
                del self._running[job.request_id]
                outputs = np.arange(job.prompt, job.rows, dtype=np.int64)
                self._ended.append(RequestEnd(job.request_id, job.kind == "aborted", outputs))
        if staged:
            rows = torch.from_numpy(self._rows).to(DEVICE)
            self._staging.write([rows, rows + 0.5], staged)
        self._worker.save()
        report = self._worker.report()
        for request_id, error in report.outcomes.items() if report is not None else ():
            self._consume(self._undecided.pop(request_id), error)
        stats = self._worker.take_stats()
        if stats is not None:
            self.stats = self.stats.aggregate(stats)

    def _consume(self, job: Job, error: str | None) -> None:
        """Consume a file. Raise AssertionError if the request has a wrong outcome."""
        path = self._path(job)
        if job.kind in FAULTS:
            name = job.kind.split()[-1]
            assert error is not None, f"{job}: complete"
            assert name in error, f"{job}: {error}"
            self._wait_for(lambda: Path(f"{path}.error").exists())
            assert json.loads(Path(f"{path}.error").read_text())["reason"] == error
            assert not path.exists()
            self.expected[name] += 1
        else:
            assert error is None, f"{job}: {error}"
            if job.kind == "aborted":
                assert not path.exists()
                assert not Path(f"{path}.lock").exists()
            elif self._serial % CHECKED:
                assert path.exists()
            else:
                _check(path, job)
            self.expected["aborted" if job.kind == "aborted" else "published"] += 1
        vllm_ascend_hsx.remove(path)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def holdings(self) -> dict[str, Any]:
        """Return the objects that an idle worker holds. They must not change."""
        self._worker.drain_copies()  # threads may still end the last file or publish a reason
        for threads in (self._worker._opener, self._worker._writers, self._worker._background):
            threads.wait()
        gc.collect()
        worker = vars(self._worker) | vars(self._worker._progress)
        sizes = {
            name: len(value)
            for name, value in worker.items()
            if isinstance(value, dict | set | list | deque)
        }
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "fds": Counter(target for _, target in open_fds()),
            "locks": sum(
                f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines()
            ),
            "sizes": {
                **sizes,
                "files": len(self._sink._files),
                "wanted": len(self._staging.wanted),
            },
            "backlog": self._worker._progress.backlog,
            "free_rows": self._ring.free_rows,
            "names": sorted(os.listdir(self._directory)),
        }

    def close(self) -> None:
        self._worker.close()


def _leaves(data: Any) -> int:
    """Return the number of leaves in nested containers."""
    return (
        sum(map(_leaves, data.values() if isinstance(data, dict) else data))
        if isinstance(data, dict | list)
        else 1
    )


def _value(request_id: str) -> float:
    return float(sum(request_id.encode()) % 997 * 32)


def _check(path: Path, job: Job) -> None:
    with path.open("rb") as file:
        fd = file.fileno()
        header = read_header(fd)
        states, ids = header.tensors[HIDDEN_STATES], header.tensors[TOKEN_IDS]
        rows = np.frombuffer(
            os.pread(fd, states.end - states.begin, states.begin), np.float32
        ).reshape(states.shape)
        expected = np.broadcast_to(
            _value(job.request_id) + np.arange(job.rows)[:, None], (job.rows, FORMAT.hidden_size)
        )
        # Layer ids (3, 1): the first layer of a row is the second that the target collects.
        assert np.array_equal(rows[:, 1], expected)
        assert np.array_equal(rows[:, 0], expected + 0.5)
        assert (
            os.pread(fd, ids.end - ids.begin, ids.begin)
            == np.arange(job.rows, dtype=np.int64).tobytes()
        )
        assert header.metadata["checksum"] == checksum_of(path.read_bytes())


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory in memory if possible, because a disk is slower with very many files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "storage"
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="hsx-test-") as created:
        yield Path(created) / "storage"


@pytest.mark.timeout(3600)
def test_nothing_grows_with_the_number_of_requests(
    directory: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a separate process, because objects of other tests would use memory here.
    requests = request.config.getoption("soak") or REQUESTS
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(OWN_PAGES))
    process = multiprocessing.get_context("spawn").Process(
        target=send_and_watch, args=(directory, requests), daemon=True
    )
    process.start()
    process.join()
    assert process.exitcode == 0, "the captured stderr has the reason"


def require_equal(now: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise AssertionError with the differences. pytest does not explain them in this process."""
    changed = {name: (first[name], now[name]) for name in first if first[name] != now[name]}
    assert not changed, f"first and now: {changed}"


def send_and_watch(directory: Path, requests: int) -> None:
    """Raise AssertionError if a request has a wrong outcome, or if something grows."""
    before = {thread.name for thread in threading.enumerate()}
    soak = Soak(directory)
    logging.disable(logging.ERROR)  # some ten thousand lines
    try:
        with faults():
            soak.serve(requests // 3)
            first, objects, memory, began = (
                soak.holdings(),
                len(gc.get_objects()),
                resident(),
                time.monotonic(),
            )
            soak.serve(requests // 3)
            require_equal(soak.holdings(), first)
            soak.serve(requests - 2 * (requests // 3))
            took = time.monotonic() - began
            require_equal(soak.holdings(), first)
            grown, more_objects = resident() - memory, len(gc.get_objects()) - objects
    finally:
        logging.disable(logging.NOTSET)
        soak.close()
    counts = soak.expected
    failures = {
        name: count for name, count in counts.items() if name not in ("published", "aborted")
    }
    each = took / (requests * 2 / 3) * 1e6
    print(
        f"{requests} requests, {each:.0f} us each: {dict(counts)}; grown by {grown} bytes, "
        f"{more_objects} objects"
    )
    assert grown < GROWTH
    assert more_objects < 1000
    assert _leaves(soak.stats.data) < 200  # buckets and counters exist from their first use on
    assert counts.total() == requests
    assert min(counts.values()) > requests // 200
    assert soak.stats.counter("published") == counts["published"]
    assert soak.stats.counter("aborted") == counts["aborted"]
    assert soak.stats.counter("failed") == sum(failures.values())
    assert soak.stats.failures == failures
    assert os.listdir(directory) == []
    assert {thread.name for thread in threading.enumerate()} == before
