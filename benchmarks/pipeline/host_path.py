"""Part (a): from rows in pinned memory or on the NPU to published files: ours, peers and limits."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Cost, in_turn, median_wall, speed_ratio
from benchmarks.pipeline.ours import DURABLE, DURABLE_NO_CHECKSUM, NO_CHECKSUM, Ours, num_writers
from benchmarks.pipeline.peers import (
    Contestant,
    Memcpy,
    RawDirect,
    RawWrite,
    Vllm033,
    direct_io_works,
)
from benchmarks.pipeline.rows import STEP_TOKENS, Load, Source
from vllm_ascend_hsx.doctor.storage import filesystem_of

PINNED, COPIED, DURABLY = "from pinned memory", "with the copy", "durable"
OURS, OURS_UNCHECKED = "ours", "ours, no checksum"
RAW, RAW_ONE_THREAD, MEMCPY = "raw write", "raw write, one thread", "memcpy"
DIRECT, DIRECT_CHECKED, DIRECT_PUBLISHED = (
    "raw O_DIRECT",
    "the same, with checksum",
    "the same, published",
)
VLLM, VLLM_REUSING = "vLLM 0.33's path", "the same, pinned memory reused"


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        pinned, copied, durable: for each view, the lengths of the requests and the number in flight
            for each length.
        evenly: the same for the first view, with all requests sharing each step evenly.
        repetitions: number per cell, odd.
        least_bytes: minimum that one run writes, to make it long enough to measure.
    """

    pinned: Mapping[int, Sequence[int]]
    copied: Mapping[int, Sequence[int]]
    durable: Mapping[int, Sequence[int]]
    evenly: Mapping[int, Sequence[int]]
    repetitions: int = 7
    least_bytes: int = 96 << 20

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        return max(
            tokens
            for view in (self.pinned, self.copied, self.durable, self.evenly)
            for tokens in view
        )


# The numbers in flight make 0.8 GB of files in the first case, 0.4 GB in the others.
FULL = Scale(
    pinned={128: (1, 8, 32, 256), 512: (1, 8, 32), 2048: (1, 8), 8192: (1, 2)},
    copied={128: (1, 256), 512: (1, 32), 2048: (1, 8), 8192: (1, 2)},
    durable={128: (1, 8), 2048: (1, 8), 8192: (1, 2)},
    evenly={128: (256,), 2048: (8,)},
)
QUICK = Scale(
    pinned={128: (1, 8), 2048: (1, 8)},
    copied={2048: (1,)},
    durable={2048: (1,)},
    evenly={},
    repetitions=3,
)


@dataclass(frozen=True)
class Figures:
    """Results of one contestant in one cell.

    Attributes:
        gb_per_s: median, in 10^9 bytes.
        cpu_s_per_gb: median of the CPU time of all threads.
        rss: growth of memory in bytes; maximum of all repetitions.
        of_raw: speed relative to the raw write (raw O_DIRECT in the durable view); median of the
            ratios within a repetition.
        of_vllm: the same relative to vLLM 0.33's path; None where it did not take part.
    """

    gb_per_s: float
    cpu_s_per_gb: float
    rss: int
    of_raw: float
    of_vllm: float | None


@dataclass(frozen=True)
class Cell:
    """One load and the results by contestant."""

    view: str
    filesystem: str
    tokens: int
    in_flight: int
    evenly: bool
    requests: int
    num_bytes: int
    figures: dict[str, Figures]


