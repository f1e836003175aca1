"""The demo's output: progress of the server's start, table of results, and metrics."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_hsx.demo.metrics import Metrics
from vllm_ascend_hsx.demo.verify import Row

# Log lines of the server in order of the start, and their meaning. The last one in the log counts.
PHASES = (
    (r"^\$ ", "importing vllm and vllm-ascend"),
    (r"non-default args", "reading the configuration"),
    (r"Started DP Coordinator", "starting the engines, one per DP rank"),
    (r"Initializing a V1 LLM engine", "starting the workers, one per NPU"),
    (r"rank \d+ in world size", "connecting the workers"),
    (r"Starting to load model", "loading weights"),
    (r"Loading model weights took", "measuring the memory that is left"),
    (r"KV cache size", "warming up"),
    (r"init engine .* took", "starting the API server"),
    (r"Started server process", "waiting for the first answer"),
)
QUIET_SECONDS = 20.0


class StartProgress:
    """Show elapsed time and phase of the start: a live line on a terminal, or a line per phase."""

    def __init__(self, console: Console, log: Path, title: str) -> None:
        self._console = console
        self._log = log
        self._title = title
        self._phase = ""
        self._shown_at = -QUIET_SECONDS
        self._status = console.status(title)

    def __enter__(self) -> "StartProgress":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, elapsed: float) -> None:
        phase = phase_of(self._log)
        text = f"{self._title}: {elapsed:.0f} s, {phase}"
        self._status.update(text)
        changed = phase != self._phase
        if not self._console.is_terminal and (changed or elapsed - self._shown_at >= QUIET_SECONDS):
            self._console.print(text, highlight=False)
            self._shown_at = elapsed
        self._phase = phase


def phase_of(log: Path) -> str:
    """Return the current phase of the server that writes this log."""
    text = log.read_text(errors="replace")
    reached = [meaning for pattern, meaning in PHASES if re.search(pattern, text, re.MULTILINE)]
    return reached[-1] if reached else "starting"


def show_rows(
    console: Console, rows: Sequence[Row], layer_ids: Sequence[int], target: str = ""
) -> None:
    """Print one line per request, under a title that describes the target."""
    title = (
        f"hidden states of layers {', '.join(map(str, layer_ids))}{target} against the reference"
    )
    table = Table("#", "request", title=title, title_justify="left")
    for heading in ("tokens", "generated", "shape", "bytes", "max |difference|"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", overflow="fold")
    for number, row in enumerate(rows, start=1):
        difference = "" if math.isnan(row.max_difference) else f"{row.max_difference:.4f}"
        shape = " × ".join(map(str, row.shape))
        verdict = Text(row.verdict, "green" if row.passed else "red")
        counts = (str(row.tokens), str(row.generated or ""))
        table.add_row(
            str(number), row.request, *counts, shape, f"{row.size:,}", difference, verdict
        )
    console.print(table)


def show_metrics(console: Console, metrics: Metrics) -> None:
    """Print one line per metric and one column per engine.

    Histograms show two quantiles and the number of observations.
    """
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for each in metrics.counts:
        labels = ",".join(f'{name}="{value}"' for name, value in each.labels.items())
        cells[each.name + (f"{{{labels}}}" if labels else "")][each.engine] = _number(each.value)
    for latency in metrics.latencies:
        cells[f"{latency.name}: P50, P99, count"][latency.engine] = (
            f"{1e3 * latency.p50:.2f} ms, {1e3 * latency.p99:.2f} ms, {latency.observations:,}"
            if latency.observations
            else "none"
        )
    table = Table(title="GET /metrics, by engine (DP rank)", title_justify="left")
    table.add_column("series", no_wrap=True)
    for engine in metrics.engines:
        table.add_column(engine, justify="right")
    for name, by_engine in cells.items():
        table.add_row(name, *(by_engine.get(engine, "") for engine in metrics.engines))
    console.print(table, highlight=False, markup=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
