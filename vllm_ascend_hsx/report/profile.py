"""Profile steps with extraction: Stack kernels, and copies that overlap other kernels."""

from __future__ import annotations

import csv
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from vllm_ascend_hsx.demo.client import send_all
from vllm_ascend_hsx.demo.long_steps import REAL, Mode
from vllm_ascend_hsx.demo.target import default_layers
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, MEASURED, NOT_RUN, Teller
from vllm_ascend_hsx.report.served import REQUEST_S, serve_options, serving
from vllm_ascend_hsx.report.workers import Judgement

ANALYSIS_S = 1800.0  # limit for the profiler to write files
# torch_npu/profiler/analysis/prof_common_func/_csv_headers.py and _constant.py, 2.10.0.post4.
KERNELS = "kernel_details.csv"
TRACE = "trace_view.json"
# ops-math's aclnnStack launches a kernel of type Pack.
STACKS = ("Pack", "Stack")
MEMCPY = "MEMCPY_ASYNC"
_US = 1e-6


class Span(NamedTuple):
    """Time range of a kernel or a copy, in seconds."""

    begin: float
    end: float


def profile(context: Context, tell: Teller) -> None:
    """Profile steps of 8,192 tokens. Answers have no generated rows: these steps are short."""
    if context.emulated:
        tell("profile", NOT_RUN, "not measured here: the emulated NPU has no profiler")
        return
    directory = context.output / "logs" / "profile"
    layer_ids = default_layers(context.number("num_hidden_layers"))
    made = REAL.serve_options(str(context.model), len(layer_ids), Mode.EAGER, emulated=False)
    profiler = json.dumps(
        {
            "profiler": "torch",
            "torch_profiler_dir": str(directory),
            "torch_profiler_with_stack": False,
        }
    )
    made["extra"] += ("--profiler-config", profiler)
    prompts = [
        prompt._replace(max_tokens=1) for prompt in REAL.prompts(context.number("vocab_size"))
    ]
    with serving(
        context, "profile", serve_options(context, "profile", context.sizes, **made)
    ) as server:
        send_all(server.url, prompts, timeout=REQUEST_S)  # warms up
        for verb in ("start", "stop"):
            httpx.post(
                f"{server.url}/{verb}_profile", timeout=ANALYSIS_S, trust_env=False
            ).raise_for_status()
            if verb == "start":
                send_all(server.url, prompts, timeout=REQUEST_S)
    tell("profile", *judge(directory))


def judge(directory: Path) -> Judgement:
    """Count the Stack kernels of all ranks, and measure copies and their overlap with kernels.

    Args:
        directory: directory of the profiler's files.
    """
    kernels = sorted(directory.rglob(KERNELS))
    if not kernels:
        return Judgement(BROKE, f"the profiler wrote no {KERNELS}: check the server's log")
    stacks, words = 0, []
    for path in kernels:
        types = read_kernels(path)
        found = sum(len(spans) for kind, spans in types.items() if kind.startswith(STACKS))
        stacks += found
        busy = merge(span for spans in types.values() for span in spans)
        copies = read_copies(path.with_name(TRACE))
        seconds = sum(span.end - span.begin for span in copies)
        beside = sum(overlap(span, busy) for span in copies)
        share = (
            f"{beside / seconds:.0%} of it overlapped with kernels"
            if seconds
            else f"no {MEMCPY} in {TRACE}, so overlap is not measured"
        )
        words.append(f"{found} Stack kernels, {1e3 * seconds:,.1f} ms of copies, {share}")
    if not stacks:
        words.append(
            f"no kernel of a type {' or '.join(STACKS)}: CANN stacks rows in another "
            f"way; paste the types in {KERNELS} into an issue"
        )
    return Judgement(MEASURED if stacks else BROKE, "; ".join(words))


def read_kernels(path: Path) -> dict[str, list[Span]]:
    """Return the spans of kernels by type, from kernel_details.csv."""
    types: dict[str, list[Span]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            types.setdefault(row["Type"], []).append(
                _span(row["Start Time(us)"], row["Duration(us)"])
            )
    return types


def read_copies(path: Path) -> list[Span]:
    """Return the spans of copies between NPU and host, from trace_view.json."""
    events: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return [
        _span(each["ts"], each["dur"])
        for each in events
        if each.get("ph") == "X" and each.get("name") == MEMCPY
    ]


def _span(start: str | float, duration: str | float) -> Span:
    begin = float(start) * _US
    return Span(begin, begin + float(duration) * _US)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans as disjoint ranges, ascending."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def overlap(span: Span, busy: Sequence[Span]) -> float:
    """Return the seconds of `span` in `busy`, a result of merge."""
    first = max(0, bisect_right(busy, span) - 1)
    total = 0.0
    for each in busy[first:]:
        if each.begin >= span.end:
            break
        total += max(0.0, min(span.end, each.end) - max(span.begin, each.begin))
    return total
