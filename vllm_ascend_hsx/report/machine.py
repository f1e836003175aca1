"""Steps without a server: software, environment, NPUs, and the storage directory."""

from __future__ import annotations

import os
import re

from vllm_ascend_hsx.report.context import Context, DoesNotFitError, choose_sizes, weight_bytes
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, Teller
from vllm_ascend_hsx.report.transfers import npu
from vllm_ascend_hsx.report.workers import npu_smi

# Variables that change the behaviour of torch_npu, CANN and HCCL.
PREFIXES = (
    "ASCEND_LAUNCH_BLOCKING", "HCCL_", "LD_PRELOAD", "PER_STREAM_QUEUE", "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
)  # fmt: skip
SLOW = (
    (
        "ASCEND_LAUNCH_BLOCKING",
        "1",
        "operators run one at a time, so copies do not overlap. Unset it",
    ),
    ("TASK_QUEUE_ENABLE", "0", "the main thread launches each operator itself. Unset it"),
)


def software(context: Context, tell: Teller) -> None:
    from vllm_ascend_hsx.compat.installed import require_checked
    from vllm_ascend_hsx.compat.versions import IncompatibleVersionError
    from vllm_ascend_hsx.doctor.software import check_software

    findings = list(check_software())
    problems = [
        f"{each.name}: {each.found}. {each.what_to_do}"
        for each in findings
        if each.verdict == "problem"
    ]
    words = "; ".join(problems) or ", ".join(
        f"{each.name} {each.found}" for each in findings if each.name not in ("NPUs", "plugin")
    )
    tell(
        "software",
        BROKE if problems else HELD,
        words,
        **{each.name: each.found for each in findings},
    )
    from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations

    try:
        require_checked(False)
    except IncompatibleVersionError as error:
        tell("patch points", BROKE, "they differ from every checked release", log=str(error))
    else:
        tell("patch points", HELD, "as in a checked release")


def environment(context: Context, tell: Teller) -> None:
    """Report settings that change the behaviour of torch_npu, CANN and HCCL."""
    found = {
        name: _shown(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES)
    }
    listed = " ".join(f"{name}={value}" for name, value in found.items()) or "none of the variables"
    page = os.sysconf("SC_PAGE_SIZE")
    words = f"{listed}; pages of {page >> 10} KiB"
    slow = [
        f"{name}={os.environ[name]}: {why}"
        for name, value, why in SLOW
        if os.environ.get(name) == value
    ]
    tell(
        "environment",
        BROKE if slow else MEASURED,
        "; ".join([*slow, words]),
        variables=found,
        page=page,
    )


def _shown(name: str, value: str) -> str:
    """Return a value without addresses and directories."""
    return "(set)" if name.endswith(("_IP", "_IFNAME")) else re.sub(r"[^\s:]*/", "", value)


def npus(context: Context, tell: Teller) -> None:
    found = []
    for index in range(npu().device_count()):
        npu().set_device(index)
        free, total = npu().mem_get_info(index)
        found.append({"name": npu().get_device_name(index), "free": free, "total": total})
    if not found:
        for line in ("npus", "sizes"):
            tell(
                line,
                BROKE,
                "torch.npu finds no NPU: check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES",
            )
        return
    least = min(each["free"] for each in found)
    words = (
        f"{len(found)} x {found[0]['name']}, at least {least / 2**30:.2f} of "
        f"{found[0]['total'] / 2**30:.2f} GiB free"
    )
    tell("npus", MEASURED, words, npus=found, npu_smi=npu_smi() or "not on PATH")
    weights = weight_bytes(context.model)
    try:
        sizes = choose_sizes(
            context.config,
            weights,
            len(found),
            least,
            context.tensor_parallel,
            context.data_parallel,
        )
    except DoesNotFitError as error:
        tell("sizes", BROKE, str(error))
    else:
        tell(
            "sizes",
            MEASURED,
            f"{sizes} for weights of {weights / 2**30:.2f} GiB",
            **sizes._asdict(),
        )


def storage(context: Context, tell: Teller) -> None:
    from vllm_ascend_hsx.doctor.storage import WRITTEN, check_storage
    from vllm_ascend_hsx.doctor.target import stored_format
    from vllm_ascend_hsx.sinks.data_file import FileOptions

    written = WRITTEN >> 3 if context.emulated else WRITTEN
    findings = list(
        check_storage(context.files, FileOptions(), stored_format(str(context.model)), written)
    )
    problems = [
        f"{each.name}: {each.found}. {each.what_to_do}"
        for each in findings
        if each.verdict == "problem"
    ]
    named = {each.name: each.found for each in findings}
    words = "; ".join(problems) or ", ".join(named[key] for key in ("filesystem", "write speed"))
    tell("storage", BROKE if problems else HELD, words, **named)
