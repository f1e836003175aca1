"""Steps that disturb a running server: sleep, and an error of the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from vllm_ascend_hsx.demo.server import Server, group_members, wait_for_ends
from vllm_ascend_hsx.demo.tiny_models import build_qwen3
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import failure_reason
from vllm_ascend_hsx.report import workers
from vllm_ascend_hsx.report.context import Context, Sizes
from vllm_ascend_hsx.report.result import BROKE, HELD, TELL_US, Teller
from vllm_ascend_hsx.report.served import (
    EMULATED,
    END_S,
    check_rows,
    files_after_stop,
    in_flight,
    serve_options,
    serving,
)
from vllm_ascend_hsx.report.workers import Judgement

SLEEP_S = 300.0
FAST_S = 30.0  # limit for a server's end after a device error
# Texts of the device: CANN's failing operator on NPUs, or the emulator's error.
DEVICE_TEXTS = ("aclnnRmsNorm", "EZ9999")
# CANN then runs in the thread of the task queue: see WorkerProbe.hsx_fail.
QUEUE = {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "0"}
WITH_OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}


def sleep(context: Context, tell: Teller) -> None:
    """Compare rows after sleep levels 1 and 2. After level 2 the weights are loaded again.

    When it wakes up, vllm-ascend 0.23.0 changes the layout of unquantised experts' weights
    (worker/worker.py:241). vLLM's reload_weights does not use the loaders of these parameters. So a
    tiny dense model replaces a target with experts.
    """
    stands_in = ""
    if context.has_experts:
        context = replace(context, model=build_qwen3(context.files / "tiny-qwen3"))
        stands_in = ", of a tiny dense model instead of the target, which has experts"
    sizes = Sizes(min(2, context.sizes.tensor_parallel), 1, False)
    own = (EMULATED if context.emulated else ()) + workers.OPTIONS + ("--enable-sleep-mode",)
    # vllm-ascend wakes up only with this value (worker/worker.py:242 in 0.23.0).
    serve = serve_options(context, "sleep", sizes, own, additional={"weight_nz_mode": 0})
    with serving(context, "sleep", serve, **workers.ENVIRONMENT) as server:
        for line in ("awake", "sleep 1", "sleep 2"):
            if line != "awake":
                _sleep(context, server, int(line[-1]))
            check_rows(context, server, serve.layer_ids, line, tell, sizes=f"{sizes}{stands_in}")


def _sleep(context: Context, server: Server, level: int) -> None:
    """Put the server to sleep and wake it up."""
    _post(server, f"/sleep?level={level}")
    _post(server, "/wake_up?tags=weights")
    if level == 2:
        workers.call(server.url, "hsx_reload_weights", str(context.model))
    _post(server, "/wake_up?tags=kv_cache")


def _post(server: Server, path: str) -> None:
    httpx.post(f"{server.url}{path}", timeout=SLEEP_S, trust_env=False).raise_for_status()


def device_error(context: Context, tell: Teller) -> None:
    """Make an operator fail while requests run: the server ends, and files have the device's text.

    The server is started only for this step.
    """
    fault = context.output / "logs" / "device-error.fault"
    own = ("--enforce-eager", *(EMULATED if context.emulated else ()), *workers.OPTIONS)
    serve = serve_options(context, "device-error", context.least_sizes, own)
    queue = QUEUE
    if context.emulated:
        queue = {"NPU_EMULATOR_QUEUE": "1", "NPU_EMULATOR_FAIL_FILE": str(fault)}
    with serving(context, "device-error", serve, **workers.ENVIRONMENT, **queue) as server:
        assert server.process is not None
        with in_flight(server, **WITH_OUTPUT) as others:
            begun = time.monotonic()
            if context.emulated:
                fault.write_text("stack\n")
            else:
                with suppress(httpx.HTTPError):  # the server may end before it answers
                    workers.call(server.url, "hsx_fail")
            wait_for_ends(group_members(server.process.pid), END_S)
            seconds = time.monotonic() - begun
        left = len(group_members(server.process.pid))
        reasons = [
            failure_reason(path)
            for path in files_in(serve.storage)
            if path.name.endswith(ERROR_SUFFIX)
        ]
        whole, _, undecided = files_after_stop(serve.storage, [])
        judgement = judge_device_error(
            seconds, left, max(whole, _answered(others)), reasons, undecided
        )
        log = "" if judgement.outcome == HELD else server.log_tail()
        tell("device error", *judgement, log=log, seconds=seconds, reasons=dict(Counter(reasons)))


def _answered(others: Sequence[Future[Path | None]]) -> int:
    return sum(other.result() is not None for other in others)


def judge_device_error(
    seconds: float, left: int, answered: int, reasons: Sequence[str], undecided: Sequence[str]
) -> Judgement:
    """Check that the server ended soon, no request got rows, and each file has the device's text.

    Args:
        seconds: time from the error to the end of the server, or END_S.
        left: number of processes that still run.
        answered: number of requests that got an answer or a file after the error.
        reasons: reasons in the error files.
        undecided: number of files with neither rows nor a reason.
    """
    others = [reason for reason in reasons if not any(text in reason for text in DEVICE_TEXTS)]
    named = f"{len(reasons) - len(others)} of {len(reasons)} files have the device's text"
    words = f"ended after {seconds:.0f} s; {named}"
    bad = []
    if left:
        bad.append(f"{left} processes were still running after {END_S:.0f} s")
    elif seconds > FAST_S:
        bad.append(f"this exceeds {FAST_S:.0f} s")
    if answered:
        bad.append(f"{answered} requests got an answer or a file afterwards; its rows may be wrong")
    if others or not reasons:
        bad.append(f"another reason is: {others[0]}" if others else "no file has a reason")
    bad += undecided
    if bad:
        bad.append(TELL_US)
    return Judgement(BROKE if bad else HELD, "; ".join([words, *bad]))
