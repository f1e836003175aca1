"""The table of steps: lines of the report, and the rows of the checklist that they verify."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of the report.

    Attributes:
        key: name in the JSON file.
        what: subject, in words.
        rows: rows of docs/operations.md that it verifies on NPUs.
    """

    key: str
    what: str
    rows: tuple[int, ...] = ()


class Step(NamedTuple):
    """Lines that one separate process measures.

    Attributes:
        name: name for `--steps`.
        title: description of the activity.
        work: `module:function` in this package, called with a Context and a Teller.
        limit_s: time limit in seconds on NPUs; loading a large model takes most of it.
        lines: lines of the report, in order.
        needs: lines that must exist before it can run.
    """

    name: str
    title: str
    work: str
    limit_s: float
    lines: tuple[Line, ...]
    needs: tuple[str, ...] = ()


STEPS = (
    Step(
        "software",
        "checking versions and patch points",
        "machine:software",
        600.0,
        (
            Line("software", "versions, CANN, driver and plugin"),
            Line("patch points", "patch points in vllm and vllm-ascend"),
        ),
    ),
    Step(
        "environment",
        "checking the environment",
        "machine:environment",
        60.0,
        (Line("environment", "environment variables and page size"),),
    ),
    Step(
        "npus",
        "checking the NPUs",
        "machine:npus",
        300.0,
        (Line("npus", "NPUs and their free memory"), Line("sizes", "sizes of the servers")),
    ),
    Step(
        "copies",
        "copying to pinned memory",
        "transfers:copies",
        300.0,
        (
            Line("copies", "bandwidth to pinned memory"),
            Line("copies of all", "bandwidth to pinned memory of all NPUs at once", (22,)),
        ),
        ("npus",),
    ),
    Step(
        "pinned",
        "pinning memory",
        "transfers:pinned",
        60.0,
        (Line("pinned", "pinned memory, requested and used", (23,)),),
        ("npus",),
    ),
    Step(
        "storage",
        "writing a file",
        "machine:storage",
        300.0,
        (Line("storage", "storage directory and its write speed"),),
    ),
    Step(
        "direct",
        "writing a file from pinned memory",
        "transfers:direct",
        300.0,
        (Line("direct", "O_DIRECT from pinned memory", (11,)),),
        ("npus",),
    ),
    Step(
        "one-npu",
        "serving with extraction on one NPU",
        "served:one_npu",
        2700.0,
        (Line("one NPU", "rows of 16 prompts on one NPU", (1,)),),
        ("sizes",),
    ),
    Step(
        "parallel",
        "serving with extraction, DP x TP with sequence parallelism",
        "served:parallel",
        3600.0,
        (
            Line("parallel", "rows of 16 prompts, DP x TP", (2, 3, 5)),
            Line("metrics", "GET /metrics counts every file"),
            Line("contexts", "each worker has a context only on its own NPU", (24,)),
            Line("process table", "no process is on two NPUs, by npu-smi", (24,)),
            Line("cpus", "CPUs and NUMA nodes of the workers", (24,)),
            Line("stop", "SIGTERM while requests run", (12,)),
        ),
        ("sizes",),
    ),
    Step(
        "long-steps",
        "serving with steps of 8,192 tokens, eager and with graphs",
        "served:long_steps",
        5400.0,
        (
            Line("eager", "rows of long prompts and 33 generated tokens or more, eager", (21,)),
            Line(
                "graphs", "rows of long prompts and 33 generated tokens or more, with graphs", (21,)
            ),
            Line("agreement", "rows with graphs equal rows of eager steps", (21,)),
        ),
        ("sizes",),
    ),
    Step(
        "sleep",
        "sleeping and waking up",
        "drills:sleep",
        3600.0,
        (
            Line("awake", "rows of 16 prompts in sleep mode"),
            Line("sleep 1", "rows of 16 prompts after sleep level 1", (26,)),
            Line(
                "sleep 2", "rows of 16 prompts after sleep level 2 and weights loaded again", (26,)
            ),
        ),
        ("sizes",),
    ),
    Step(
        "device-error",
        "making an operator fail while requests run",
        "drills:device_error",
        2700.0,
        (
            Line(
                "device error",
                "a failing operator ends the server, with its text in each file",
                (27,),
            ),
        ),
        ("sizes",),
    ),
    Step(
        "profile",
        "profiling steps of 8,192 tokens",
        "profile:profile",
        3600.0,
        (
            Line(
                "profile", "Stack kernels, and overlap of copies with kernels, in a profile", (28,)
            ),
        ),
        ("sizes",),
    ),
    Step(
        "off",
        "measuring a server without extraction",
        "throughput:off",
        2700.0,
        (
            Line("off", "throughput without extraction"),
            Line("KV cache, off", "KV cache without extraction"),
        ),
        ("sizes",),
    ),
    Step(
        "hsx",
        "measuring a server with extraction",
        "throughput:hsx",
        2700.0,
        (
            Line("hsx", "throughput with extraction"),
            Line("KV cache, hsx", "KV cache with extraction"),
            Line("threads", "CPU time of the plugin's threads", (25,)),
            Line("plain", "rows of 16 prompts without sequence parallelism", (9,)),
        ),
        ("sizes",),
    ),
    Step(
        "vllm",
        "measuring a server with vLLM's own connector",
        "throughput:vllm",
        2700.0,
        (
            Line("vllm", "throughput with vLLM's own connector"),
            Line("KV cache, vllm", "KV cache with vLLM's own connector"),
        ),
        ("sizes",),
    ),
    Step(
        "plan",
        "comparing with `hsx plan`",
        "throughput:plan",
        60.0,
        (Line("plan", "remaining KV cache, compared with `hsx plan`"),),
        ("KV cache, off", "KV cache, hsx"),
    ),
)


def rows_run() -> dict[int, str]:
    """Return the rows of docs/operations.md that the command runs, with their steps."""
    return {row: step.name for step in STEPS for line in step.lines for row in line.rows}
