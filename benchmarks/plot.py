"""Draw the pictures of docs/performance.md: the costs of extraction, and the detailed figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cost import COMPUTED, KEPT, MEMORY, SERVED, Cost, costs, in_words
from benchmarks.goals import MIB, Results
from benchmarks.pipeline.host_path import COPIED, OURS, PINNED, VLLM, VLLM_REUSING, Cell

OURS_COLOUR, PEER_COLOUR, LIMIT_COLOUR, OTHER_COLOUR = "#1f6fb4", "#c8553d", "#7a7a7a", "#e0a458"
_GOAL = {"color": LIMIT_COLOUR, "linestyle": "--", "linewidth": 1}


def draw(results: Results, cost: Path, details: Path) -> None:
    """Write both pictures as PNG. Panels whose part was not measured stay empty."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 4, figsize=(17, 4.6), layout="constrained", width_ratios=(5, 2, 1.2, 1.2)
    )
    found = costs(results)
    for kind, axis in zip(_COSTS, axes.flat, strict=True):
        _cost(axis, kind, [each for each in found if each.kind == kind])
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    figure.savefig(cost, dpi=110)
    pyplot.close(figure)
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    panels = (_of_raw, _of_vllm, _memory, _latency, _engine, _steps)
    for panel, axis in zip(panels, axes.flat, strict=True):
        panel(axis, results)
    figure.savefig(details, dpi=110)
    pyplot.close(figure)


_COSTS = {
    KEPT: "KV cache kept (more is better)",
    SERVED: "requests per second (more is better)",
    COMPUTED: "prompt tokens computed\n(less is better)",
    MEMORY: "host memory, MiB\n(less is better)",
}


def _cost(axis: Any, kind: str, found: list[Cost]) -> None:
    """Draw bars of one kind of cost per case: extraction off, ours, vLLM's connector."""
    contestants = (
        ("extraction off", "off", LIMIT_COLOUR),
        ("ours", "ours", OURS_COLOUR),
        ("vLLM's connector", "vllm", PEER_COLOUR),
    )
    for offset, (label, attribute, colour) in enumerate(contestants):
        places = [index + 0.28 * (offset - 1) for index in range(len(found))]
        values = [getattr(each, attribute) for each in found]
        scale = {KEPT: 100.0, SERVED: 100.0, COMPUTED: 1.0, MEMORY: 1 / MIB}[kind]
        axis.bar(
            places, [scale * (value or 0) for value in values], 0.26, color=colour, label=label
        )
        for place, each, value in zip(places, found, values, strict=True):
            axis.text(
                place,
                scale * (value or 0),
                in_words(each, value).replace(" ", "\n"),
                ha="center",
                va="bottom",
                fontsize=6.5,
            )
    axis.set_xticks(
        range(len(found)),
        [each.case.replace(" of rows", "\nof rows").replace("-Instruct", "") for each in found],
        fontsize=7,
    )
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.set_title(_COSTS[kind], fontsize=10)


def _lines(
    axis: Any, cells: list[Cell], name: str, attribute: str, colour: str, scale: float
) -> None:
    """Draw a line per filesystem and requests in flight, over the length of the requests."""
    styles = {True: "-", False: ":"}
    filesystems = sorted({cell.filesystem for cell in cells})
    for filesystem in filesystems:
        for in_flight in sorted({cell.in_flight for cell in cells}):
            chosen = [
                cell
                for cell in cells
                if (cell.filesystem, cell.in_flight) == (filesystem, in_flight)
                and name in cell.figures
            ]
            if chosen:
                axis.plot(
                    [cell.tokens for cell in chosen],
                    [scale * getattr(cell.figures[name], attribute) for cell in chosen],
                    styles[filesystem == filesystems[0]],
                    marker="o",
                    markersize=3 + 0.6 * len(bin(in_flight)),
                    color=colour,
                    alpha=0.8,
                    label=f"{name}, {filesystem}"
                    if in_flight == min(cell.in_flight for cell in cells)
                    else None,
                )


