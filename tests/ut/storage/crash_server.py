"""A server's sink with random requests, killed at any instant; and a reader of the files.

This module does not import torch, so a fork takes milliseconds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from crash_requests import Request, request_of, settings_of
from sink_harness import is_held
from tracing import trace

from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.reader.lock_wait import wait_until_released
from vllm_ascend_hsx.sinks.base import NAME_USED, SinkError
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

NEVER = "never"  # runs until the server stops

# The phase of a server thread, and the current system call.
CONTEXTS = ("nothing", "start", "open", "write", "commit", "fail", "discard", "close", "remove")
CALLS = (
    "", "open", "close", "flock", "fstat", "stat", "fchmod", "rename", "unlink", "pwrite", "pread", "ftruncate", "fdatasync", "fsync",
    "reserve", "scandir", "makedirs", "lseek", "write", "dup", "copy_into", "link", "other",
)  # fmt: skip
MAX_THREADS = 4
SHARD = 100_000  # bytes


class Phases:
    """The phases of the threads of a server, in memory that outlives the server."""

    _TIMES = 2 * MAX_THREADS

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._TIMES + 4)

    @property
    def calls(self) -> int:
        """Number of system calls begun."""
        return int.from_bytes(self._memory[self._TIMES :], "little")

    def enter(self, thread: int, context: str) -> None:
        self._memory[2 * thread : 2 * thread + 2] = bytes((CONTEXTS.index(context), 0))

    def call(self, thread: int, name: str, calls: int) -> None:
        self._memory[2 * thread + 1] = CALLS.index(name if name in CALLS else "other")
        self._memory[self._TIMES :] = calls.to_bytes(4, "little")

    def now(self) -> list[str]:
        """Phase and last system call of each active thread."""
        pairs = [self._memory[2 * thread : 2 * thread + 2] for thread in range(MAX_THREADS)]
        return [f"{CONTEXTS[context]} {CALLS[call]}".strip() for context, call in pairs if context]


def _in_pages(rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Return the rows in memory that begins at a page, like the pinned ring."""
    if not rows.size:
        return rows
    pages = np.frombuffer(mmap.mmap(-1, rows.nbytes), np.uint16).reshape(rows.shape)
    pages[:] = rows
    return pages


