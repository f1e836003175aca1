"""Describe a worker's process from inside: `--worker-extension-cls` adds it to vLLM's worker.

vLLM's worker class gets the methods below from a base class. If VLLM_SERVER_DEV_MODE=1, POST
/collective_rpc calls them in the main thread of every worker, between two steps.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

EXTENSION = f"{__name__}.WorkerProbe"
_NUMBER = re.compile(r"-\d+$")
OTHERS = "others"  # threads not started by Python, or not ours


@dataclass(frozen=True)
class Worker:
    """A worker's process.

    Attributes:
        npu: index of the NPU that the main thread has set.
        contexts: indices of the NPUs with a context of this process; None if torch_npu has no such
            query.
        cpus: CPUs that the main thread may run on.
        cpu_seconds: CPU time of the process so far, by group of threads: `hsx-writer-3` is in
            `hsx-writer`.
        threads: number of threads of each group.
    """

    pid: int
    npu: int
    contexts: list[int] | None
    cpus: list[int]
    cpu_seconds: dict[str, float]
    threads: dict[str, int]


class WorkerProbe:
    """Methods for vLLM's worker."""

    def hsx_describe(self, directory: str) -> None:
        """Write a Worker as JSON to `directory`/PID.json."""
        path = Path(directory) / f"{os.getpid()}.json"
        path.write_text(json.dumps(asdict(this_worker())))

    def hsx_fail(self) -> None:
        """Launch an operator that fails asynchronously. Nothing is launched on the NPU.

        op-plugin compares only the ranks of the input shapes (8b9c8534, RmsNormKernelOpApi.cpp:24,
        KernelNpuOutputSize.cpp:1737). CANN refuses the shapes on the host (ops-nn 9.0.0,
        rms_norm_tiling.cpp:152). With TASK_QUEUE_ENABLE=2 this happens in the thread of the task
        queue (op_api_common.h:365).
        """
        import torch
        import torch_npu

        torch_npu.npu_rms_norm(torch.ones(8, 64, device="npu"), torch.ones(48, device="npu"))

    def hsx_reload_weights(self, path: str) -> None:
        """Load the weights from the directory `path`."""
        from vllm_ascend_hsx.compat.weights import reload_weights

        reload_weights(self, path)


def this_worker() -> Worker:
    """Describe this process."""
    import torch
    import torch_npu

    npu = torch.npu  # type: ignore[attr-defined]
    has_context = getattr(torch_npu._C, "_npu_hasPrimaryContext", None)
    contexts = (
        None
        if has_context is None
        else [index for index in range(npu.device_count()) if has_context(index)]
    )
    seconds, threads = cpu_of_threads()
    return Worker(
        os.getpid(),
        npu.current_device(),
        contexts,
        sorted(os.sched_getaffinity(0)),
        seconds,
        threads,
    )


def cpu_of_threads() -> tuple[dict[str, float], dict[str, int]]:
    """Return CPU seconds and number of this process's threads, by group."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = defaultdict(float)
    threads: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            # proc_pid_stat(5): utime and stime are fields 14 and 15; comm may contain spaces.
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        group = _group(names.get(int(task.name), ""))
        seconds[group] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        threads[group] += 1
    return dict(seconds), dict(threads)


def _group(name: str) -> str:
    if name == "MainThread":
        return "main"
    return _NUMBER.sub("", name) if name.startswith("hsx-") else OTHERS
