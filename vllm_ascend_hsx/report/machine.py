"""Steps without a server: software, NPUs, copies to pinned memory, and the storage directory."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from vllm_ascend_hsx.report.context import Context, DoesNotFitError, choose_sizes, weight_bytes
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, Teller

NPU_SMI_S = 30.0
COPIED = 256 << 20
COPIED_EMULATED = 32 << 20
REPEATS = 10


def software(context: Context, tell: Teller) -> None:
    from vllm_ascend_hsx.compat.installed import require_checked
    from vllm_ascend_hsx.compat.versions import IncompatibleVersionError
    from vllm_ascend_hsx.doctor.software import check_software

    findings = list(check_software())
    problems = [f"{each.name}: {each.found}. {each.what_to_do}" for each in findings if each.verdict == "problem"]
    words = "; ".join(problems) or ", ".join(f"{each.name} {each.found}" for each in findings if each.name not in ("NPUs", "plugin"))
    tell("software", BROKE if problems else HELD, words, **{each.name: each.found for each in findings})
    from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations

    try:
        require_checked(False)
    except IncompatibleVersionError as error:
        tell("patch points", BROKE, "they differ from every checked release", log=str(error))
    else:
        tell("patch points", HELD, "as in a checked release")


def _npu() -> Any:
    import torch
    import torch_npu  # noqa: F401 - brings torch.npu

    return torch.npu  # type: ignore[attr-defined]


def npus(context: Context, tell: Teller) -> None:
    npu = _npu()
    found = []
    for index in range(npu.device_count()):
        npu.set_device(index)
        free, total = npu.mem_get_info(index)
        found.append({"name": npu.get_device_name(index), "free": free, "total": total})
    if not found:
        for line in ("npus", "sizes"):
            tell(line, BROKE, "torch.npu finds none: look at `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES")
        return
    least = min(each["free"] for each in found)
    words = f"{len(found)} x {found[0]['name']}, at least {least / 2**30:.2f} of {found[0]['total'] / 2**30:.2f} GiB free"
    tell("npus", MEASURED, words, npus=found, npu_smi=_npu_smi())
    weights = weight_bytes(context.model)
    try:
        sizes = choose_sizes(context.config, weights, len(found), least, context.tensor_parallel, context.data_parallel)
    except DoesNotFitError as error:
        tell("sizes", BROKE, str(error))
    else:
        tell("sizes", MEASURED, f"{sizes} for weights of {weights / 2**30:.2f} GiB", **sizes._asdict())


def _npu_smi() -> str:
    program = shutil.which("npu-smi")
    if program is None:
        return "not on PATH"
    try:
        done = subprocess.run([program, "info"], capture_output=True, text=True, errors="replace", timeout=NPU_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {NPU_SMI_S:.0f} s"
    return done.stdout or done.stderr


def copies(context: Context, tell: Teller) -> None:
    """Copy as the plugin does: asynchronously, on a stream of its own, to pinned memory."""
    import torch

    npu = _npu()
    npu.set_device(0)
    size = min(COPIED_EMULATED if context.emulated else COPIED, npu.mem_get_info(0)[0] // 4)
    expected = torch.randint(0, 256, (size,), dtype=torch.uint8)
    device, host = expected.to("npu:0"), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = npu.Stream(device="npu:0")
    npu.synchronize()

    def rate(copy: Callable[[], object], num_bytes: int) -> float:
        copy()  # warms up
        stream.synchronize()
        begun = time.perf_counter()
        for _ in range(REPEATS):
            copy()
        stream.synchronize()
        return REPEATS * num_bytes / (time.perf_counter() - begun)

    with npu.stream(stream):
        to_host = rate(lambda: host.copy_(device, non_blocking=True), size)
        small = rate(lambda: host[: 1 << 20].copy_(device[: 1 << 20], non_blocking=True), 1 << 20)
        right = bool(torch.equal(host, expected))
        to_device = rate(lambda: device.copy_(host, non_blocking=True), size)
    words = f"{_gb(to_host)} to the host in pieces of {size >> 20} MiB, {_gb(small)} in pieces of 1 MiB; {_gb(to_device)} to the NPU"
    figures = {"to_host": to_host, "to_host_1mib": small, "to_device": to_device, "piece": size}
    tell("copies", HELD if right else BROKE, words if right else f"the copy differs from what the NPU has; {words}", **figures)


def storage(context: Context, tell: Teller) -> None:
    from vllm_ascend_hsx.doctor.storage import WRITTEN, check_storage
    from vllm_ascend_hsx.doctor.target import stored_format
    from vllm_ascend_hsx.sinks.data_file import FileOptions

    written = WRITTEN >> 3 if context.emulated else WRITTEN
    findings = list(check_storage(context.files, FileOptions(), stored_format(str(context.model)), written))
    problems = [f"{each.name}: {each.found}. {each.what_to_do}" for each in findings if each.verdict == "problem"]
    named = {each.name: each.found for each in findings}
    words = "; ".join(problems) or ", ".join(named[key] for key in ("filesystem", "write speed"))
    tell("storage", BROKE if problems else HELD, words, **named)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