def _token_axis(axis: Any, title: str, label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set(title=title, xlabel="tokens per request (larger dot: more in flight)", ylabel=label)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _of_raw(axis: Any, results: Results) -> None:
    cells = [cell for cell in results.host if cell.view == PINNED and not cell.evenly]
    _lines(axis, cells, OURS, "of_raw", OURS_COLOUR, 100)
    _lines(axis, cells, VLLM, "of_raw", PEER_COLOUR, 100)
    axis.set_ylim(bottom=0)
    _token_axis(axis, "from pinned memory: speed against a raw write", "% of raw write")


def _of_vllm(axis: Any, results: Results) -> None:
    cells = [cell for cell in results.host if cell.view == COPIED]
    _lines(axis, cells, OURS, "of_vllm", OURS_COLOUR, 1)
    _lines(axis, cells, "raw write", "of_vllm", LIMIT_COLOUR, 1)
    axis.set_ylim(bottom=0)
    _token_axis(axis, "with the copy: speed against vLLM 0.33's path", "times as fast")


def _memory(axis: Any, results: Results) -> None:
    cells = [cell for cell in results.host if cell.view == COPIED]
    for name, colour in ((OURS, OURS_COLOUR), (VLLM, PEER_COLOUR), (VLLM_REUSING, OTHER_COLOUR)):
        points = sorted(
            (cell.num_bytes * cell.in_flight / cell.requests / MIB, cell.figures[name].rss / MIB)
            for cell in cells
        )
        axis.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            "o",
            color=colour,
            label=name,
        )
    axis.set(
        title="with the copy: host memory",
        xlabel="MiB of rows in flight",
        ylabel="MiB above the start",
    )
    axis.grid(alpha=0.3)
    if cells:
        axis.legend(fontsize=8)


def _latency(axis: Any, results: Results) -> None:
    if results.latency:
        result = results.latency[0]
        labels = [f"{each.tokens:,}\n{each.last_chunk:,}" for each in result.prompts]
        for offset, (name, colour, label) in enumerate(
            (
                ("from_host", OURS_COLOUR, "last row → published"),
                ("from_step", OTHER_COLOUR, "end of step → published"),
                ("raw", LIMIT_COLOUR, "raw write of the last chunk"),
            )
        ):
            places = [index + 0.27 * (offset - 1) for index in range(len(labels))]
            axis.bar(
                places,
                [each.quantiles[name]["p50"] * 1e3 for each in result.prompts],
                0.25,
                color=colour,
                label=label,
            )
        axis.set_xticks(range(len(labels)), labels)
        axis.axhline(1, **_GOAL)
        axis.set_yscale("log")
        axis.set_ylim(top=20 * axis.get_ylim()[1])  # for the legend
        axis.legend(fontsize=8, loc="upper left")
        axis.set(
            title=f"latency on {result.filesystem} (p50)",
            xlabel="tokens of the prompt, of its last chunk",
            ylabel="ms",
        )


def _engine(axis: Any, results: Results) -> None:
    if results.engine is not None:
        cells = results.engine.cells
        for offset, (attribute, label, colour) in enumerate(
            (("speed", "requests/s", OURS_COLOUR), ("cpu", "CPU time per step", OTHER_COLOUR))
        ):
            places = [index + 0.36 * (offset - 0.5) for index in range(len(cells))]
            axis.bar(
                places,
                [100 * getattr(cell, attribute) for cell in cells],
                0.34,
                color=colour,
                label=label,
            )
        axis.set_xticks(
            range(len(cells)), [f"{cell.traffic}\n{cell.extraction}" for cell in cells], fontsize=7
        )
        axis.set_ylim(top=150)
        axis.legend(fontsize=8, loc="upper left")
        axis.set(title="engine on the emulated NPU", ylabel="% of the engine without extraction")


def _steps(axis: Any, results: Results) -> None:
    if results.step is not None:
        for in_flight in sorted({cell.in_flight for cell in results.step.cells}):
            cells = [
                cell
                for cell in results.step.cells
                if cell.in_flight == in_flight and cell.going_on is not None
            ]
            if cells:
                costs = [1e6 * (cell.going_on or 0) for cell in cells]
                axis.plot(
                    [cell.tokens for cell in cells], costs, "o-", label=f"{in_flight} in flight"
                )
        axis.set_ylim(bottom=0)
        _token_axis(axis, "main thread: a step in which no request begins", "µs of CPU time")
        axis.set_xlabel("tokens per request")