class Server:
    """The life of a sink: it starts, serves requests, and stops unless it is killed before.

    Args:
        directory: storage directory.
        number: number of the server. It determines settings and requests.
        names: names of files, each used by one request at a time. Existing rows are removed.
        contested: names that other servers also write.
        direct: whether the directory's filesystem has O_DIRECT.
        log_fd: gets a line for each action that begins or ends.
        phases: records the phase of each thread.
        kill_at: number of the system call at which the server kills itself; 0 for never.
        shards: whether to write shards instead of files.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        names: Sequence[str],
        contested: Sequence[str],
        direct: bool,
        log_fd: int,
        phases: Phases,
        kill_at: int,
        shards: bool,
    ) -> None:
        self._directory = directory
        self._number = number
        self._names = names
        self._contested = contested
        self._direct = direct
        self._log_fd = log_fd
        self._phases = phases
        self._kill_at = kill_at
        self._shards = shards
        self._calls = 0
        self._this = threading.local()
        self._this.index = 0
        self._free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in (*names, *contested):
            self._free.put(name)
        self._luck = random.Random(f"life {number}")

    def live(self) -> None:
        """Serve requests with several threads. Return after the stop."""
        sink = self._start()
        jobs: queue.SimpleQueue[tuple[RequestFile, Request] | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._work, args=(index + 1, jobs))
            for index in range(self._luck.randint(1, MAX_THREADS - 1))
        ]
        for thread in threads:
            thread.start()
        for serial in range(self._luck.choice([3, 30, 300])):
            try:
                name = self._free.get(timeout=0.02)
            except queue.Empty:  # requests that never end write all rows
                break
            job = self._open(sink, f"{self._number}.{serial}.{name}")
            if job is not None:
                jobs.put(job)
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()
        self._stop(sink)

    def live_in_order(self, request_ids: Sequence[str]) -> None:
        """Serve these requests one by one. Each run makes the same system calls."""
        sink = self._start()
        for request_id in request_ids:
            while (job := self._open(sink, request_id)) is None:
                continue  # the name had rows, removed in the meantime
            for _ in self._serve(*job):
                continue
        self._stop(sink)

    def _start(self) -> FileSink | ShardSink:
        trace(pytest.MonkeyPatch(), self._checkpoint, start=True)
        self._enter("start")
        settings = settings_of(self._number, self._direct)
        check_directory(self._directory, direct=settings[1].io == "direct")  # as read_settings does
        sink = (
            ShardSink(self._directory, *settings, shard_bytes=SHARD)
            if self._shards
            else FileSink(self._directory, *settings)
        )
        self._enter("nothing")
        self._log("started", sink.token)
        return sink

    def _stop(self, sink: FileSink | ShardSink) -> None:
        self._log("close", "")
        self._enter("close")
        sink.close()
        self._enter("nothing")
        self._log("closed", "")

    def _open(
        self, sink: FileSink | ShardSink, request_id: str
    ) -> tuple[RequestFile, Request] | None:
        request = Request.of(request_id, self._direct)
        self._log("open", request_id)
        self._enter("open")
        try:
            expected = self._luck.choice([0, request.tokens])
            file = sink.open(request_id, self._directory / request.name, expected)
        except SinkError as error:
            if error.reason == NAME_USED:
                self._remove_rows(request)
                return None
            if (
                request.name not in self._contested
                or "another request or server is writing" not in error.reason
            ):
                raise
            self._free.put(request.name)
            return None
        finally:
            self._enter("nothing")
        self._log("opened", request_id)
        return file, request

    def _remove_rows(self, request: Request) -> None:
        """Remove rows as a consumer does, so that the name may be used again."""
        self._log("refused", request.id)
        self._log("remove", request.id)
        self._enter("remove")
        with suppress(TimeoutError):  # another server has opened the name
            remove(self._directory / request.name)
        self._enter("nothing")
        self._log("removed", request.id)
        self._free.put(request.name)

    def _work(
        self, index: int, jobs: queue.SimpleQueue[tuple[RequestFile, Request] | None]
    ) -> None:
        """Serve several requests at a time, with interleaved steps."""
        self._this.index = index
        luck = random.Random(f"thread {self._number} {index}")
        active: list[Generator[None, None, None]] = []
        more = True
        try:
            while more or active:
                if more and (
                    not active or (len(active) < 4 and luck.random() < 0.5 and not jobs.empty())
                ):
                    job = jobs.get()
                    if job is None:
                        more = False
                        continue
                    active.append(self._serve(*job))
                step = luck.choice(active)
                if next(step, "done") == "done":
                    active.remove(step)
        except BaseException as error:  # noqa: BLE001 - the parent must report it, and the process must not hang
            self._log("error", repr(error))
            os._exit(1)

    def _serve(self, file: RequestFile, request: Request) -> Generator[None, None, None]:
        for first, last, stale in request.spans():
            rows = request.rows(first, last)
            self._enter("write")
            file.write(first, _in_pages(~rows if stale else rows))
            self._enter("nothing")
            yield
        if request.end == NEVER:
            return
        end: Callable[[], None] = {
            "commit": lambda: file.commit(request.token_ids(), request.num_prompt_tokens),
            "fail": lambda: file.fail(f"as {request.id} was to"),
            "discard": file.discard,
        }[request.end]
        self._log(request.end, request.id)
        self._enter(request.end)
        end()
        self._enter("nothing")
        self._log(f"{request.end} done", request.id)
        self._free.put(request.name)

    def _log(self, event: str, what: str) -> None:
        os.write(self._log_fd, f"{event}\t{what}\n".encode())

    def _enter(self, context: str) -> None:
        self._phases.enter(self._this.index, context)

    def _checkpoint(self, call: str) -> None:
        self._calls += 1
        self._phases.call(self._this.index, call, self._calls)
        if self._calls == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Reader:
    """Wait for files and check them while servers run and die.

    Args:
        directory: directory of the files.
        names: names of the files.
        direct: whether the directory's filesystem has O_DIRECT.
        shared: memory with two flags, stop and waiting, and two counters, waits and files seen.
    """

    STOP, WAITING, WAITS, SEEN = 0, 1, 2, 6
    SIZE = 10

    def __init__(
        self, directory: Path, names: Sequence[str], direct: bool, shared: mmap.mmap
    ) -> None:
        self._directory = directory
        self._names = names
        self._direct = direct
        self._shared = shared

    def run(self, log_fd: int) -> None:
        luck = random.Random("reader")
        while not self._shared[self.STOP]:
            path = self._directory / luck.choice(self._names)
            try:
                if self._wait(Path(f"{path}{LOCK_SUFFIX}")):
                    self._add(self.WAITS)
                else:
                    time.sleep(0.002)
                request_of(path, self._direct)
                self._add(self.SEEN)
            except FileNotFoundError:
                continue
            except Exception as error:  # noqa: BLE001 - any is a finding
                os.write(log_fd, f"{path.name}: {error!r}\n".encode())

    def _wait(self, lock: Path) -> bool:
        if not is_held(lock):
            return False
        self._shared[self.WAITING] = 1
        wait_until_released(lock, None)
        self._shared[self.WAITING] = 0
        return True

    def _add(self, counter: int) -> None:
        self._shared[counter : counter + 4] = (self.count(counter) + 1).to_bytes(4, "little")

    def count(self, counter: int) -> int:
        return int.from_bytes(self._shared[counter : counter + 4], "little")


def log_in_memory() -> int:
    """Return the descriptor of a file in memory to which several threads append."""
    fd = os.memfd_create("log")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def forked(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid
