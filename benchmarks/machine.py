"""Describe the machine as far as it affects the figures, without identifying it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from ascend_npu_emulator.launch import SITE

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_PACKAGES = ("torch", "vllm", "vllm-ascend", "safetensors")


def describe() -> dict[str, str]:
    """Return the properties that affect the figures, by name."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores for this process",
        "memory": f"{total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "NPU": _npu(),
        "Python": platform.python_version(),
    } | {name: importlib.metadata.version(name) for name in _PACKAGES}


def load_average() -> float:
    """Return the load of the last minute. Above the number of cores, other programs are running."""
    return os.getloadavg()[0]


def processor() -> str:
    """Return name and vector instructions used by torch: bfloat16 needs AVX-512 to be fast."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    )


def _npu() -> str:
    import torch_npu

    if SITE in Path(torch_npu.__file__).parents:
        return "emulated (ascend_npu_emulator)"
    return f"torch_npu {torch_npu.__version__}"
