"""`hsx demo --loop`: from a target to drafts that a server accepts, on emulated NPUs."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.emulator.launch import environment

Give = Callable[[Mapping[str, Any], Callable[[Console], None]], None]
NEEDED = ("speculators", "hs_connectors", "datasets")
HBM_BYTES = 2 << 30  # memory of one emulated NPU
# What else `hsx demo` offers is of another target, or of other servers.
EXCLUDED = (
    "device", "model", "quantized", "layers", "data_parallel_size", "tensor_parallel_size", "no_expert_parallel",
    "no_sequence_parallel", "no_reference", "long_steps", "late",
)  # fmt: skip


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options that say nothing here. Exits with code 2 and one line."""
    if not options.loop:
        if options.seeds is not None:
            parser.error("--seeds is for --loop")
        return
    for name in EXCLUDED:
        if getattr(options, name) != parser.get_default(name):
            parser.error(
                "--loop trains and serves a target of its own: leave out "
                f"--{name.replace('_', '-')}"
            )
    if options.serve_options:
        parser.error("--loop serves with options of its own: leave out what is after --")


def run(options: argparse.Namespace, console: Console, give: Give) -> int:
    """Run the loop and return an exit code: 0 if right rows make better drafts than wrong ones.

    Args:
        console: for progress.
        give: prints the result, given for --json, and by a function.
    """
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise DemoError(
            f"not installed here: {', '.join(missing)}, which trains the drafts; `make setup` "
            "installs it"
        )
    from httpx import HTTPError
    from openai import OpenAIError

    from vllm_ascend_hsx.demo.loop.results import table
    from vllm_ascend_hsx.demo.loop.run import Loop, plan_of

    work = (options.output or Path(tempfile.mkdtemp(prefix="hsx-demo-loop-"))).absolute()
    console.print(
        f"everything is in {work}; call again with --output {work} to go on there",
        highlight=False,
        soft_wrap=True,
    )
    loop = Loop(
        work,
        console,
        emulated=lambda npus: environment(npus=npus, hbm_bytes=HBM_BYTES),
        start_timeout=options.start_timeout or 600.0,
        request_timeout=options.request_timeout,
        plan=plan_of(options.seeds or 1),
    )
    try:
        results = loop.run()
    except (OpenAIError, HTTPError, OSError) as error:
        raise DemoError(f"a step of the loop failed: {error}") from error
    problems = results.problems()

    def show(console: Console) -> None:
        console.print(table(results))
        for problem in problems:
            console.print(problem, style="red", markup=False, highlight=False)
        if not problems:
            console.print(
                (
                    "rows of hsx generate make as good a draft as those of transformers, and wrong "
                    "rows a worse one"
                ),
                style="green",
            )

    give({"ok": not problems, "problems": problems, **asdict(results)}, show)
    return 1 if problems else 0
