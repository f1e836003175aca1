"""Serve a target once, send prompts, and compare the files of the answers with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from httpx import HTTPError
from openai import OpenAIError
from rich.console import Console

from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.demo.client import Answer, AnswerError, send_all
from vllm_ascend_hsx.demo.metrics import Metrics, collect
from vllm_ascend_hsx.demo.prompts import Prompt
from vllm_ascend_hsx.demo.report import StartProgress, show_metrics, show_rows
from vllm_ascend_hsx.demo.server import STOP_SECONDS, Server
from vllm_ascend_hsx.demo.verify import Reference, Row, verify


@dataclass(frozen=True)
class Check:
    """Settings of the check.

    Attributes:
        layer_ids: ids given to the server.
        reference: None to check only shapes, token ids and finiteness.
        start_s, request_s: limits in seconds for the server's start, and for one request.
        counted: True if /metrics must count a published file for each answer.
    """

    layer_ids: Sequence[int]
    reference: Reference | None
    start_s: float
    request_s: float
    counted: bool


class Served(NamedTuple):
    """The answers of a server. `metrics` is None unless counts are checked."""

    answers: list[Answer]
    rows: list[Row]
    metrics: Metrics | None


class Consoles(NamedTuple):
    """The consoles for the result and for progress."""

    result: Console
    progress: Console


def serve_and_show(
    consoles: Consoles, server: Server, title: str, prompts: Sequence[Prompt], check: Check
) -> tuple[Served, bool]:
    """Serve once and show the table. Return the answers, and True if everything is right.

    Raises:
        DemoError: the server did not start, or a request failed.
    """
    console = consoles.result
    served = _serve(consoles.progress, server, title, prompts, check)
    show_rows(console, served.rows, check.layer_ids)
    published = len(served.answers)
    if served.metrics is not None:
        show_metrics(console, served.metrics)
        published = round(served.metrics.total("vllm:hsx_files_total", outcome="published"))
        if published != len(served.answers):
            console.print(
                f"/metrics counts {published} files for {len(served.answers)} answers", style="red"
            )
    passed, count = sum(row.passed for row in served.rows), len(served.rows)
    good = "match" if check.reference else "are finite and complete (not compared)"
    console.print(
        f"{passed} of {count} requests {good}",
        style="green" if passed == count else "red",
        highlight=False,
    )
    return served, passed == count and published == len(served.answers)


def _serve(
    console: Console, server: Server, title: str, prompts: Sequence[Prompt], check: Check
) -> Served:
    with server:
        try:
            with StartProgress(console, server.log, title) as progress:
                seconds = server.wait_ready(check.start_s, progress)
            console.print(f"{title}: answers after {seconds:.0f} s", highlight=False)
            with console.status(f"sending {len(prompts)} prompts"):
                answers = send_all(server.url, prompts, timeout=check.request_s)
            with console.status("comparing with transformers"):
                rows = [verify(answer, check.layer_ids, check.reference) for answer in answers]
            return Served(
                answers, rows, collect(server.url, check.request_s) if check.counted else None
            )
        except (OpenAIError, AnswerError, HTTPError, OSError) as error:
            raise DemoError(f"a request failed: {error}\n{server.log_tail()}") from error
        finally:
            with console.status(f"stopping the server (up to {STOP_SECONDS:.0f} s)"):
                server.stop()
