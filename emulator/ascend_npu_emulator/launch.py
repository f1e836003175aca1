"""`npu-emulate`: run a command with emulated Ascend NPUs by setting environment variables."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_npu_emulator.settings import (
    SOCS,
    SettingError,
    Settings,
    parse_flag,
    parse_npus,
    parse_size,
    parse_soc,
)

SITE = Path(__file__).parent / "site"
MACHINES = (1 << 40) - 1  # largest machine number (csrc/contexts.h)


def environment(
    npus: int = Settings.npus,
    hbm_bytes: int = Settings.hbm_bytes,
    late: bool = False,
    soc: str = Settings.soc,
    queue: bool = False,
) -> dict[str, str]:
    """Return the environment variables that make a process run on emulated NPUs.

    They extend the current environment and keep PYTHONPATH and OMP_NUM_THREADS:
    ``subprocess.run(command, env={**os.environ, **environment(npus=4)})``.

    Args:
        npus: number of NPUs, 1 to 64.
        hbm_bytes: device memory of each NPU, in bytes.
        late: run work on streams other than the default stream as late as the API allows, and raise
            an error for a race.
        soc: generation of the NPUs, a2 or a3.
        queue: let a failed task end the task queue of its NPU, as in torch_npu.

    Processes that share a result are on one machine. Each call describes a new machine.

    Raises:
        SettingError: if an argument is out of range.
    """
    parse_soc("soc", soc)
    parse_npus("npus", str(npus))
    parse_size("hbm_bytes", str(hbm_bytes))
    others = [
        p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != SITE
    ]
    return {
        "PYTHONPATH": os.pathsep.join([str(SITE), *others]),
        "NPU_EMULATOR_NPUS": str(npus),
        "NPU_EMULATOR_HBM": str(hbm_bytes),
        "NPU_EMULATOR_LATE": "1" if late else "0",
        "NPU_EMULATOR_QUEUE": "1" if queue else "0",
        "NPU_EMULATOR_SOC": soc,
        "NPU_EMULATOR_MACHINE": str(1 + secrets.randbelow(MACHINES)),
        # Forked workers need not import vLLM again. As on hardware, a forked child cannot use the
        # devices if its parent has used one.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
        # One process runs per NPU. More threads than cores would only compete.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def activate(npus: int = Settings.npus, late: bool = False, queue: bool = False) -> None:
    """Make the emulated torch_npu importable in this process, for example from a conftest.py.

    Call this before torch is imported. Child processes do not inherit it; see environment(). Raises
    SettingError.
    """
    settings = environment(npus=npus, late=late, queue=queue)
    os.environ.update({k: v for k, v in settings.items() if k.startswith("NPU_EMULATOR_")})
    sys.path.insert(0, str(SITE))


def parser() -> argparse.ArgumentParser:
    """Return the parser of `npu-emulate`. Defaults come from the environment variables."""
    environ = os.environ
    p = argparse.ArgumentParser(
        prog="npu-emulate",
        description="Runs a command with emulated Ascend NPUs on the CPU, and prints nothing. "
        "Options after --, such as --json and -q, belong to the command.",
        usage="npu-emulate [--soc a2|a3] [--npus N] [--hbm SIZE] [--late] [--queue] -- COMMAND "
        "[ARGUMENT ...]",
    )
    p.add_argument(
        "--soc",
        default=environ.get("NPU_EMULATOR_SOC", Settings.soc),
        metavar="|".join(SOCS),
        help="generation of the NPUs: Atlas 800I A2 or A3 (default: %(default)s)",
    )
    npus = environ.get("NPU_EMULATOR_NPUS", str(Settings.npus))
    p.add_argument(
        "--npus", default=npus, metavar="N", help="number of NPUs (default: %(default)s)"
    )
    size = environ.get("NPU_EMULATOR_HBM", f"{Settings.hbm_bytes >> 30}GiB")
    p.add_argument(
        "--hbm",
        default=size,
        metavar="SIZE",
        help="memory of each NPU, e.g. 512MiB (default: %(default)s)",
    )
    p.add_argument(
        "--late",
        action="store_true",
        help="run work on side streams as late as the API allows, and raise errors for races",
    )
    p.add_argument(
        "--queue",
        action="store_true",
        help="report a failed operator once, at a later call, and drop all later work",
    )
    p.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --"
    )
    return p


def _is_set(variable: str) -> bool:
    return parse_flag(variable, os.environ.get(variable, "0"))


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process with the command. Return an exit code only if that fails."""
    options = parser().parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        print(
            "npu-emulate: no command given; put it after --, e.g. npu-emulate --npus 4 -- vllm "
            "serve MODEL",
            file=sys.stderr,
        )
        return 2
    try:
        late = options.late or _is_set("NPU_EMULATOR_LATE")
        queue = options.queue or _is_set("NPU_EMULATOR_QUEUE")
        added = environment(
            parse_npus("--npus", options.npus),
            parse_size("--hbm", options.hbm),
            late,
            parse_soc("--soc", options.soc),
            queue,
        )
    except SettingError as error:
        print(f"npu-emulate: {error}", file=sys.stderr)
        return 2
    program = shutil.which(command[0])
    if program is None:
        print(f"npu-emulate: {command[0]!r} is not on PATH", file=sys.stderr)
        return 127
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; the command must not
    os.execve(program, command, {**os.environ, **added})
