"""Each goal, what was measured, and the limit measured beside it where the goal is missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.kv_cache import capacity
from benchmarks.pipeline import conversations, decoding, engine, latency, per_step, slow_storage
from benchmarks.pipeline.host_path import (
    COPIED,
    DIRECT,
    DIRECT_CHECKED,
    DIRECT_PUBLISHED,
    DURABLY,
    OURS,
    OURS_UNCHECKED,
    PINNED,
    RAW,
    RAW_ONE_THREAD,
    VLLM,
    Cell,
)

MIB = 1 << 20
STRAY_BYTES = (
    4 * MIB
)  # of memory that comes and goes with interpreter and threads, whatever is written
SMALL_CHUNK = 64  # rows of a last chunk whose writing is not what a reader waits for


@dataclass(frozen=True)
class Results:
    """All that was measured. A part that was left out is empty."""

    machine: dict[str, str]
    load_average: tuple[float, float]
    ring_bytes: int
    host: list[Cell]
    no_durable_view: dict[str, str]
    latency: list[latency.Result]
    engine: engine.Result | None
    step: per_step.Result | None
    slow_storage: slow_storage.Result | None
    capacity: capacity.Result | None
    conversations: conversations.Result | None
    decode: decoding.Result | None = None


@dataclass(frozen=True)
class Verdict:
    """One line of the table.

    Attributes:
        goal, measured: in words.
        met: "yes", "no", or in how many cells.
        limit: what stops it, measured in the same run; empty if it is met.
    """

    goal: str
    measured: str
    met: str
    limit: str = ""


def judge(results: Results) -> list[Verdict]:
    """Every goal of which there is a measurement."""
    host = results.host
    verdicts = [
        _each_cell(
            "from 512 tokens on at least 90 % of a raw write",
            _of(host, PINNED, lambda cell: cell.tokens >= 512),
            lambda cell: cell.figures[OURS].of_raw,
            0.9,
            _percent,
            _one_file_at_a_time,
        ),
        _each_cell(
            "at 128 tokens at least 80 % of a raw write",
            _of(host, PINNED, lambda cell: cell.tokens == 128),
            lambda cell: cell.figures[OURS].of_raw,
            0.8,
            _percent,
            _fixed_cost,
        ),
        _each_cell(
            "from 2,048 tokens on at least 4 times as fast as vLLM 0.33's path",
            _of(host, COPIED, lambda cell: cell.tokens >= 2048),
            lambda cell: cell.figures[OURS].of_vllm or 0.0,
            4.0,
            lambda value: f"{value:.1f} x",
            _raw_against_vllm,
        ),
        _each_cell(
            "durable, from 2,048 tokens on: at least 95 % of raw O_DIRECT with fdatasync",
            _of(host, DURABLY, lambda cell: cell.tokens >= 2048),
            lambda cell: cell.figures[OURS].of_raw,
            0.95,
            _percent,
            _publishing,
        ),
        _each_cell(
            "durable, from 2,048 tokens on: at most 0.1 s of CPU time per GB",
            _of(host, DURABLY, lambda cell: cell.tokens >= 2048),
            lambda cell: -cell.figures[OURS].cpu_s_per_gb,
            -0.1,
            lambda value: f"{-value:.3f} s",
            _direct_cpu,
        ),
        _checksum(_of(host, PINNED, lambda cell: True)),
        *_latency(results.latency),
        _memory(host, results.ring_bytes),
        *_engine(results.engine),
        *_steps(results.step),
        *_conversations(results.conversations),
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def _of(cells: Sequence[Cell], view: str, wanted: Callable[[Cell], bool]) -> list[Cell]:
    """Of those in which prompts come as vLLM schedules them."""
    return [cell for cell in cells if cell.view == view and not cell.evenly and wanted(cell)]


def _each_cell(
    goal: str,
    cells: Sequence[Cell],
    value: Callable[[Cell], float],
    least: float,
    write: Callable[[float], str],
    limit: Callable[[Sequence[Cell]], str],
) -> Verdict | None:
    """The goal holds if it does in every cell; `value` is larger where it is better."""
    if not cells:
        return None
    values = sorted((value(cell), cell.filesystem, cell.tokens, cell.in_flight) for cell in cells)
    (worst, filesystem, tokens, in_flight), good = (
        values[0],
        sum(each[0] >= least for each in values),
    )
    middle = values[len(values) // 2][0]
    where = f"{write(worst)} at worst ({filesystem}, {tokens:,} tokens, {in_flight} in flight)"
    met = "yes" if good == len(values) else f"in {good} of {len(values)} cells"
    return Verdict(
        goal,
        f"{write(middle)} in the median cell, {where}",
        met,
        "" if met == "yes" else limit(cells),
    )


def _checksum(cells: Sequence[Cell]) -> Verdict | None:
    """Judge by the median cell: the difference of two runs is small against the noise of one."""
    if not cells:
        return None
    costs = sorted(
        cell.figures[OURS].cpu_s_per_gb / cell.figures[OURS_UNCHECKED].cpu_s_per_gb - 1
        for cell in cells
    )
    middle = costs[len(costs) // 2]
    return Verdict(
        "a checksum takes at most 10 % of the path's CPU time",
        f"{middle:.1%} in the median cell of {len(costs)}",
        "yes" if middle <= 0.1 else "no",
    )


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _fixed_cost(cells: Sequence[Cell]) -> str:
    """What a file costs beyond the raw write of its bytes, of the smallest files."""
    fewest = min(cell.tokens for cell in cells)
    beyond, checksum = [], []
    for cell in cells:
        if cell.tokens == fewest:
            gb, figures = cell.num_bytes / cell.requests / 1e9, cell.figures
            beyond.append(gb * (figures[OURS].cpu_s_per_gb - figures[RAW].cpu_s_per_gb))
            checksum.append(
                gb * (figures[OURS].cpu_s_per_gb - figures[OURS_UNCHECKED].cpu_s_per_gb)
            )
    more, checksums = (sorted(values)[len(values) // 2] * 1e6 for values in (beyond, checksum))
    return (
        f"a file of {fewest:,} tokens takes {more:,.0f} µs more CPU time than its raw write, "
        f"{checksums:,.0f} µs of these for the checksum"
    )


def _one_file_at_a_time(cells: Sequence[Cell]) -> str:
    """A long prompt's rows fill the ring file by file, and Linux admits one writer to a file."""
    worst = min(cells, key=lambda cell: cell.figures[OURS].of_raw)
    alone, unchecked = worst.figures[RAW_ONE_THREAD].of_raw, worst.figures[OURS_UNCHECKED].of_raw
    return (
        f"in the worst cell a raw write by one thread reaches {alone:.0%}, ours without checksum "
        f"{unchecked:.0%}; {_fixed_cost(cells)}"
    )


