"""Steps that move bytes without a server: NPU to pinned memory, and pinned memory to disk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_ascend_hsx.doctor.target import stored_format
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, HELD, NOT_RUN, TELL_US, Teller
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink

COPIED = 256 << 20
COPIED_EMULATED = 32 << 20
CHUNK = 4 << 20  # of the ring
RING = 256 << 20  # the ring's default
RING_EMULATED = 32 << 20
REPEATS = 10
MOST_PINNED = 1.01  # of the requested bytes
PINNED_BYTES = "allocated_bytes.current"  # in the statistics of torch's pinned allocator
READ_S = 60.0
FAIR_SHARE = 0.5


def npu() -> Any:
    """Return torch.npu."""
    import torch
    import torch_npu  # noqa: F401 - brings torch.npu

    return torch.npu  # type: ignore[attr-defined]


@dataclass
class _Link:
    """Memory of one NPU, pinned memory of the same size, and a stream between them."""

    index: int
    expected: Any
    device: Any
    host: Any
    stream: Any

    @classmethod
    def make(cls, index: int, size: int) -> _Link:
        import torch

        npu().set_device(index)
        expected = torch.randint(0, 256, (size,), dtype=torch.uint8)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return cls(
            index, expected, expected.to(f"npu:{index}"), host, npu().Stream(device=f"npu:{index}")
        )

    def to_host(self, piece: int) -> None:
        """Copy everything to the host asynchronously, in pieces of the given number of bytes."""
        npu().set_device(self.index)
        with npu().stream(self.stream):
            for first in range(0, len(self.host), piece):
                part = slice(first, first + piece)
                self.host[part].copy_(self.device[part], non_blocking=True)

    def to_device(self) -> None:
        npu().set_device(self.index)
        with npu().stream(self.stream):
            self.device.copy_(self.host, non_blocking=True)

    @property
    def is_right(self) -> bool:
        import torch

        return bool(torch.equal(self.host, self.expected))


def copies(context: Context, tell: Teller) -> None:
    """Copy as the plugin does: asynchronously, on a separate stream, to pinned memory."""
    indices = range(npu().device_count())
    free = min(npu().mem_get_info(index)[0] for index in indices)
    size = min(COPIED_EMULATED if context.emulated else COPIED, free // 4 // CHUNK * CHUNK)
    first = _Link.make(0, size)
    alone = _rate([first], lambda link: link.to_host(CHUNK))
    whole = _rate([first], lambda link: link.to_host(size))
    right = first.is_right
    back = _rate([first], _Link.to_device)
    to_host = f"{_gb(whole)} to the host in pieces of {size >> 20} MiB"
    words = f"{to_host}, {_gb(alone)} in pieces of {CHUNK >> 20} MiB; {_gb(back)} to the NPU"
    figures = {
        "to_host": whole,
        "to_host_chunks": alone,
        "to_device": back,
        "piece": size,
        "chunk": CHUNK,
    }
    tell(
        "copies",
        HELD if right else BROKE,
        words if right else f"the copy differs from the NPU's memory; {words}",
        **figures,
    )
    links = [first, *(_Link.make(index, size) for index in indices[1:])]
    for link in links:
        link.host.zero_()
    together = _rate(links, lambda link: link.to_host(CHUNK))
    wrong = [link.index for link in links if not link.is_right]
    each = f"{_gb(together / len(links))} for each of {len(links)} NPUs at once"
    words = f"{each}, in pieces of {CHUNK >> 20} MiB; {_gb(alone)} alone"
    if together < FAIR_SHARE * len(links) * alone:
        words += ": they share a link. `hsx plan` shows the bandwidth that each rank needs"
    if wrong:
        words = f"copies of NPUs {wrong} differ from device memory; {words}"
    tell(
        "copies of all",
        BROKE if wrong else HELD,
        words,
        each=together / len(links),
        alone=alone,
        npus=len(links),
    )


def _rate(links: Sequence[_Link], issue: Callable[[_Link], None]) -> float:
    """Return the total bytes per second of all links."""

    def run(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            for link in links:
                issue(link)
        for link in links:
            link.stream.synchronize()
        return time.perf_counter() - begun

    run(1)  # warm-up
    return REPEATS * sum(len(link.host) for link in links) / run(REPEATS)


def pinned(context: Context, tell: Teller) -> None:
    """Compare the bytes that a ring requests with the bytes that CANN's allocator has taken."""
    npu().set_device(0)
    stats = getattr(npu(), "host_memory_stats", None)
    if stats is None:
        tell(
            "pinned",
            NOT_RUN,
            "not measured here: this torch_npu has no torch.npu.host_memory_stats",
        )
        return
    asked = _ring_bytes(context)
    before = stats()[PINNED_BYTES]
    ring = _ring(context)
    got = stats()[PINNED_BYTES] - before
    rows = f"{len(ring.data) / 2**20:,.1f} MiB of it for rows"
    words = f"{got / 2**20:,.1f} MiB for a ring of {asked / 2**20:,.1f} MiB, {rows}"
    held = 0 < got <= MOST_PINNED * asked
    remedy = f": pinned_ring_bytes takes more host memory than configured; {TELL_US}"
    tell("pinned", HELD if held else BROKE, words + ("" if held else remedy), asked=asked, got=got)


