"""The results as tables on the terminal, as JSON, as docs/performance.md and as a plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
from benchmarks.pipeline.host_path import COPIED, DIRECT, DURABLY, OURS, PINNED, RAW, VLLM, Cell
from benchmarks.pipeline.rows import MINIMAX_M2, STEP_TOKENS

Rows = list[list[str]]
TABLE = tuple[str, list[str], Rows]  # title, headings, rows

WIDTH = 160  # of what goes to a file or a pipe
NAME, COST = "performance", "cost"
# The page is headed by the machine that its longest part was measured on.
_OF_HOST = ("host", "no_durable_view", "machine", "load_average", "ring_bytes")
_NOTHING = Results({}, (0.0, 0.0), 0, [], {}, [], None, None, None, None, None)


def tables(results: Results) -> list[TABLE]:
    """What is shown, in this order."""
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
    rows = [[each.goal, each.measured, each.met, each.limit] for each in judge(results)]
    return "goals", ["goal", "measured", "met", "limit measured"], rows


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
    """What was written there before, without these parts, which may have another form now.

    Raises OSError, or ValidationError if another part cannot be read.
    """
    return _read(
        directory / f"{NAME}.json", {name: getattr(_NOTHING, name) for name in _fields(parts)}
    )


def merge(results: Results, before: Results, parts: Sequence[str]) -> Results:
    """What was written before, with these parts as they were measured now."""
    return replace(before, **{name: getattr(results, name) for name in _fields(parts)})


def _fields(parts: Sequence[str]) -> set[str]:
    return {name for part in parts for name in (_OF_HOST if part == "host" else (part,))}


def _read(path: Path, instead: Mapping[str, Any] = MappingProxyType({})) -> Results:
    """The results in a file, with other ones in some fields. Raises as `written_before`."""
    fields = {
        **dict.fromkeys(Results.__dataclass_fields__),
        **json.loads(path.read_text()),
        **instead,
    }
    return TypeAdapter(Results).validate_python(fields)


def write(results: Results, directory: Path) -> list[Path]:
    """Write performance.json, two pictures and performance.md; returns their paths.

    The page has the goals of other machines, too: each performance-*.json there is a copy of one's.
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


def markdown(results: Results, others: Mapping[str, Results]) -> str:
    """docs/performance.md; `others` are those of other machines, by the name of their file."""
    found = {title: _markdown_table(headings, rows) for title, headings, rows in tables(results)}
    parts = [
        words.HEAD,
        f"![what extraction costs, beside a server without it and vLLM's connector]({COST}.png)",
    ]
    parts += [
        found.pop(cost_table(results)[0]),
        words.COST,
        words.MACHINE.format(machine=_machine(results)),
    ]
    parts += ["## Goals", found.pop("goals"), f"![the figures as a plot]({NAME}.png)"]
    for name, other in others.items():
        _, headings, rows = goals_table(other)
        parts += [
            f"## Goals on {other.machine['processor'].partition(',')[0]}",
            words.OTHER.format(file=name, machine=_machine(other)),
        ]
        parts += [_markdown_table(headings, rows), *_slowest(other)]
    parts += ["## What is measured", words.METHOD]
    for view in (PINNED, COPIED, DURABLY):
        if mine := [title for title in found if title.startswith(f"{view}: ")]:
            parts += [
                f"## Path to the file: {view}",
                words.VIEWS[view],
                *(_slowest(results) if view == PINNED else ()),
            ]
            for title in mine:
                parts += [f"**{title.removeprefix(f'{view}: ')}**", found.pop(title)]
    for filesystem, reason in results.no_durable_view.items():
        parts.append(f"There is no durable view on {filesystem}: {reason}.")
    for each in results.latency:
        parts += [
            f"## Latency on {each.filesystem}",
            _latency_words(each),
            found.pop(latency_table(each)[0]),
        ]
    if results.engine is not None:
        parts += [
            "## Engine",
            _engine_words(results.engine),
            found.pop(engine_table(results.engine)[0]),
        ]
    if results.step is not None:
        parts += [
            "## Main thread",
            _step_words(results.step),
            found.pop(step_table(results.step)[0]),
        ]
    if results.decode is not None:
        parts += [
            "## Generated tokens",
            _decode_words(results.decode),
            found.pop(decode_table(results.decode)[0]),
        ]
    if results.slow_storage is not None:
        table = found.pop(slow_storage_table(results.slow_storage)[0])
        parts += ["## Slow storage", _slow_storage_words(results.slow_storage), table]
    if results.conversations is not None:
        table = found.pop(conversations_table(results.conversations)[0])
        parts += ["## Conversations", _conversations_words(results.conversations), table]
    if results.capacity is not None:
        parts += [
            "## KV cache",
            _capacity_words(results.capacity),
            found.pop(capacity_table(results.capacity)[0]),
        ]
    assert not found, found.keys()
    return "\n\n".join(parts) + "\n"


def _markdown_table(headings: Sequence[str], rows: Rows) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(results: Results) -> str:
    facts = [f"* {name}: {value}" for name, value in results.machine.items()]
    before, after = results.load_average
    return "\n".join(
        [*facts, f"* load average at the beginning and at the end: {before:.1f}, {after:.1f}"]
    )


def _slowest(results: Results) -> list[str]:
    """What the slowest cell of the first view means for a server; empty if it was not measured."""
    cells = [cell for cell in results.host if cell.view == PINNED]
    if not cells:
        return []
    cell = min(cells, key=lambda each: each.figures[OURS].gb_per_s)
    tokens = round(cell.figures[OURS].gb_per_s * 1e9 / MINIMAX_M2.row_bytes, -3)
    how = (
        f"{cell.tokens:,} tokens, {cell.in_flight} {'evenly' if cell.evenly else 'in flight'}, "
        f"{cell.filesystem}"
    )
    return [words.SLOWEST.format(cell=how, gb=cell.figures[OURS].gb_per_s, tokens=f"{tokens:,.0f}")]


def _latency_words(result: latency.Result) -> str:
    vllm = ", ".join(
        f"{seconds * 1e3:,.0f} ms for {tokens:,} tokens" for tokens, seconds in result.vllm.items()
    )
    return words.LATENCY.format(
        told=_p50_p99(result.told),
        bare=_p50_p99(result.bare_told),
        polled=_p50_p99(result.polled),
        vllm=vllm,
        step_tokens=STEP_TOKENS,
    )


def _engine_words(result: engine.Result) -> str:
    return f"{result.model}.\n{words.ENGINE.format(off=OFF, starts=result.starts, rounds=result.rounds)}"


def _decode_words(result: decoding.Result) -> str:
    scale = result.scale
    return words.DECODE.format(python=scale.python_s * 1e3, steps=scale.steps, rounds=scale.rounds)


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
        machine=result.machine,
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
    tokens = f"{result.cells[0].prompt:,}"
    return words.CONVERSATIONS.format(
        **asdict(result.scale),
        tokens=tokens,
        distinct=f"{result.distinct:,}",
        machine=result.machine,
    )


def _capacity_words(result: capacity.Result) -> str:
    options = result.options
    refused = [each for each in result.cells if each.reason]
    lines = [
        f"{each.layout.capitalize()} does not start for {each.model}: {each.reason}."
        for each in refused
    ]
    refusals = "".join(f"\n{textwrap.fill(line, 100)}" for line in lines)
    return words.CAPACITY.format(
        memory=result.kv_bytes >> 30,
        tensor_parallel=options.tensor_parallel,
        length=options.max_model_len,
        step=options.max_num_batched_tokens,
        refusals=refusals,
    )
