"""Part (b): from the last row of a prompt to the published file and to the waiting reader."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import ROOT
from benchmarks.measure import quantile
from benchmarks.pipeline.ours import Pipeline, SourceSlot, start_of
from benchmarks.pipeline.peers import PIECE, Vllm033
from benchmarks.pipeline.reader_process import POLL_SECONDS
from benchmarks.pipeline.rows import STEP_TOKENS, Load, Source, Step
from vllm_ascend_hsx.doctor.storage import filesystem_of
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX

_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        tokens: lengths of the prompts.
        last_chunks: tokens of the last chunk; the others arrive in whole steps before it.
        samples: number of each, with a sleeping reader.
        polled: number for each prompt length, with a polling reader.
        peer_samples: number for vLLM 0.33's path.
    """

    tokens: tuple[int, ...] = (2048, 8192)
    last_chunks: tuple[int, ...] = (64, 512, 2048)
    samples: int = 50
    polled: int = 20
    peer_samples: int = 7


FULL = Scale()
QUICK = Scale(samples=20, polled=5, peer_samples=3)


@dataclass
class Samples:
    """Seconds, one entry per request.

    Attributes:
        from_host: from the last row in pinned memory until the file is visible under the final
            name.
        from_step: the same from the end of the step, when the lander receives the last chunk's
            first row.
        told: from publication until the reader is woken. loaded: until it has mapped the tensors.
        raw: a raw write of the last chunk's bytes in the same turn: the lower limit for a complete
            file.
    """

    from_host: list[float] = field(default_factory=list)
    from_step: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    def quantiles(self) -> dict[str, dict[str, float]]:
        return {
            name: {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
            for name, values in asdict(self).items()
            if values
        }


@dataclass(frozen=True)
class Prompt:
    """p50 and p99, in seconds, of prompts of `tokens` tokens with a last chunk of `last_chunk`."""

    tokens: int
    last_chunk: int
    quantiles: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Result:
    """Measurements; times in seconds.

    Attributes:
        prompts: one entry per kind of prompt.
        told: quantiles over all prompts.
        bare_told: for a reader that sleeps on an otherwise unused lock: the time the system needs
            to wake a process.
        polled: for a polling reader.
        vllm: median time of vLLM 0.33's path for one request, from the end of the last step, by
            tokens.
    """

    filesystem: str
    prompts: list[Prompt]
    told: dict[str, float]
    bare_told: dict[str, float]
    polled: dict[str, float]
    vllm: dict[int, float]


class Reader:
    """A process of reader_process.py."""

    def __init__(self, way: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline.reader_process", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def expect(self, path: Path) -> None:
        assert self._process.stdin is not None
        print(path, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reader ended with exit code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def reader(way: str) -> Iterator[Reader]:
    process = Reader(way)
    try:
        yield process
    except BaseException:
        process.kill()  # it may wait for a file that will never be finished
        raise
    process.close()


def wait_for_sleeper(lock: Path) -> None:
    """Wait until a process sleeps in flock() on the file, according to the kernel's list."""
    inode = os.stat(lock).st_ino
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any("->" in line and f":{inode} " in line for line in _LOCKS.read_text().splitlines()):
            return
        time.sleep(0.001)
    raise RuntimeError(f"no process sleeps on {lock.name}")


class Bench:
    """One request at a time through a pipeline, timed at each stage."""

    def __init__(self, source: Source, directory: Path, step_tokens: int) -> None:
        self.source = source
        self.directory = directory
        self._step_tokens = step_tokens
        self._on_host = 0.0
        self._published = 0.0
        self._pipeline = Pipeline(
            source,
            directory,
            with_copy=False,
            on_host=self._note_host,
            on_published=self._note_published,
        )
        self._count = 0

    def _note_host(self) -> None:
        self._on_host = time.monotonic()

    def _note_published(self) -> None:
        self._published = time.monotonic()

    def run(
        self,
        tokens: int,
        last_chunk: int,
        samples: Samples,
        waiting: Reader,
        *,
        asleep: bool,
        pause: float = 0.0,
    ) -> None:
        """Serve a request; the reader waits before the last chunk, `pause` s if not asleep."""
        self._count += 1
        request_id = f"prompt-{self._count}"
        path = self.directory / f"{request_id}.safetensors"
        self._pipeline.start([start_of(request_id, path, tokens)])
        slots = [
            SourceSlot(self.source, step) for step in self._steps(request_id, tokens, last_chunk)
        ]
        for slot in slots[:-1]:
            self._pipeline.save(slot)
        self._pipeline.wait_until_open()
        self._pipeline.wait_until_written()
        waiting.expect(path)
        if asleep:
            wait_for_sleeper(path.with_name(path.name + LOCK_SUFFIX))
        else:
            time.sleep(pause)
        step_ended = time.monotonic()
        self._pipeline.save(slots[-1])
        self._pipeline.wait_for([request_id])
        answer = waiting.answer()
        samples.from_step.append(self._published - step_ended)
        samples.from_host.append(self._published - self._on_host)
        samples.told.append(answer["told"] - self._published)
        samples.loaded.append(answer["loaded"] - self._published)
        for each in self.directory.glob("[!.]*"):
            each.unlink()

    def raw(self, rows: int) -> float:
        """Return the seconds of a raw write of the rows to an open file that already has data."""
        data = self.source.bytes_of(self._count * 977 % (self.source.tokens - rows + 1), rows)
        path = self.directory / "raw"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.pwrite(fd, b"x", 0)
            began = time.monotonic()
            for begin in range(0, len(data), PIECE):
                os.pwrite(fd, data[begin : begin + PIECE], 4096 + begin)
            return time.monotonic() - began
        finally:
            os.close(fd)
            path.unlink()

    def close(self) -> None:
        self._pipeline.close()

    def _steps(self, request_id: str, tokens: int, last_chunk: int) -> list[Step]:
        before = tokens - last_chunk
        firsts = [*range(0, before, self._step_tokens), before]
        lasts = [*firsts[1:], tokens]
        return [
            Step(
                first % (self.source.tokens - self._step_tokens),
                (Span(request_id, first, last - first, 0),),
            )
            for first, last in zip(firsts, lasts, strict=True)
        ]


def run(
    scale: Scale,
    source: Source,
    directory: Path,
    show: Callable[[str], None],
    *,
    step_tokens: int = STEP_TOKENS,
) -> Result:
    """Measure on the directory's filesystem."""
    with ExitStack() as stack:

        def place() -> Path:
            return Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory)
                )
            )

        bench = Bench(source, place(), step_tokens)
        stack.callback(bench.close)
        cells = [
            (tokens, last)
            for tokens in scale.tokens
            for last in scale.last_chunks
            if last <= min(tokens, step_tokens)
        ]
        measured = {cell: Samples() for cell in cells}
        bare_place, bare_told = place(), []
        with reader("sleep") as asleep, reader("flock") as bare:
            for sample in range(-1, scale.samples):
                for tokens, last in random.Random(sample).sample(cells, len(cells)):
                    kept = measured[tokens, last] if sample >= 0 else Samples()
                    bench.run(tokens, last, kept, asleep, asleep=True)
                    kept.raw.append(bench.raw(last))
                    bare_told.append(_hand_over(bare_place, bare))
        for (tokens, last), samples in measured.items():
            p50 = samples.quantiles()["from_host"]["p50"]
            show(
                f"{tokens} tokens, last chunk of {last}: published {p50 * 1e3:.2f} ms after the "
                "last row (p50)"
            )
        told = [seconds for samples in measured.values() for seconds in samples.told]
        polled = Samples()
        with reader("poll") as polling:
            for sample in range(scale.polled):
                pause = random.Random(sample).uniform(POLL_SECONDS, 2 * POLL_SECONDS)
                bench.run(
                    min(scale.tokens),
                    min(scale.last_chunks),
                    polled,
                    polling,
                    asleep=False,
                    pause=pause,
                )
        peer = Vllm033(source, place(), with_copy=True)
        stack.callback(peer.close)
        loads = {tokens: Load(tokens, 1, 1, source.tokens, step_tokens) for tokens in scale.tokens}
        walls = {
            tokens: quantile(
                [peer.measure(load, check=not index).wall for index in range(scale.peer_samples)],
                0.5,
            )
            for tokens, load in loads.items()
        }
        return Result(
            filesystem_of(directory),
            [
                Prompt(tokens, last, samples.quantiles())
                for (tokens, last), samples in measured.items()
            ],
            _p50_p99(told),
            _p50_p99(bare_told),
            _p50_p99(polled.told),
            walls,
        )


def _hand_over(directory: Path, bare: Reader) -> float:
    """Return the seconds from the release of a lock until a process that sleeps on it runs."""
    lock = directory / f"bare{LOCK_SUFFIX}"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        bare.expect(directory / "bare")
        wait_for_sleeper(lock)
        began = time.monotonic()
        fcntl.flock(fd, fcntl.LOCK_UN)
        return bare.answer()["told"] - began
    finally:
        os.close(fd)
        lock.unlink()


def _p50_p99(values: list[float]) -> dict[str, float]:
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
