"""Steps with an extracting server: the demo's prompts, metrics, and the end by SIGTERM."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.demo.client import Answer, send_all
from vllm_ascend_hsx.demo.long_steps import EMULATED as LONG_EMULATED
from vllm_ascend_hsx.demo.long_steps import REAL as LONG
from vllm_ascend_hsx.demo.long_steps import Mode, agree, environment
from vllm_ascend_hsx.demo.metrics import collect
from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.demo.prompts import Prompt, demo_prompts
from vllm_ascend_hsx.demo.server import Server, free_port, group_members, wait_for_ends
from vllm_ascend_hsx.demo.target import default_layers, reference_for, remembered
from vllm_ascend_hsx.demo.verify import Reference, verify
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.find import files_in, orphaned_locks
from vllm_ascend_hsx.report import workers
from vllm_ascend_hsx.report.context import ONE, Context, DoesNotFitError, Sizes
from vllm_ascend_hsx.report.result import BROKE, HELD, NOT_RUN, Outcome, Teller

START_S = 1800.0
REQUEST_S = 120.0
END_S = 90.0  # for a server to end after SIGTERM
IN_FLIGHT = 8  # requests when the signal arrives
# An emulated NPU has no graphs to capture, and all emulated NPUs share the machine's memory.
EMULATED = ("--enforce-eager", "--gpu-memory-utilization", "0.3")


def serve_options(
    context: Context, name: str, sizes: Sizes, extra: tuple[str, ...] | None = None, **options: Any
) -> ServeOptions:
    """Return the options of a step's server; files go to a separate directory.

    Args:
        extra: words of the command line instead of EMULATED.
    """
    own = (EMULATED if context.emulated else ()) if extra is None else extra
    return ServeOptions(
        model=str(context.model),
        storage=context.files / name,
        layer_ids=default_layers(context.number("num_hidden_layers")),
        port=free_port(),
        data_parallel_size=sizes.data_parallel,
        tensor_parallel_size=sizes.tensor_parallel,
        expert_parallel=sizes.expert_parallel,
        extra=(*own, *context.serve_options),
        **options,
    )


@contextmanager
def serving(context: Context, name: str, serve: ServeOptions, **environ: str) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it at the end. Raises ServerError."""
    environment = {"PYTHONUNBUFFERED": "1", **environ}
    with Server(
        serve.command(),
        port=serve.port,
        log=context.output / "logs" / f"{name}.server.log",
        environment=environment,
    ) as server:
        server.wait_ready(START_S)
        yield server


def one_npu(context: Context, tell: Teller) -> None:
    try:
        context.require_one()
    except DoesNotFitError as error:
        tell("one NPU", NOT_RUN, str(error))
        return
    serve = serve_options(context, "one-npu", ONE)
    with serving(context, "one-npu", serve) as server:
        check_rows(context, server, serve.layer_ids, "one NPU", tell, sizes=str(ONE))


def parallel(context: Context, tell: Teller) -> None:
    sizes = context.sizes
    own = (EMULATED if context.emulated else ()) + workers.OPTIONS
    serve = serve_options(
        context, "parallel", sizes, own, sequence_parallel=sizes.tensor_parallel > 1
    )
    with serving(context, "parallel", serve, **workers.ENVIRONMENT) as server:
        answers = check_rows(context, server, serve.layer_ids, "parallel", tell)
        found = collect(server.url, REQUEST_S)
        published = round(found.total("vllm:hsx_files_total", outcome="published"))
        words = f"{published} published files for {len(answers)} answers"
        counts = [each._asdict() for each in found.counts]
        tell("metrics", HELD if published == len(answers) else BROKE, words, counts=counts)
        _tell_workers(context, server, tell)
        stop(server, serve.storage, tell)


def _tell_workers(context: Context, server: Server, tell: Teller) -> None:
    asked = workers.ask(server.url, context.sizes.npus)
    tell("contexts", *workers.contexts(asked), workers=[asdict(each) for each in asked])
    tell(
        "process table", *workers.process_table(workers.npu_smi(), context.found["npus"]["npu_smi"])
    )
    tell("cpus", *workers.cpus(asked))


def long_steps(context: Context, tell: Teller) -> None:
    """Serve eager and with graphs; compare rows with the reference, and with each other."""
    sizes = LONG_EMULATED if context.emulated else LONG
    layer_ids = default_layers(context.number("num_hidden_layers"))
    prompts, answers = sizes.prompts(context.number("vocab_size")), {}
    check = Check.of(context, remembers=True)
    for mode in Mode:
        made = sizes.serve_options(str(context.model), len(layer_ids), mode, context.emulated)
        serve = serve_options(context, mode.value, context.sizes, **made)
        with serving(context, mode.value, serve, **environment(mode, context.emulated)) as server:
            answers[mode] = check_rows(context, server, layer_ids, mode.value, tell, prompts, check)
    agreement = agree(answers[Mode.EAGER], answers[Mode.GRAPHS], layer_ids)
    outcome: Outcome = HELD if agreement.holds else BROKE
    tell(
        "agreement",
        outcome,
        str(agreement),
        generated=agreement.generated,
        max_difference=agreement.max_difference,
    )


@dataclass(frozen=True)
class Check:
    """The reference of a model, or the reason why there is none."""

    reference: Reference | None
    why_not: str = ""

    @classmethod
    def of(cls, context: Context, remembers: bool = False) -> Check:
        try:
            reference = reference_for(context.model)
        except DemoError as error:
            return cls(
                None, f" (finite and complete, not compared: {str(error).partition(';')[0]})"
            )
        return cls(remembered(reference) if remembers else reference)


def check_rows(
    context: Context,
    server: Server,
    layer_ids: Sequence[int],
    line: str,
    tell: Teller,
    prompts: Sequence[Prompt] | None = None,
    check: Check | None = None,
    sizes: str = "",
) -> list[Answer]:
    """Send prompts, by default the demo's, and compare their files with transformers.

    Args:
        line: line of the report. check: reference; by default the reference of the context's model.
        sizes: description of the server's sizes if they are not the context's.
    """
    check = check or Check.of(context)
    answers = send_all(
        server.url, prompts or demo_prompts(context.number("vocab_size")), timeout=REQUEST_S
    )
    rows = [verify(answer, layer_ids, check.reference) for answer in answers]
    passed, generated = sum(row.passed for row in rows), sum(row.generated for row in rows)
    wrong = "".join(
        f"; {row.request} of {row.tokens} tokens: {row.verdict}" for row in rows if not row.passed
    )
    sizes = sizes or str(context.sizes)
    of_output = f"with {generated} rows of generated tokens"
    words = f"{passed} of {len(rows)} requests match{check.why_not}, {of_output}, {sizes}{wrong}"
    # JSON has no NaN; here NaN marks a value that was not compared.
    table = [
        {
            **row._asdict(),
            "max_difference": None if math.isnan(row.max_difference) else row.max_difference,
        }
        for row in rows
    ]
    data = {
        "passed": passed,
        "requests": len(rows),
        "generated": generated,
        "compared": check.reference is not None,
        "rows": table,
    }
    tell(
        line,
        HELD if passed == len(rows) else BROKE,
        words,
        log="" if passed == len(rows) else server.log_tail(),
        **data,
    )
    return answers


def stop(server: Server, storage: Path, tell: Teller) -> None:
    """Send SIGTERM once requests generate. Every file must be complete or have an error file."""
    assert server.process is not None
    with in_flight(server) as others:
        begun = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for_ends(group_members(server.process.pid), END_S)
    paths = [path for other in others if (path := other.result()) is not None]
    seconds = time.monotonic() - begun
    left = len(group_members(server.process.pid))
    whole, failed, bad = files_after_stop(storage, paths)
    words = (
        f"ended after {seconds:.0f} s; {whole} complete files, {failed} with a reason "
        "for missing rows"
    )
    if left:
        bad.insert(0, f"{left} processes were still running after {END_S:.0f} s")
    log = server.log_tail() if bad else ""
    tell(
        "stop",
        BROKE if bad else HELD,
        "; ".join([words, *bad]),
        log=log,
        seconds=seconds,
        whole=whole,
        failed=failed,
    )


@contextmanager
def in_flight(server: Server, **more: Any) -> Iterator[list[Future[Path | None]]]:
    """Send requests with long generations. Yield the paths of their files once one generates.

    Afterwards wait until the server has answered or ended.

    Args:
        more: further fields of the requests.
    """
    with (
        httpx.Client(base_url=server.url, timeout=REQUEST_S, trust_env=False) as client,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "prompt": [4] * 40, "max_tokens": 256, "ignore_eos": True, **more}
        others = [
            pool.submit(_ask, client, {**body, "prompt": [5 + index] * (40 + index)})
            for index in range(IN_FLIGHT)
        ]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            reply.raise_for_status()
            next(line for line in reply.iter_lines() if line.startswith("data:"))  # it generates
            yield others


def files_after_stop(storage: Path, answered: Sequence[Path]) -> tuple[int, int, list[str]]:
    """Return the numbers of complete and of failed files, and any problems.

    Args:
        answered: files named in the server's answers.
    """
    files = files_in(storage)
    found = [examine(path) for path in files if not path.name.endswith(ERROR_SUFFIX)]
    bad = [f"{each.path.name}: {each.problem}" for each in found if each.problem is not None]
    lost = [
        path for path in answered if not (path.exists() or Path(f"{path}{ERROR_SUFFIX}").exists())
    ]
    bad += [f"{path.name}: answered, but neither complete nor failed" for path in lost]
    bad += [f"{path.name}: a lock without a file" for path in orphaned_locks(storage)]
    return sum(each.problem is None for each in found), len(files) - len(found), bad


def _ask(client: httpx.Client, body: dict[str, Any]) -> Path | None:
    """Return the path of the answer's file, or None if the server ended first."""
    try:
        reply = client.post("/v1/completions", json=body).raise_for_status().json()
    except httpx.HTTPError:
        return None
    path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
    return None if path is None else Path(path)