def _raw_against_vllm(cells: Sequence[Cell]) -> str:
    alone = sorted(cell.figures[RAW].of_vllm or 0.0 for cell in cells)
    good = sum(value >= 4 for value in alone)
    return (
        f"a raw write alone, without any copy: {alone[len(alone) // 2]:.1f} x in the median "
        f"cell, 4 x in {good} of {len(alone)}"
    )


def _publishing(cells: Sequence[Cell]) -> str:
    worst = min(cells, key=lambda cell: cell.figures[OURS].of_raw)
    published, unchecked = (
        worst.figures[DIRECT_PUBLISHED].of_raw,
        worst.figures[OURS_UNCHECKED].of_raw,
    )
    return (
        "in the worst cell raw O_DIRECT with a rename and an fsync of the directory reaches "
        f"{published:.0%}, "
        f"ours without checksum {unchecked:.0%}"
    )


def _direct_cpu(cells: Sequence[Cell]) -> str:
    least = min(cell.figures[DIRECT].cpu_s_per_gb for cell in cells)
    unchecked = min(cell.figures[OURS_UNCHECKED].cpu_s_per_gb for cell in cells)
    checked = min(cell.figures[DIRECT_CHECKED].cpu_s_per_gb for cell in cells)
    return (
        f"raw O_DIRECT itself takes {least:.3f} s, with a checksum {checked:.3f} s, ours without "
        f"checksum {unchecked:.3f} s "
        "(the minimum of all cells)"
    )


