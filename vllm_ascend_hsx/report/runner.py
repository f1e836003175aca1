"""Run a step in a separate process with a time limit, and leave no process of it running."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from vllm_ascend_hsx.demo.server import LAST_LINES, wait_for_ends
from vllm_ascend_hsx.report.result import BROKE, Result, read_told
from vllm_ascend_hsx.report.steps import Step

STOP_S = 40.0  # for a step to stop the server: demo.server gives the server 25 s
KILL_S = 10.0
TAIL_LINES = 25
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # prctl(2)


@contextmanager
def subreaper() -> Iterator[None]:
    """Become the parent of orphaned descendants, to keep track of all of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


def run_step(
    step: Step,
    command: Sequence[str],
    told: Path,
    log: Path,
    limit_s: float | None = None,
    stop_s: float = STOP_S,
) -> list[Result]:
    """Run a step's process and return a result for each line of the step.

    At the time limit the process gets SIGTERM. Once it has ended, or after
    `stop_s` seconds, the remaining processes are killed. Call it within `subreaper`.

    Args:
        command: command line of the process. It appends results to `told` (a Teller).
        log: file for the output.
        limit_s: limit in place of the step's.
    """
    limit = step.limit_s if limit_s is None else limit_s
    before = descendants(os.getpid())
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    problem = ""
    try:
        code = process.wait(limit)
        if code:
            problem = f"the step ended with {_ending(code)}"
    except subprocess.TimeoutExpired:
        problem = f"the step was stopped at its limit of {limit:.0f} s"
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(stop_s)
        left = _kill(before)
        process.wait()
    if left and not problem:
        problem = f"the step left {left} processes running; they were killed"
    results, reason = read_told(told)
    head, _, rest = reason.partition(f"\n{LAST_LINES}")  # of a server's log
    reasons = (head.replace("\n", "; "), "" if reason and "limit" not in problem else problem)
    return _complete(step, results, "; ".join(filter(None, reasons)), rest or _tail(log))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def _complete(step: Step, results: Sequence[Result], problem: str, tail: str) -> list[Result]:
    """Return a result for each line of the step, in order."""
    found = {result.line: result for result in results}
    reason = problem or "the step ended without a result for it"
    missing = [line.key for line in step.lines if line.key not in found]
    # Only one line has the log: it is the same for the others.
    found |= {
        key: Result(key, BROKE, reason, log=tail if key == missing[0] else "") for key in missing
    }
    if problem and not missing:  # all was measured, but the end was not clean
        last = step.lines[-1].key
        found[last] = replace(
            found[last], found=f"{found[last].found}; {problem}", outcome=BROKE, log=tail
        )
    return [found[line.key] for line in step.lines]


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def descendants(pid: int) -> set[int]:
    """Return the running descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _kill(spared: set[int]) -> int:
    """Kill all descendants of this process except `spared`; return their number."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_S
    # They can start others before the signal arrives, hence the loop.
    while (left := descendants(os.getpid()) - spared) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for_ends(sorted(left), deadline - time.monotonic())
        killed |= left
    for pid in killed:
        with suppress(ChildProcessError):  # a child of another process
            os.waitpid(pid, os.WNOHANG)
    return len(killed)
