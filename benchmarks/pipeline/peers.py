"""Our peers: memcpy, raw writes, raw durable writes with O_DIRECT, vLLM 0.33's path.

vLLM's path is written from the description (docs/performance.md repeats it), not from code.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from awscrt.checksums import crc32c
from safetensors.torch import load_file, save_file

from benchmarks.machine import MEMORY_FILESYSTEMS
from benchmarks.measure import Cost, cost_of
from benchmarks.pipeline.rows import PAGE, Load, Source, assert_files_are_right, npu, token_ids
from vllm_ascend_hsx.doctor.storage import filesystem_of

PIECE = 4 << 20  # bytes per call of a raw write
MEMCPY_BUFFER = 64 << 20
VLLM_THREADS = 8
BLOCK_TOKENS = 128  # vllm-ascend's block size
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Contestant(ABC):
    """Writes the rows of a load to files in `directory`. It is empty before and after."""

    def __init__(self, source: Source, directory: Path) -> None:
        self.source = source
        self.directory = directory

    @abstractmethod
    def run(self, load: Load) -> None:
        """Write the whole load and return when the last file is published. This is measured."""

    def prepare(self, load: Load) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare before the first row is computed. This is not measured."""

    def verify(self, load: Load) -> None:  # noqa: B027 - raw bytes have no reader
        """Compare the files with the expected contents; AssertionError if they differ."""

    def close(self) -> None:  # noqa: B027
        """End threads."""

    def measure(self, load: Load, *, check: bool = False) -> Cost:
        self.prepare(load)
        cost = cost_of(lambda: self.run(load))
        if check:
            self.verify(load)
        for path in self.directory.glob("[!.]*"):  # skip our hidden directory
            path.unlink()
        return cost

    def path(self, request_id: str) -> Path:
        return self.directory / f"{request_id}.safetensors"


class Pool:
    """Threads that take indexes from a queue, one per request in flight, like a raw writer."""

    def __init__(self, threads: int, work: Callable[[int], None]) -> None:
        self._jobs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._work = work
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: int) -> None:
        """Do jobs 0 to `jobs` - 1 and wait for all of them."""
        for job in range(jobs):
            self._jobs.put(job)
        for _ in range(jobs):
            if (error := self._done.get()) is not None:
                raise error

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job)
                self._done.put(None)
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
                self._done.put(error)


class _Pooled(Contestant):
    """Each request is one job for a pool of at most `threads` threads."""

    def __init__(self, source: Source, directory: Path, threads: int) -> None:
        super().__init__(source, directory)
        self._threads = threads
        self._load: Load | None = None
        self._pools: dict[int, Pool] = {}

    def run(self, load: Load) -> None:
        self._load = load
        self._pools[min(self._threads, load.in_flight)].run(load.requests)

    def prepare(self, load: Load) -> None:
        threads = min(self._threads, load.in_flight)
        if threads not in self._pools:
            self._pools[threads] = Pool(threads, self._one)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _one(self, index: int) -> None:
        assert self._load is not None
        self.one(
            self.source.bytes_of(self._load.first_row(index), self._load.tokens),
            self._load.ids[index],
        )

    @abstractmethod
    def one(self, data: memoryview, request_id: str) -> None:
        """Write one request's rows."""


class Memcpy(_Pooled):
    """Copy the rows once into reused memory; no file."""

    def __init__(self, source: Source, directory: Path, threads: int) -> None:
        super().__init__(source, directory, threads)
        self._local = threading.local()

    def one(self, data: memoryview, request_id: str) -> None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(MEMCPY_BUFFER, np.uint8)
        rows = np.frombuffer(data, np.uint8)
        for begin in range(0, len(rows), MEMCPY_BUFFER):
            piece = rows[begin : begin + MEMCPY_BUFFER]
            np.copyto(self._local.buffer[: len(piece)], piece)


class RawWrite(_Pooled):
    """open, pwrite of 4 MiB at a time, close: only rows, in files visible while being written."""

    def one(self, data: memoryview, request_id: str) -> None:
        fd = os.open(self.path(request_id), _NEW, 0o640)
        try:
            for begin in range(0, len(data), PIECE):
                _write_all(fd, data[begin : begin + PIECE], begin)
        finally:
            os.close(fd)