def _latency(results: Sequence[latency.Result]) -> list[Verdict]:
    verdicts = []
    for result in results:
        small = [each for each in result.prompts if each.last_chunk == SMALL_CHUNK]
        for prompt in small:
            p50 = prompt.quantiles["from_host"]["p50"]
            met = p50 <= 1e-3
            verdicts.append(
                Verdict(
                    (
                        f"{prompt.tokens:,} tokens, {result.filesystem}: published within 1 ms "
                        "(p50) "
                        "of the last row"
                    ),
                    f"{p50 * 1e3:.2f} ms after a last chunk of {SMALL_CHUNK} rows",
                    "yes" if met else "no",
                    ""
                    if met
                    else (
                        "a raw write of that chunk takes "
                        f"{prompt.quantiles['raw']['p50'] * 1e3:.2f} ms"
                    ),
                )
            )
        told = result.told["p99"]
        verdicts.append(
            Verdict(
                f"{result.filesystem}: a reader is notified within 0.3 ms (p99)",
                f"{told * 1e3:.2f} ms (p50 {result.told['p50'] * 1e3:.2f} ms)",
                "yes" if told <= 3e-4 else "no",
                ""
                if told <= 3e-4
                else (
                    f"the release of a bare flock takes {result.bare_told['p99'] * 1e3:.2f} ms "
                    "to wake its waiter"
                ),
            )
        )
    return verdicts


def _memory(cells: Sequence[Cell], ring_bytes: int) -> Verdict | None:
    copied = [cell for cell in cells if cell.view == COPIED]
    if not copied:
        return None
    most = max(cell.figures[OURS].rss for cell in copied)
    peer = max(cell.figures[VLLM].rss for cell in copied)
    met = most <= STRAY_BYTES
    return Verdict(
        "no host memory beyond the ring, whatever the prompts' length and number",
        (
            f"{most / MIB:.1f} MiB at most beyond a ring of {ring_bytes / MIB:.0f} MiB (vLLM "
            "0.33's "
            f"path: {peer / MIB:,.0f} MiB)"
        ),
        "yes" if met else "no",
    )


def _engine(result: engine.Result | None) -> list[Verdict]:
    if result is None:
        return []
    of_vllm = {cell.traffic: cell.speed for cell in result.cells if cell.extraction == engine.VLLM}
    return [
        Verdict(
            (
                f"{cell.traffic}: at least 99 % of the requests per second of an engine without "
                "extraction"
            ),
            f"{cell.speed:.1%}, the median of {result.starts} starts",
            "yes" if (met := cell.speed >= 0.99) else "no",
            ""
            if met
            else f"vLLM's connector reaches {of_vllm[cell.traffic]:.1%}, with this tiny model",
        )
        for cell in result.cells
        if cell.extraction == engine.OURS
    ]


def _steps(result: per_step.Result | None) -> list[Verdict]:
    if result is None:
        return []
    step, begins = result.per_step * 1e6, (result.per_request + result.per_beginning) * 1e6
    return [
        Verdict(
            "main thread: at most 100 µs per step",
            (
                f"{step:.0f} µs, and {result.per_1000_tokens * 1e6:+.1f} µs for 1,000 more "
                "tokens in "
                "a prompt"
            ),
            "yes" if step <= 100 else "no",
            ""
            if step <= 100
            else (
                f"{result.launches * 1e6:.0f} µs of these are the emulator's, which stands for "
                "the device"
            ),
        ),
        Verdict(
            "main thread: at most 15 µs per request",
            (
                f"{result.per_request * 1e6:.1f} µs for each in a step, {begins:.1f} µs for each "
                "that begins in it"
            ),
            "yes" if max(begins, result.per_request * 1e6) <= 15 else "no",
        ),
    ]


def _conversations(result: conversations.Result | None) -> list[Verdict]:
    cells = {cell.name: cell for cell in result.cells} if result is not None else {}
    if (ours := cells.get(conversations.OURS)) is None:
        return []
    off, without = cells[conversations.OFF], cells[conversations.WITHOUT]
    return [
        Verdict(
            "conversations: computes at most 1.1 times the tokens of a server without extraction",
            f"{ours.of_off:.2f} times {off.computed:,} tokens (without reuse {without.of_off:.1f})",
            "yes" if ours.of_off <= 1.1 else "no",
        ),
        Verdict(
            "conversations: takes at most 1.15 times as long as without extraction",
            f"{ours.wall_of_off:.2f} times (without reuse {without.wall_of_off:.1f})",
            "yes" if ours.wall_of_off <= 1.15 else "no",
        ),
    ]
