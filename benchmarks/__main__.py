"""`python -m benchmarks`: measure, print the tables, write docs/performance.md, .json and .png.

Without torch_npu it runs itself on one emulated NPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT
from vllm_ascend_hsx.doctor.storage import filesystem_of

PARTS = ("host", "latency", "engine", "step", "decode", "slow_storage", "conversations", "capacity")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one minute instead of ten; writes only with --output",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="run only these parts (default: all)",
    )
    parser.add_argument(
        "--conversations",
        type=int,
        metavar="N",
        help="number of conversations in that part (default: 200, with --quick 8)",
    )
    parser.add_argument(
        "--memory",
        type=Path,
        default=Path("/dev/shm"),
        metavar="DIR",
        help="directory on a tmpfs (default: %(default)s)",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="directory on a disk (default: the system's temporary directory)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="output directory (default: docs/, with all parts)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="update an existing report: other parts stay unchanged",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write page and pictures again from the recorded figures; measure nothing",
    )
    arguments = parser.parse_args(argv)
    arguments.memory, arguments.disk = (
        arguments.memory.resolve(),
        arguments.disk.resolve(),
    )  # child processes have other current directories
    if (
        arguments.output is None
        and not arguments.quick
        and (arguments.merge or arguments.page or set(arguments.parts) == set(PARTS))
    ):
        arguments.output = ROOT / "docs"
    return arguments


def run(arguments: argparse.Namespace) -> int:
    import torch
    import torch_npu  # noqa: F401 - brings torch.npu
    from rich.console import Console

    from benchmarks import machine, report
    from benchmarks.goals import Results
    from benchmarks.kv_cache import capacity
    from benchmarks.pipeline import (
        conversations,
        decoding,
        engine,
        host_path,
        latency,
        per_step,
        slow_storage,
    )
    from benchmarks.pipeline.ours import ring_bytes
    from benchmarks.pipeline.rows import MINIMAX_M2, Source, npu

    if arguments.page:
        for path in report.write_again(arguments.output):
            print(f"written: {path}")
        return 0
    before = None
    if (
        arguments.merge and arguments.output is not None
    ):  # read it first: an unreadable file must not cost the measurements
        before = report.written_before(arguments.output, arguments.parts)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # removes directories and processes, too
    console = Console()
    began = time.monotonic()

    def show(text: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {text}", highlight=False, soft_wrap=True)

    device = torch.device("npu:0")
    npu().set_device(device)
    directories = list(dict.fromkeys((arguments.memory, arguments.disk)))
    load = machine.load_average()
    cells: list[host_path.Cell] = []
    refusals: dict[str, str] = {}
    latencies: list[latency.Result] = []
    host_scale = host_path.QUICK if arguments.quick else host_path.FULL
    latency_scale = latency.QUICK if arguments.quick else latency.FULL
    if {"host", "latency"} & set(arguments.parts):
        # More than the longest request, and more than the caches hold.
        source = Source(MINIMAX_M2, max(host_scale.longest, *latency_scale.tokens) + 1024, device)
    for directory in directories if "host" in arguments.parts else ():
        found, refusal = host_path.run(host_scale, source, directory, show)
        cells += found
        if refusal is not None:
            refusals[filesystem_of(directory)] = refusal
    for directory in directories if "latency" in arguments.parts else ():
        latencies.append(latency.run(latency_scale, source, directory, show))
    steps = None
    if "step" in arguments.parts:
        steps = per_step.run(
            per_step.QUICK if arguments.quick else per_step.FULL, arguments.memory, device, show
        )
    decode = None
    if "decode" in arguments.parts:
        rows = Source(MINIMAX_M2, max(2048, *decoding.FULL.in_flight), device)
        decode = decoding.run(
            decoding.QUICK if arguments.quick else decoding.FULL, rows, arguments.memory, show
        )
    engines = None
    if "engine" in arguments.parts:
        engines = engine.run(
            engine.QUICK if arguments.quick else engine.FULL, arguments.memory, show
        )
    slow = None
    if "slow_storage" in arguments.parts:
        slow = slow_storage.run(
            slow_storage.QUICK if arguments.quick else slow_storage.FULL, arguments.memory, show
        )
    talk = None
    if "conversations" in arguments.parts:
        scale = conversations.QUICK if arguments.quick else conversations.FULL
        if arguments.conversations is not None:
            scale = replace(scale, conversations=arguments.conversations)
        talk = conversations.run(scale, arguments.memory, show)
    capacities = None
    if "capacity" in arguments.parts:  # last: it patches vLLM in this process
        logging.getLogger("vllm").setLevel(logging.WARNING)  # vLLM logs every plan
        capacities = capacity.run(show)
    loads = (load, machine.load_average())
    results = Results(
        machine.describe(),
        loads,
        ring_bytes(),
        cells,
        refusals,
        latencies,
        engines,
        steps,
        slow,
        capacities,
        talk,
        decode,
    )
    report.show(console, results)
    if before is not None:
        results = report.merge(results, before, arguments.parts)
    if arguments.output is not None:
        for path in report.write(results, arguments.output):
            console.print(f"written: {path}")
    return 0


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # as `make benchmark`: OpenMP would wait for our writers at barriers
    if find_spec("torch_npu") is None:
        from ascend_npu_emulator.launch import main as emulate

        return emulate(["--npus", "1", "--", sys.executable, "-m", "benchmarks", *argv])
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
