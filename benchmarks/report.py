"""The results as tables on the terminal, as JSON, as docs/performance.md and as a plot."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks import cost, words
from benchmarks.goals import MIB, Results, judge
from benchmarks.kv_cache import capacity
from benchmarks.pipeline import conversations, decoding, engine, latency, per_step, slow_storage
from benchmarks.pipeline.engine import OFF
from benchmarks.pipeline.host_path import (
    COPIED,
    DIRECT,
    DURABLY,
    OURS,
    PINNED,
    RAW,
    VLLM,
    Cell,
)
from benchmarks.pipeline.rows import MINIMAX_M2, STEP_TOKENS

Rows = list[list[str]]
TABLE = tuple[str, list[str], Rows]  # title, headings, rows

WIDTH = 160  # of output to a file or a pipe
NAME, COST = "performance", "cost"
# The page names the machine of the longest part.
_OF_HOST = ("host", "no_durable_view", "machine", "load_average", "ring_bytes")
NOTHING = Results({}, (0.0, 0.0), 0, [], {}, [], None, None, None, None, None)


def tables(results: Results) -> list[TABLE]:
    """Return the tables for the terminal, in order."""
    shown: list[TABLE] = [cost_table(results), goals_table(results)]
    for view in (PINNED, COPIED, DURABLY):
        if cells := [cell for cell in results.host if cell.view == view]:
            shown += host_tables(view, cells)
    shown += [latency_table(each) for each in results.latency]
    if results.engine is not None:
        shown.append(engine_table(results.engine))
    if results.step is not None:
        shown.append(step_table(results.step))
    if results.decode is not None:
        shown.append(decode_table(results.decode))
    if results.slow_storage is not None:
        shown.append(slow_storage_table(results.slow_storage))
    if results.conversations is not None:
        shown.append(conversations_table(results.conversations))
    if results.capacity is not None:
        shown.append(capacity_table(results.capacity))
    return shown


def cost_table(results: Results) -> TABLE:
    return (
        "what extraction costs",
        ["", "extraction off", "ours", "vLLM's connector"],
        cost.table(cost.costs(results)),
    )


def goals_table(results: Results) -> TABLE:
    rows = [[each.goal, each.measured, each.met] for each in judge(results)]
    return "goals", ["goal", "measured", "met"], rows


def host_tables(view: str, cells: Sequence[Cell]) -> list[TABLE]:
    """Speed, CPU time and, where it differs, memory: a row per cell, a column per contestant."""
    names = list(cells[0].figures)
    reference = DIRECT if view == DURABLY else RAW
    others = [name for name in names if name != reference]
    versus = VLLM in names

    def table(title: str, columns: Sequence[str], row: Callable[[Cell], Sequence[str]]) -> TABLE:
        return (
            f"{view}: {title}",
            ["filesystem", "tokens", "in flight", *columns],
            [[*_where(cell), *row(cell)] for cell in cells],
        )

    def speeds(cell: Cell) -> list[str]:
        own = [f"{cell.figures[name].of_raw:.0%}" for name in others]
        return [*own, f"{cell.figures[OURS].of_vllm or 0:.2f}"] if versus else own

    shown = [
        table(
            f"speed, % of {reference}",
            [*others, f"ours, times {VLLM}"] if versus else others,
            speeds,
        ),
        table(
            "CPU seconds per GB",
            names,
            lambda cell: [f"{cell.figures[name].cpu_s_per_gb:.3f}" for name in names],
        ),
    ]
    if view == COPIED:
        shown.append(
            table(
                "MiB of memory",
                names,
                lambda cell: [f"{cell.figures[name].rss / MIB:,.0f}" for name in names],
            )
        )
    return shown


def _where(cell: Cell) -> list[str]:
    return [
        cell.filesystem,
        f"{cell.tokens:,}",
        f"{cell.in_flight} evenly" if cell.evenly else str(cell.in_flight),
    ]


def latency_table(result: latency.Result) -> TABLE:
    headings = ["tokens", "last chunk", "last row → published", "end of step → published"]
    headings += ["raw write of last chunk", "published → notified", "published → mapped"]
    rows = [
        [f"{each.tokens:,}", f"{each.last_chunk:,}"]
        + [
            _p50_p99(each.quantiles[name])
            for name in ("from_host", "from_step", "raw", "told", "loaded")
        ]
        for each in result.prompts
    ]
    return f"latency, {result.filesystem}: p50 / p99 in ms", headings, rows


def _p50_p99(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50'] * 1e3:.2f} / {quantiles['p99'] * 1e3:.2f}"


def engine_table(result: engine.Result) -> TABLE:
    rows = [
        [
            each.traffic,
            each.extraction,
            f"{each.speed:.1%}",
            _range(each.requests_per_s),
            f"{each.cpu:.1%}",
            str(each.steps),
        ]
        for each in result.cells
    ]
    headings = [
        "traffic",
        "extraction",
        "requests/s, % of off",
        "of the starts",
        "CPU time per step, % of off",
        "steps",
    ]
    return "engine on the emulated NPU", headings, rows


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.1%} to {max(ratios):.1%}"


def step_table(result: per_step.Result) -> TABLE:
    rows = [
        [
            f"{cell.tokens:,}",
            str(cell.in_flight),
            f"{cell.beginning * 1e6:.0f}",
            "" if cell.going_on is None else f"{cell.going_on * 1e6:.0f}",
            f"{cell.idle * 1e6:.0f}",
        ]
        for cell in result.cells
    ]
    return (
        "main thread, µs of CPU time per step",
        ["tokens", "in flight", "all begin", "all go on", "nothing is extracted"],
        rows,
    )


def decode_table(result: decoding.Result) -> TABLE:
    rows = [
        [str(cell.in_flight)]
        + [f"{seconds * 1e6:.1f}" for seconds in (cell.row, cell.raw, cell.joined)]
        + [f"{seconds * 1e3:.1f}" for seconds in (cell.step_off, cell.step)]
        for cell in result.cells
    ]
    headings = [
        "requests",
        "ours, µs",
        "raw write of a row, µs",
        "of joined rows, µs",
        "step without, ms",
        "step, ms",
    ]
    return "CPU time of a row of generated tokens", headings, rows


def slow_storage_table(result: slow_storage.Result) -> TABLE:
    rows = [
        [
            each.setting,
            each.storage,
            *(f"{seconds * 1e3:,.0f}" for seconds in (each.p50, each.p99, each.longest)),
            f"{each.per_second:.1f}",
            f"{each.failed:.0%}",
        ]
        for each in result.cells
    ]
    headings = [
        "slow_storage",
        "storage",
        "gap p50, ms",
        "gap p99, ms",
        "longest gap, ms",
        "prompts/s",
        "without rows",
    ]
    return "a stream that is not extracted, beside prompts that are", headings, rows


def conversations_table(result: conversations.Result) -> TABLE:
    rows = [
        [
            each.name,
            f"{each.prompt:,}",
            f"{each.computed:,}",
            f"{each.of_off:.2f}",
            f"{each.wall:.0f}",
            f"{each.wall_of_off:.2f}",
        ]
        + (
            [f"{each.copied:,}", f"{each.bytes / MIB:,.0f}", f"{each.right} of {each.files}"]
            if each.files
            else ["", "", ""]
        )
        if not each.reason
        else [f"{each.name}: {each.reason}", *[""] * 8]
        for each in result.cells
    ]
    headings = ["extraction", "prompt tokens", "computed", "times off's", "seconds", "times off's"]
    headings += ["rows copied", "MiB in files", "files right"]
    return "conversations", headings, rows


def capacity_table(result: capacity.Result) -> TABLE:
    rows = [
        [
            each.model,
            each.layout,
            *(f"{number:,}" for number in (each.block_size, each.blocks, each.tokens)),
            f"{each.kept:.2%}",
        ]
        if not each.reason
        else [each.model, each.layout, "", "", "", "does not start"]
        for each in result.cells
    ]
    return "KV cache", ["model", "layout", "block size", "blocks", "tokens", "kept"], rows


def show(console: Console, results: Results) -> None:
    """Print all tables."""
    if not console.is_terminal:
        console.width = WIDTH
    for title, headings, rows in tables(results):
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(
                heading,
                overflow="fold",
                justify="left" if index == 0 or title == "goals" else "right",
            )
        for row in rows:
            table.add_row(*row)
        console.print(table)


def written_before(directory: Path, parts: Sequence[str]) -> Results:
    """Return the recorded results without these parts, whose form may have changed.

    Raises OSError, or ValidationError if another part cannot be read.
    """
    return _read(
        directory / f"{NAME}.json", {name: getattr(NOTHING, name) for name in _fields(parts)}
    )


def merge(results: Results, before: Results, parts: Sequence[str]) -> Results:
    """Return the recorded results with these parts replaced by new measurements."""
    return replace(before, **{name: getattr(results, name) for name in _fields(parts)})


def _fields(parts: Sequence[str]) -> set[str]:
    return {name for part in parts for name in (_OF_HOST if part == "host" else (part,))}


def _read(path: Path, instead: Mapping[str, Any] = MappingProxyType({})) -> Results:
    """Return the results in a file, with some fields replaced. Raises as `written_before`."""
    fields = {
        **dict.fromkeys(Results.__dataclass_fields__),
        **json.loads(path.read_text()),
        **instead,
    }
    return TypeAdapter(Results).validate_python(fields)


def write(results: Results, directory: Path) -> list[Path]:
    """Write performance.json, two pictures and performance.md. Return their paths.

    The page also has the goals of other machines, one for each performance-*.json there.
    """
    from benchmarks.plot import draw

    directory.mkdir(parents=True, exist_ok=True)
    as_json, text = (directory / f"{NAME}.{suffix}" for suffix in ("json", "md"))
    cost_image, image = directory / f"{COST}.png", directory / f"{NAME}.png"
    as_json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    draw(results, cost_image, image)
    others = {path.name: _read(path) for path in sorted(directory.glob(f"{NAME}-*.json"))}
    text.write_text(markdown(results, others))
    return [as_json, cost_image, image, text]


def write_again(directory: Path) -> list[Path]:
    """Write page and pictures again from the recorded results, without measuring."""
    return write(_read(directory / f"{NAME}.json"), directory)


def markdown(results: Results, others: Mapping[str, Results]) -> str:
    """Return docs/performance.md. `others` are results of other machines, by file name."""
    parts = [
        words.HEAD,
        f"![costs beside a server without extraction and vLLM's connector]({COST}.png)",
        _markdown_table(*cost_table(results)[1:]),
        words.COST,
        "## Appendix",
        words.MACHINE,
        "\n".join(
            textwrap.fill(
                words.RECORD.format(file=name, machine=_machine(each)), 100, subsequent_indent="  "
            )
            for name, each in {f"{NAME}.json": results, **others}.items()
        ),
        "### Goals",
        _markdown_table(*_goals(results, others)),
        f"![figures of files, latency, engine and steps]({NAME}.png)",
    ]
    for heading, text, table in _sections(results):
        parts += [f"### {heading}", _fill(text), *([_markdown_table(*table)] if table else ())]
    return "\n\n".join(parts) + "\n"


def _goals(results: Results, others: Mapping[str, Results]) -> tuple[list[str], Rows]:
    """A column for each machine: the measurement, and whether the goal is met."""
    by_machine = [
        {each.goal: f"{each.measured}: {each.met}" for each in judge(found)}
        for found in (results, *others.values())
    ]
    goals = dict.fromkeys(goal for found in by_machine for goal in found)
    rows = [[goal, *(found.get(goal, "") for found in by_machine)] for goal in goals]
    return ["goal", *(_processor(found) for found in (results, *others.values()))], rows


def _sections(results: Results) -> Iterator[tuple[str, str, tuple[list[str], Rows] | None]]:
    """Yield heading, words and table of each part of the appendix that was measured."""
    if results.host:
        yield "Files", _files_words(results), _files(results.host)
    if results.latency:
        yield "Latency", _latency_words(results.latency), _latencies(results.latency)
    if results.engine is not None:
        yield "Engine", _engine_words(results.engine), None
    if results.step is not None:
        yield "Main thread", _step_words(results.step), None
    if results.decode is not None:
        yield "Generated tokens", _decode_words(results.decode), None
    if results.slow_storage is not None:
        yield "Slow storage", _slow_storage_words(results.slow_storage), _slow(results.slow_storage)
    if results.conversations is not None:
        yield "Conversations", _conversations_words(results.conversations), None
    if results.capacity is not None:
        yield "KV cache", _capacity_words(results.capacity), None


def _files(cells: Sequence[Cell]) -> tuple[list[str], Rows]:
    """Medians over the numbers of requests in flight, for each filesystem and length."""
    rows = []
    for place in dict.fromkeys((cell.filesystem, cell.tokens) for cell in cells):
        shares = [_median(cells, PINNED, place, name, "of_raw") for name in (OURS, VLLM)]
        cpu = [_median(cells, PINNED, place, name, "cpu_s_per_gb") for name in (OURS, RAW)]
        rows.append(
            [f"{place[0]}, {place[1]:,} tokens"]
            + ["" if share is None else f"{share:.0%}" for share in shares]
            + ["" if None in cpu else " / ".join(f"{seconds:.2f}" for seconds in cpu)]
        )
        times = _median(cells, COPIED, place, OURS, "of_vllm")
        durable = _median(cells, DURABLY, place, OURS, "of_raw")
        rows[-1] += ["" if times is None else f"{times:.1f}"]
        rows[-1] += ["" if durable is None else f"{durable:.0%}"]
    headings = ["% of raw write", OURS, VLLM, "CPU s/GB: ours / raw"]
    return [*headings, "with copy, times vLLM's path", "durable, % of O_DIRECT"], rows


def _median(
    cells: Sequence[Cell], view: str, place: tuple[str, int], name: str, attribute: str
) -> float | None:
    values = [
        getattr(cell.figures[name], attribute)
        for cell in cells
        if (cell.view, cell.filesystem, cell.tokens) == (view, *place) and not cell.evenly
    ]
    return statistics.median(values) if values else None


def _latencies(results: Sequence[latency.Result]) -> tuple[list[str], Rows]:
    """The longest prompt of each filesystem, with the smallest and the largest last chunk."""
    rows = []
    for result in results:
        longest = max(each.tokens for each in result.prompts)
        prompts = [each for each in result.prompts if each.tokens == longest]
        for each in (prompts[0], prompts[-1]):
            quantiles = each.quantiles
            rows.append(
                [f"{result.filesystem}, last chunk of {each.last_chunk:,}"]
                + [_p50_p99(quantiles["from_host"])]
                + [f"{quantiles[name]['p50'] * 1e3:.2f}" for name in ("raw", "told")]
            )
    return ["ms", "published, p50 / p99", "raw write", "notified"], rows


def _slow(result: slow_storage.Result) -> tuple[list[str], Rows]:
    """A row for each storage, with columns for both values of slow_storage."""
    by_storage: dict[str, dict[str, slow_storage.Cell]] = {}
    for cell in result.cells:
        is_off = cell.setting.startswith(slow_storage.NO_EXTRACTION)
        setting = slow_storage.FAIL if slow_storage.FAIL in cell.setting else slow_storage.WAIT
        storage = slow_storage.NO_EXTRACTION if is_off else cell.storage
        by_storage.setdefault(storage, {})[setting] = cell
    rows = []
    for storage, cells in by_storage.items():
        row = [storage]
        for setting in (slow_storage.WAIT, slow_storage.FAIL):
            if setting in cells:
                found = cells[setting]
                row += [f"{found.p99 * 1e3:,.0f} / {found.longest * 1e3:,.0f}"]
                row += [f"{found.per_second:.1f}"]
            else:
                row += ["", ""]
        failing = cells.get(slow_storage.FAIL)
        rows.append([*row, "" if failing is None else f"{failing.failed:.0%}"])
    headings = ["storage", "wait: gap", "prompts/s", "fail: gap", "prompts/s", "fail: without rows"]
    return headings, rows


def _fill(text: str) -> str:
    """Break the lines of each paragraph at 100 columns."""
    return "\n\n".join(
        textwrap.fill(each, 100, break_on_hyphens=False) for each in text.split("\n\n")
    )


def _markdown_table(headings: Sequence[str], rows: Rows) -> str:
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in (headings, *rows))
    return "\n".join([head, "|" + "---|" * len(headings), *lines])


def _machine(results: Results) -> str:
    """Return the facts that the figures depend on, in one line."""
    known = {name: results.machine.get(name, "") for name in ("processor", "memory", "kernel")}
    before, after = results.load_average
    facts = [known["processor"].removesuffix(" for this process"), known["memory"], known["kernel"]]
    if release := results.machine.get("vllm-ascend"):
        facts.append(f"vllm-ascend {release}")
    return ", ".join([*filter(None, facts), f"load average {before:.1f} to {after:.1f}"])


def _processor(results: Results) -> str:
    return results.machine["processor"].partition(",")[0].partition("(")[0].strip()


def _files_words(results: Results) -> str:
    cells = [cell for cell in results.host if cell.view == PINNED]
    slowest = min(cells, key=lambda each: each.figures[OURS].gb_per_s)
    gb = slowest.figures[OURS].gb_per_s
    how = "sharing each step" if slowest.evenly else "in flight"
    missing = [
        f" There are none on {filesystem}: {reason}."
        for filesystem, reason in results.no_durable_view.items()
    ]
    return words.FILES.format(
        cell=f"{slowest.tokens:,} tokens, {slowest.in_flight} {how}, {slowest.filesystem}",
        gb=gb,
        tokens=f"{round(gb * 1e9 / MINIMAX_M2.row_bytes, -3):,.0f}",
        missing="".join(missing),
    )


def _latency_words(results: Sequence[latency.Result]) -> str:
    longest = max(each.tokens for each in results[0].prompts)
    return words.LATENCY.format(
        tokens=longest,
        step_tokens=STEP_TOKENS,
        polled=" and ".join(f"{each.polled['p50'] * 1e3:.0f}" for each in results),
        vllm=" and ".join(f"{each.vllm[longest] * 1e3:,.0f}" for each in results),
    )


def _engine_words(result: engine.Result) -> str:
    figures = [
        f"{each.traffic}, {each.extraction}: {_range(each.requests_per_s)} ({each.cpu:.0%})"
        for each in result.cells
        if each.extraction != OFF
    ]
    return words.ENGINE.format(
        model=result.model, starts=result.starts, rounds=result.rounds, figures="; ".join(figures)
    )


def _decode_words(result: decoding.Result) -> str:
    figures = [
        f"{cell.row * 1e6:.1f} µs with {cell.in_flight} requests (a raw write {cell.raw * 1e6:.1f}"
        f" µs), and {cell.step * 1e3:.1f} ms per step instead of {cell.step_off * 1e3:.1f} ms"
        for cell in result.cells
    ]
    return words.DECODE.format(python=result.scale.python_s * 1e3, figures="; ".join(figures))


def _slow_storage_words(result: slow_storage.Result) -> str:
    needed = ", ".join(
        f"{rate / MIB:.1f} MiB/s with {setting}" for setting, rate in result.needed.items()
    )
    scale = result.scale
    return words.SLOW_STORAGE.format(
        in_flight=scale.in_flight,
        tokens=scale.tokens,
        seconds=scale.seconds,
        needed=needed,
    )


def _step_words(result: per_step.Result) -> str:
    return words.STEP.format(
        step=result.per_step * 1e6,
        launches=result.launches * 1e6,
        request=result.per_request * 1e6,
        begins=result.per_beginning * 1e6,
        slope=result.per_1000_tokens * 1e6,
    )


def _conversations_words(result: conversations.Result) -> str:
    off = result.cells[0]
    figures = [
        f"{each.name}: {each.of_off:.2f} and {each.wall_of_off:.2f}, {each.right} of {each.files} "
        "files right"
        if not each.reason
        else f"{each.name}: {each.reason}"
        for each in result.cells
        if each.files or each.reason
    ]
    return words.CONVERSATIONS.format(
        **asdict(result.scale),
        tokens=f"{off.prompt:,}",
        distinct=f"{result.distinct:,}",
        off=f"{off.computed:,}",
        figures="; ".join(figures),
    )


def _capacity_words(result: capacity.Result) -> str:
    options = result.options
    refusals = [
        f" {each.model} with {each.layout}: {each.reason}." for each in result.cells if each.reason
    ]
    return words.CAPACITY.format(
        memory=result.kv_bytes >> 30,
        tensor_parallel=options.tensor_parallel,
        length=options.max_model_len,
        step=options.max_num_batched_tokens,
        refusals="".join(refusals),
    )
