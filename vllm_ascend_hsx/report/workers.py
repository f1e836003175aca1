"""Checks of a running server's workers: contexts, npu-smi, CPUs and threads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from vllm_ascend_hsx.report.probe import EXTENSION, Worker
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, TELL_US, Outcome

OPTIONS = ("--worker-extension-cls", EXTENSION)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # for POST /collective_rpc
NPU_SMI_S = 30.0
CALL_S = 600.0  # mostly for loading weights
_NODES = Path("/sys/devices/system/node")
# | NPU  Chip | Process id | Process name | Process memory(MB) |
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|[^|]*\|\s*\d+\s*\|\s*$", re.MULTILINE)


class Judgement(NamedTuple):
    """Outcome and description of a line."""

    outcome: Outcome
    found: str


def ask(url: str, npus: int) -> list[Worker]:
    """Return the server's workers, ordered by NPU.

    Args:
        url: URL of a server with OPTIONS and ENVIRONMENT.
        npus: expected number of workers.

    Raises:
        HTTPError: the server did not answer.
        ValueError: another number of workers answered.
    """
    with tempfile.TemporaryDirectory(prefix="hsx-workers-") as directory:
        call(url, "hsx_describe", directory)
        found = [Worker(**json.loads(path.read_text())) for path in Path(directory).iterdir()]
    if len(found) != npus:
        raise ValueError(f"{len(found)} workers described themselves, but the server has {npus}")
    return sorted(found, key=lambda worker: (worker.npu, worker.pid))


def call(url: str, method: str, *arguments: str) -> None:
    """Call a method of WorkerProbe in every worker of a server. Raises HTTPError."""
    asked = {"method": method, "args": list(arguments)}
    httpx.post(
        f"{url}/collective_rpc", json=asked, timeout=CALL_S, trust_env=False
    ).raise_for_status()


def contexts(workers: Sequence[Worker]) -> Judgement:
    """Check that each worker has a context only on its own NPU."""
    if any(worker.contexts is None for worker in workers):
        return Judgement(NOT_RUN, "not measured here: this torch_npu has no _npu_hasPrimaryContext")
    wrong = [worker for worker in workers if worker.contexts != [worker.npu]]
    if not wrong:
        return Judgement(HELD, f"{len(workers)} workers, each with a context only on its own NPU")
    words = "; ".join(
        f"the worker of NPU {each.npu} has contexts on NPUs {_listed(each.contexts or [])}"
        for each in wrong
    )
    return Judgement(
        BROKE,
        f"{words}: one of its threads uses the device without torch.npu.set_device; {TELL_US}",
    )


def npu_smi() -> str | None:
    """Return the output of `npu-smi info`, or None without this program."""
    program = shutil.which("npu-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "info"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NPU_SMI_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {NPU_SMI_S:.0f} s"
    return done.stdout or done.stderr


def process_table(output: str | None, before: str) -> Judgement:
    """Check that no process is on two NPUs.

    Args:
        output: output of `npu-smi info` while the server runs.
        before: the same before the server's start; processes in it are not the server's.
    """
    if output is None:
        return Judgement(NOT_RUN, "not measured here: npu-smi is not on PATH")
    others = set(_processes(before))
    chips = {pid: on for pid, on in _processes(output).items() if pid not in others}
    if not chips:
        return Judgement(
            NOT_RUN,
            "not measured here: npu-smi shows no process of the server (in a container it may not)",
        )
    twice = {pid: on for pid, on in chips.items() if len(on) > 1}
    if not twice:
        return Judgement(HELD, f"{len(chips)} processes, each on one NPU")
    words = "; ".join(f"process {pid} is on {len(on)} NPUs" for pid, on in twice.items())
    return Judgement(
        BROKE,
        f"{words}: each takes memory intended for the KV cache of another rank; {TELL_US}",
    )


def _processes(output: str) -> dict[int, set[tuple[int, int]]]:
    """Return (NPU, chip) of each process in the process table of `npu-smi info`."""
    chips: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for npu, chip, pid in _PROCESS.findall(output):
        chips[int(pid)].add((int(npu), int(chip)))
    return dict(chips)


def cpus(workers: Sequence[Worker]) -> Judgement:
    """Check that a worker has no more writers than CPUs."""
    least = min(workers, key=lambda worker: len(worker.cpus))
    nodes = {worker.npu: _nodes_of(worker.cpus) for worker in workers}
    where = "; ".join(
        f"NPU {npu}: NUMA node {_listed(found)}" for npu, found in nodes.items() if found
    )
    writers = max(worker.threads.get("hsx-writer", 1) for worker in workers)
    words = f"at least {len(least.cpus)} CPUs for a worker with {writers} writers" + (
        f"; {where}" if where else ""
    )
    if writers <= max(2, len(least.cpus)):
        return Judgement(HELD, words)
    remedy = "set num_writer_threads lower, or give vllm-ascend's CPU binding more CPUs"
    return Judgement(
        BROKE, f"{words}: with more writers than CPUs they compete with the main thread; {remedy}"
    )


def _nodes_of(cpus: Sequence[int], root: Path = _NODES) -> list[int]:
    """Return the NUMA nodes of these CPUs."""
    wanted = set(cpus)
    listed = {
        int(path.parent.name[4:]): path.read_text() for path in root.glob("node[0-9]*/cpulist")
    }
    return sorted(node for node, text in listed.items() if wanted & _cpu_list(text))


def _cpu_list(text: str) -> set[int]:
    """Parse a list of CPUs such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def threads(
    before: Sequence[Worker], after: Sequence[Worker], copied: float, seconds: float
) -> tuple[Judgement, dict[str, float]]:
    """Check that our threads use CPU only for the bytes, without spinning.

    Args:
        before, after: the same workers before and after the traffic.
        copied: bytes of rows in the traffic. seconds: duration.

    Returns:
        The judgement, and CPU seconds per GiB of each group of threads.
    """
    used: dict[str, float] = defaultdict(float)
    busiest = 0.0
    for first, last in zip(before, after, strict=True):
        spent = {
            group: took - first.cpu_seconds.get(group, 0.0)
            for group, took in last.cpu_seconds.items()
        }
        busiest = max(
            busiest,
            sum(took for group, took in spent.items() if group.startswith("hsx-")) / seconds,
        )
        for group, took in spent.items():
            used[group] += took
    if not copied:
        return Judgement(BROKE, "no rows were copied"), {}
    per_gib = {group: took / (copied / 2**30) for group, took in sorted(used.items())}
    ours = ", ".join(
        f"{group} {took:.2f}" for group, took in per_gib.items() if group.startswith("hsx-")
    )
    words = f"CPU seconds per GiB: {ours}; the threads of a worker keep {busiest:.2f} CPUs busy"
    if busiest <= 1.0:
        return Judgement(MEASURED, words), per_gib
    return Judgement(
        BROKE,
        f"{words}, more than one: they wait for copies by spinning; {TELL_US}",
    ), per_gib


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