def loads(
    sizes: Mapping[int, Sequence[int]],
    scale: Scale,
    source: Source,
    step_tokens: int,
    *,
    evenly: bool = False,
) -> Iterator[Load]:
    """Return the loads of a view."""
    for tokens, many in sizes.items():
        for in_flight in many:
            waves = max(1, scale.least_bytes // (in_flight * tokens * source.row_format.row_bytes))
            yield Load(tokens, in_flight * waves, in_flight, source.tokens, step_tokens, evenly)


def run(
    scale: Scale,
    source: Source,
    directory: Path,
    show: Callable[[str], None],
    *,
    step_tokens: int = STEP_TOKENS,
) -> tuple[list[Cell], str | None]:
    """Measure every view that the directory's filesystem allows.

    Returns:
        The cells, and the reason for a missing durable view (None if it exists).
    """
    views = {
        PINNED: [
            *loads(scale.pinned, scale, source, step_tokens),
            *loads(scale.evenly, scale, source, step_tokens, evenly=True),
        ],
        COPIED: [*loads(scale.copied, scale, source, step_tokens)],
    }
    refusal = direct_io_works(directory)
    if refusal is None:
        views[DURABLY] = [*loads(scale.durable, scale, source, step_tokens)]
    cells = []
    for view, cases in views.items():
        with contestants(view, source, directory) as entered:
            cells += [_measure(view, entered, load, scale, directory, show) for load in cases]
    return cells, refusal


@contextmanager
def contestants(view: str, source: Source, directory: Path) -> Iterator[dict[str, Contestant]]:
    """Return the contestants of a view, each with a separate directory below `directory`."""
    with ExitStack() as stack:

        def place() -> Path:
            return Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory)
                )
            )

        entered: dict[str, Contestant]
        copied = view == COPIED
        if view == DURABLY:
            entered = {
                OURS: Ours(source, place(), with_copy=False, options=DURABLE),
                OURS_UNCHECKED: Ours(source, place(), with_copy=False, options=DURABLE_NO_CHECKSUM),
                DIRECT: RawDirect(source, place(), num_writers()),
                DIRECT_CHECKED: RawDirect(source, place(), num_writers(), checksum=True),
                DIRECT_PUBLISHED: RawDirect(source, place(), num_writers(), publish=True),
            }
        else:
            entered = {
                OURS: Ours(source, place(), with_copy=copied),
                OURS_UNCHECKED: Ours(source, place(), with_copy=copied, options=NO_CHECKSUM),
                RAW: RawWrite(source, place(), num_writers()),
                VLLM: Vllm033(source, place(), with_copy=copied),
            }
            if copied:
                entered[VLLM_REUSING] = Vllm033(source, place(), with_copy=True, reuse_pinned=True)
            else:
                entered[RAW_ONE_THREAD] = RawWrite(source, place(), 1)
                entered[MEMCPY] = Memcpy(source, place(), num_writers())
        for contestant in entered.values():
            stack.callback(contestant.close)
        yield entered


def _measure(
    view: str,
    entered: dict[str, Contestant],
    load: Load,
    scale: Scale,
    directory: Path,
    show: Callable[[str], None],
) -> Cell:
    checked = {
        name: contestant.measure(load, check=True) for name, contestant in entered.items()
    }  # also warms up
    assert checked.keys() == entered.keys()
    costs = in_turn(
        {name: _runs(contestant, load) for name, contestant in entered.items()},
        scale.repetitions,
        warm_up=0,
    )
    num_bytes = load.num_rows * next(iter(entered.values())).source.row_format.row_bytes
    raw = costs[DIRECT if view == DURABLY else RAW]
    figures = {
        name: Figures(
            gb_per_s=num_bytes / 1e9 / median_wall(mine),
            cpu_s_per_gb=statistics.median(cost.cpu for cost in mine) / (num_bytes / 1e9),
            rss=max(cost.rss for cost in mine),
            of_raw=speed_ratio(mine, raw),
            of_vllm=speed_ratio(mine, costs[VLLM]) if VLLM in costs else None,
        )
        for name, mine in costs.items()
    }
    cell = Cell(
        view,
        filesystem_of(directory),
        load.tokens,
        load.in_flight,
        load.evenly,
        load.requests,
        num_bytes,
        figures,
    )
    ours = figures[OURS]
    versus = f", {ours.of_vllm:.2f} x {VLLM}" if ours.of_vllm is not None else ""
    how = "evenly" if load.evenly else "in flight"
    show(
        f"{view}, {cell.filesystem}: {load.tokens} tokens, {load.in_flight} {how}: "
        f"{ours.of_raw:.0%} of raw{versus}"
    )
    return cell


def _runs(contestant: Contestant, load: Load) -> Callable[[], Cost]:
    return lambda: contestant.measure(load)
