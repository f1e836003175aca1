"""`hsx demo --serve`: serve until interrupted, and print example commands."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from vllm_ascend_hsx.demo.report import StartProgress
from vllm_ascend_hsx.demo.server import Server

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a river.",
    "Name three prime numbers.",
)


class Commands(NamedTuple):
    """Shell commands that work with a server as they are."""

    curl: str
    python: str
    generate: str


def commands(url: str, model: str, work: Path) -> Commands:
    """Return commands for a server.

    Args:
        url: URL of the server, without /v1.
        model: served name of the model.
        work: directory with prompts.jsonl and the directory hidden_states.
    """
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 1}
    program = (
        "from openai import OpenAI; from vllm_ascend_hsx import load; "
        f"client = OpenAI(base_url='{url}/v1', api_key='none'); "
        f"response = client.completions.create(model={model!r}, prompt={PROMPTS[0]!r}, "
        "max_tokens=1); "
        "states = load(response.kv_transfer_params['hidden_states_path'], timeout=60); "
        "print(states.layer_ids, states.hidden_states.shape)"
    )
    hsx = str(Path(sys.executable).with_name("hsx"))
    output = str(work / "hidden_states" / "generated")
    return Commands(
        shlex.join(
            [
                "curl",
                "-s",
                f"{url}/v1/completions",
                "-H",
                "Content-Type: application/json",
                "-d",
                json.dumps(body),
            ]
        ),
        shlex.join([sys.executable, "-c", program]),
        shlex.join(
            [
                hsx,
                "generate",
                "--endpoint",
                f"{url}/v1",
                "--data",
                str(work / "prompts.jsonl"),
                "--output",
                output,
            ]
        ),
    )


def write_prompts(work: Path) -> None:
    """Write the data set for the `hsx generate` command."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )


def show(console: Console, found: Commands) -> None:
    """Print the commands, each below a comment with the name."""
    for name, line in found._asdict().items():
        console.print(f"\n# {name}", highlight=False)
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def serve_until_interrupted(
    console: Console, server: Server, title: str, start_s: float, announce: Callable[[], None]
) -> None:
    """Start the server, and serve until this process is interrupted.

    Args:
        console: console for progress.
        server: a server that has not been started.
        title: description of the server.
        start_s: seconds for the start.
        announce: called when the server answers.

    Raises:
        ServerError: the server did not start, or has ended.
        KeyboardInterrupt: the user interrupted it.
    """
    with server:
        with StartProgress(console, server.log, title) as progress:
            seconds = server.wait_ready(start_s, progress)
        console.print(f"{title}: answers after {seconds:.0f} s. Ctrl-C stops it.", highlight=False)
        announce()
        server.wait(lambda: None)
        server.check_running()