class RawDirect(_Pooled):
    """open with O_DIRECT, fallocate, pwrite of 4 MiB at a time, fdatasync, close.

    Args:
        checksum: compute the CRC-32C of each piece before it is written.
        publish: rename the file afterwards, and fsync the directory, to make the name survive a
            loss of power.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        threads: int,
        *,
        checksum: bool = False,
        publish: bool = False,
    ) -> None:
        super().__init__(source, directory, threads)
        self._checksum = checksum
        self._publish = publish

    def one(self, data: memoryview, request_id: str) -> None:
        fd = os.open(self.path(request_id), _NEW | os.O_DIRECT, 0o640)
        try:
            os.posix_fallocate(fd, 0, len(data))
            for begin in range(
                0, len(data), PIECE
            ):  # a row is a number of whole pages, and so is each of these
                piece = data[begin : begin + PIECE]
                if self._checksum:
                    crc32c(piece)
                _write_all(fd, piece, begin)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if self._publish:
            os.rename(self.path(request_id), self.directory / request_id)
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def direct_io_works(directory: Path) -> str | None:
    """Return None if the filesystem really bypasses the page cache, otherwise the reason."""
    if (kind := filesystem_of(directory)) in MEMORY_FILESYSTEMS:
        return f"{kind} takes O_DIRECT, but its files are the page cache"
    path = directory / "direct-io-probe"
    memory = torch.zeros(2 * PAGE, dtype=torch.uint8, pin_memory=True)
    begin = -memory.data_ptr() % PAGE
    try:
        fd = os.open(path, _NEW | os.O_DIRECT, 0o640)
    except OSError as error:
        return f"it refuses O_DIRECT: {error.strerror}"
    try:
        os.pwrite(fd, memory[begin : begin + PAGE].numpy().data, 0)
    except OSError as error:
        return f"it refuses a write that bypasses the page cache: {error.strerror}"
    finally:
        os.close(fd)
        path.unlink()
    return None


class Vllm033(Contestant):
    """vLLM 0.33's path, from the description.

    A request's rows stay in paged memory until it ends. Then they are gathered by block id and
    copied into new pinned host memory, and a lock file is locked. One of 8 threads calls save_file
    with rows and token ids under the file's final name and releases the lock.

    Args:
        with_copy: gather, allocate and copy; otherwise the rows are already in pinned memory, and
            the path begins with the lock.
        reuse_pinned: reuse the pinned memory of an earlier request of the same size, as torch's
            caching allocator would where possible; otherwise allocate new memory.
    """

    def __init__(
        self, source: Source, directory: Path, *, with_copy: bool, reuse_pinned: bool = False
    ) -> None:
        super().__init__(source, directory)
        self._with_copy = with_copy
        self._reuse_pinned = reuse_pinned
        self._unused: list[torch.Tensor] = []
        self._pool = ThreadPoolExecutor(VLLM_THREADS)
        self._block_tokens = min(BLOCK_TOKENS, source.tokens)
        self._num_blocks = source.tokens // self._block_tokens
        self._paged = self._in_blocks(source.device)
        self._block_ids: list[torch.Tensor] = []
        self._gathered = self._paged[:0]

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[blocks, tokens, layers, hidden]"""
        return rows[: self._num_blocks * self._block_tokens].view(
            self._num_blocks, self._block_tokens, *self.source.row_format.row_shape
        )

    def prepare(self, load: Load) -> None:
        """Shuffle the block ids on the device, as in a vLLM that has run for a while."""
        self._unused = [rows for rows in self._unused if len(rows) == load.tokens]
        count = -(-load.tokens // self._block_tokens)
        draws = [
            np.random.default_rng(index).permutation(self._num_blocks)[:count]
            for index in range(load.requests)
        ]
        self._gathered = torch.empty_like(self._paged[:count])
        self._block_ids = [torch.from_numpy(drawn).to(self._paged.device) for drawn in draws]

    def run(self, load: Load) -> None:
        for begin in range(0, load.requests, load.in_flight):
            futures = [self._save(load, index) for index in range(begin, begin + load.in_flight)]
            for future in futures:
                future.result()

    def _save(self, load: Load, index: int) -> Future[None]:
        path = self.path(load.ids[index])
        if self._with_copy:
            gathered = self._gather(self._block_ids[index])[: load.tokens]
            rows = (
                self._unused.pop()
                if self._unused
                else torch.empty_like(gathered, device="cpu", pin_memory=True)
            )
            rows.copy_(gathered, non_blocking=True)
        else:
            first = load.first_row(index)
            rows = self.source.host[first : first + load.tokens]
        copied = npu().Event()
        copied.record()
        lock = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": rows, "token_ids": torch.from_numpy(token_ids(load.tokens))}
        future = self._pool.submit(_save_and_release, tensors, copied, path, lock)
        if self._with_copy and self._reuse_pinned:
            future.add_done_callback(lambda _: self._unused.append(rows))
        return future

    def _gather(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Gather the rows of these blocks, [tokens, layers, hidden], into existing device memory.

        A device's allocator would have this memory ready. Fresh memory of a CPU would add page
        faults that this path does not have on a device.
        """
        blocks = self._gathered[: len(block_ids)]
        torch.index_select(self._paged, 0, block_ids, out=blocks)
        return blocks.flatten(0, 1)

    def verify(self, load: Load) -> None:
        for index, request_id in enumerate(load.ids):
            if self._with_copy:
                rows = self._in_blocks(self.source.host)[self._block_ids[index].cpu()].flatten(
                    0, 1
                )[: load.tokens]
            else:
                first = load.first_row(index)
                rows = self.source.host[first : first + load.tokens]
            assert_files_are_right([(load_file(self.path(request_id)), rows)])

    def close(self) -> None:
        self._pool.shutdown()


def _save_and_release(
    tensors: dict[str, torch.Tensor], copied: torch.Event, path: Path, lock: int
) -> None:
    try:
        copied.synchronize()
        save_file(tensors, path)
    finally:
        os.close(lock)
