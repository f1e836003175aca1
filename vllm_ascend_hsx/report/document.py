"""The report as Markdown, for pasting into an issue, and as JSON."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, Result
from vllm_ascend_hsx.report.steps import STEPS, Line, rows_run

NAME = "hardware-report"
CHECKLIST_ROWS = 28
SERVERS = {"off": "no extraction", "hsx": "vllm-ascend-hsx", "vllm": "vLLM's connector"}
LINES: dict[str, Line] = {line.key: line for step in STEPS for line in step.lines}


def write(context: Context, results: Sequence[Result]) -> tuple[Path, Path]:
    """Write both files and return their paths, Markdown first."""
    paths = (context.output / f"{NAME}.md", context.output / f"{NAME}.json")
    content = {
        "version": __version__,
        "model": context.model.name,
        "emulated": context.emulated,
        "serve_options": list(context.serve_options),
        "lines": [asdict(result) for result in results],
    }
    for path, text in zip(
        paths,
        (markdown(context, results), json.dumps(content, indent=2, default=str) + "\n"),
        strict=True,
    ):
        path.write_text(anonymous(text, context), encoding="utf-8")
    return paths


def anonymous(text: str, context: Context) -> str:
    """Return a text without this machine's name and directories."""
    hidden = {
        str(context.output): "OUTPUT",
        str(context.model.parent): "MODELS",
        os.path.expanduser("~"): "~",
    }
    for found in sorted(hidden, key=len, reverse=True):
        text = text.replace(found, hidden[found]) if len(found) > 1 else text
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)


def markdown(context: Context, results: Sequence[Result]) -> str:
    """Return the report for people."""
    count = Counter(result.outcome for result in results)
    summary = ", ".join(
        f"{count[outcome]} {outcome}" for outcome in (HELD, MEASURED, BROKE, NOT_RUN)
    )
    blocks = [
        f"# Hardware report of vllm-ascend-hsx {__version__}",
        f"Model `{context.model.name}`. Lines: {summary}.",
        *(
            ["**The NPUs are emulated on a CPU: no speed here applies to hardware.**"]
            if context.emulated
            else []
        ),
        _table(
            ("line", "", "found", "checklist"),
            [
                (LINES[each.line].what, each.outcome, each.found, _listed(LINES[each.line].rows))
                for each in results
            ],
        ),
        *_figures({result.line: result.data for result in results}),
        _left_over(),
        *_details(context, results),
    ]
    return "\n\n".join(blocks) + "\n"


def _figures(data: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of the three servers, as far as measured."""
    measured = {name: data[name] for name in SERVERS if data.get(name)}
    if not measured:
        return []
    rows = []
    for name, found in measured.items():
        for traffic, figures in found.items():
            base = measured.get("off", {}).get(traffic)
            share = f"{figures['requests_per_s'] / base['requests_per_s']:.1%}" if base else ""
            tokens = data.get(f"KV cache, {name}", {}).get("tokens")
            speeds = (
                f"{figures['requests_per_s']:,.2f}",
                share,
                f"{figures['prompt_tokens_per_s']:,.0f}",
                f"{figures['step_ms']:,.2f}",
            )
            rows.append((SERVERS[name], traffic, *speeds, "" if tokens is None else f"{tokens:,}"))
    head = (
        "extraction",
        "traffic",
        "requests/s",
        "of none",
        "prompt tokens/s",
        "ms per step",
        "KV cache, tokens",
    )
    return ["## Throughput", _table(head, rows)]


def _left_over() -> str:
    left = [row for row in range(1, CHECKLIST_ROWS + 1) if row not in rows_run()]
    return f"Rows of docs/operations.md that this command does not run: {_listed(left)}."


def _details(context: Context, results: Sequence[Result]) -> list[str]:
    found = []
    smi = next((result.data["npu_smi"] for result in results if "npu_smi" in result.data), None)
    logs = [(LINES[result.line].what, result.log) for result in results if result.log]
    for title, text in [*([("npu-smi info", smi)] if smi else []), *logs]:
        fence = "````" if "```" in text else "```"
        found.append(
            f"<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>"
        )
    return found


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; line breaks and bars are removed from cells."""
    lines = [
        head,
        ["---"] * len(head),
        *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
