"""Staging, ring, lander and a gated writer on an emulated NPU, fed with steps of spans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
import torch_npu  # noqa: F401 - brings torch.npu
from hypothesis import strategies as st

from vllm_ascend_hsx.drafter.landing import HostChunk, Lander
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache

LAYERS, HIDDEN, MAX_TOKENS = 3, 8, 24
LAYER_ORDER = (2, 0, 1)
DEVICE = torch.device("npu:0")
DTYPE = torch.bfloat16


class Pipeline:
    """Staging, ring, lander and one writer thread. A gate lets a test hold the reads."""

    def __init__(self, *, slots: int = 2, ring_rows: int = 10, slot_rows: int = MAX_TOKENS) -> None:
        self.staging = StagingCache(
            num_slots=slots,
            slot_rows=slot_rows,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            dtype=DTYPE,
            device=DEVICE,
            layer_order=LAYER_ORDER,
        )
        self.ring = PinnedRing(
            ring_rows * LAYERS * HIDDEN * DTYPE.itemsize, (LAYERS, HIDDEN), DTYPE
        )
        self.chunks: queue.SimpleQueue[HostChunk | None] = queue.SimpleQueue()
        self.errors: list[Exception] = []
        self.read: dict[tuple[str, int], torch.Tensor] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.lander = Lander(self.ring, DEVICE, self.chunks.put, self.errors.append)
        self.staging.pass_on = self.lander.submit
        self.writer = threading.Thread(target=self._write, daemon=True)
        self.writer.start()

    def _write(self) -> None:
        while (chunk := self.chunks.get()) is not None:
            self.gate.wait()
            for span in chunk.spans:
                try:
                    rows = torch.frombuffer(bytearray(chunk.read(span)), dtype=DTYPE).view(
                        span.num_rows, LAYERS, HIDDEN
                    )
                    for offset, row in enumerate(rows):
                        self.read[span.request_id, span.first + offset] = row
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    self.errors.append(error)
                finally:
                    chunk.release([span])

    def step(self, rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Run proposer and connector, then overwrite the output, as the replay of a graph does."""
        on_device = [layer.to(DEVICE) for layer in rows]
        self.staging.write(on_device, spans)
        slot = self.staging.take()
        assert slot is not None
        self.lander.submit(slot)
        for layer in on_device:
            layer.fill_(-1.0)

    def close(self) -> None:
        """Read all staged rows, end the threads, and raise their first error.

        Later calls do nothing.
        """
        if not self.writer.is_alive():
            return
        self.gate.set()
        self.lander.close()
        self.chunks.put(None)
        self.writer.join()
        if self.errors:
            raise self.errors[0]


def target_output(num_tokens: int, seed: int) -> list[torch.Tensor]:
    """Return one [tokens, hidden] per collected layer. All rows differ."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, HIDDEN, generator=generator).to(DTYPE) for _ in range(LAYERS)]


def expected_row(rows: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return torch.stack([rows[source][index] for source in LAYER_ORDER])


@st.composite
def steps(draw: st.DrawFn) -> list[list[Span]]:
    """Draw batches of several requests with some wanted rows."""
    found, positions = [], dict.fromkeys("abcd", 0)
    for _ in range(draw(st.integers(1, 7))):
        spans, row = [], 0
        for request_id in draw(st.permutations("abcd")):
            num_rows = draw(st.integers(1, 6))
            if draw(st.booleans()):
                spans.append(Span(request_id, positions[request_id], num_rows, row))
                positions[request_id] += num_rows
            row += num_rows
        if spans:
            found.append(spans)
    return found


def run_steps(
    pipeline: Pipeline, batches: Sequence[Sequence[Span]]
) -> dict[tuple[str, int], torch.Tensor]:
    expected = {}
    for seed, spans in enumerate(batches):
        rows = target_output(MAX_TOKENS, seed)
        pipeline.step(rows, spans)
        for span in spans:
            for offset in range(span.num_rows):
                expected[span.request_id, span.first + offset] = expected_row(
                    rows, span.row + offset
                )
    pipeline.close()
    return expected