def _ring_bytes(context: Context) -> int:
    return RING_EMULATED if context.emulated else RING


def _ring(context: Context) -> PinnedRing:
    import torch

    row_format = stored_format(str(context.model))
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[row_format.dtype]
    return PinnedRing(_ring_bytes(context), row_format.row_shape, dtype)


def direct(context: Context, tell: Teller) -> None:
    """Write a file with O_DIRECT from pinned memory, and read it back."""
    import torch

    npu().set_device(0)
    ring = _ring(context)
    ring.data[:] = np.random.default_rng(0).bytes(len(ring.data))
    row_format = stored_format(str(context.model))
    options = FileOptions(io="direct", durability="fdatasync")
    try:
        sink = FileSink(context.files, row_format, options, ring.data)
    except UserError as error:
        tell("direct", *_why_not_direct(context, row_format, options, error))
        return
    path = context.files / f"hsx-direct-{secrets.token_hex(4)}{DATA_SUFFIX}"
    rows, token_ids = ring.num_rows, np.arange(ring.num_rows, dtype=np.int64)
    with sink, ExitStack() as undo:
        begun = time.perf_counter()
        file = sink.open("hsx-direct", path, rows)
        undo.callback(file.discard)
        for first in range(0, rows, ring.rows_per_chunk):
            end = min(rows, first + ring.rows_per_chunk)
            file.write(first, ring.data[first * ring.row_bytes : end * ring.row_bytes])
        undo.pop_all()
        file.commit(token_ids, rows)
        rate = len(ring.data) / (time.perf_counter() - begun)
    written = load(path, READ_S).hidden_states.contiguous().view(torch.uint8).numpy().tobytes()
    right = written == bytes(ring.data)
    size = f"{len(ring.data) >> 20} MiB"
    words = f"{_gb(rate)} from pinned memory to the disk, one file of {size}, one writer"
    remedy = f'the file differs from the memory: leave "io" at "buffered", and {TELL_US}; '
    tell("direct", HELD if right else BROKE, words if right else remedy + words, rate=rate)


def _why_not_direct(
    context: Context, row_format: Any, options: FileOptions, error: UserError
) -> tuple[Any, str]:
    """Tell a filesystem without direct writes from pinned memory that the disk cannot read."""
    try:
        with FileSink(context.files, row_format, options):
            pass
    except UserError:
        return (
            NOT_RUN,
            f"not measured here: --output {error.problem}. Name a directory on a local disk.",
        )
    return (
        BROKE,
        f"only from pinned memory, --output {error.problem}. {error.remedy}",
    )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
