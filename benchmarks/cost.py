"""Costs of extraction: the figures of the first table and picture of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.goals import MIB, Results
from benchmarks.kv_cache import capacity
from benchmarks.pipeline import conversations, engine
from benchmarks.pipeline.host_path import COPIED, OURS, VLLM

KEPT = "KV cache kept"
SERVED = "requests per second"
COMPUTED = "prompt tokens computed"
MEMORY = "host memory"


@dataclass(frozen=True)
class Cost:
    """A cost of extraction: without it, with our connector and with vLLM's connector.

    Attributes:
        kind: KEPT, SERVED, COMPUTED or MEMORY. case: the model or the traffic.
        off, ours, vllm: shares of `off`; MEMORY in bytes. None: does not start, or was not
            measured.
        remark: an addition to the figure of vLLM's connector.
    """

    kind: str
    case: str
    off: float
    ours: float
    vllm: float | None
    remark: str = ""


def costs(results: Results) -> list[Cost]:
    """Return every cost that was measured."""
    return [
        *_kept(results.capacity),
        *_served(results.engine),
        *_computed(results.conversations),
        *_memory(results),
    ]


def in_words(cost: Cost, value: float | None) -> str:
    """Return a figure as in the table."""
    if value is None:
        return "does not start" if cost.kind == KEPT else "not measured"
    if cost.kind == MEMORY:
        return f"{value / MIB:,.0f} MiB"
    return f"{value:.2f} ×" if cost.kind == COMPUTED else f"{value:.1%}"


def _kept(result: capacity.Result | None) -> list[Cost]:
    cells = {
        (cell.model, cell.layout): cell for cell in (result.cells if result is not None else [])
    }
    found = []
    for model in dict.fromkeys(model for model, _ in cells):
        ours, vllm = cells.get((model, "hsx")), cells.get((model, "upstream"))
        if ours is not None:
            kept = vllm.kept if vllm is not None and not vllm.reason else None
            found.append(Cost(KEPT, model.rpartition("/")[2], 1.0, ours.kept, kept))
    return found


def _served(result: engine.Result | None) -> list[Cost]:
    cells = {
        (cell.traffic, cell.extraction): cell.speed
        for cell in (result.cells if result is not None else [])
    }
    traffics = dict.fromkeys(traffic for traffic, _ in cells)
    return [
        Cost(SERVED, each, 1.0, cells[each, engine.OURS], cells.get((each, engine.VLLM)))
        for each in traffics
    ]


def _computed(result: conversations.Result | None) -> list[Cost]:
    cells = {cell.name: cell for cell in (result.cells if result is not None else [])}
    if conversations.OURS not in cells:
        return []
    ours, vllm = cells[conversations.OURS], cells[conversations.VLLM]
    remark = (
        f"{vllm.right} of {vllm.files} files right"
        if vllm.files and vllm.right < vllm.files
        else ""
    )
    return [
        Cost(
            COMPUTED,
            "conversations",
            1.0,
            ours.of_off,
            None if vllm.reason else vllm.of_off,
            remark,
        )
    ]


def _memory(results: Results) -> list[Cost]:
    cells = [cell for cell in results.host if cell.view == COPIED]
    if not cells:
        return []
    most = max(cells, key=lambda cell: cell.figures[VLLM].rss)
    ours = results.ring_bytes + max(cell.figures[OURS].rss for cell in cells)
    rows = most.num_bytes * most.in_flight / most.requests / MIB
    return [
        Cost(
            MEMORY,
            f"{rows:,.0f} MiB of rows in flight",
            0.0,
            ours,
            most.figures[VLLM].rss,
            "grows with the rows in flight",
        )
    ]


def table(found: Sequence[Cost]) -> list[list[str]]:
    """Return rows of the first table: name, off, ours, vLLM's connector."""
    return [
        [
            f"{each.kind}, {each.case}",
            in_words(each, each.off),
            in_words(each, each.ours),
            _with_remark(each),
        ]
        for each in found
    ]


def _with_remark(cost: Cost) -> str:
    return in_words(cost, cost.vllm) + (f" ({cost.remark})" if cost.remark else "")
