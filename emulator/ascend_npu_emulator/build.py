"""Compile the C++ part of the emulator once, into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"
MODULE = "emulated_npu_core"
# The module is one translation unit because most of the time is spent on torch's headers.
FLAGS = (
    *(
        "-std=c++20",
        "-O1",
        "-g0",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wno-interference-size",
    ),
    f"-DTORCH_EXTENSION_NAME={MODULE}",
)


class BuildError(RuntimeError):
    """The C++ part cannot be built. The message states the reason and the remedy."""


def cache_directory() -> Path:
    """Return NPU_EMULATOR_CACHE, or the default below the user's cache directory."""
    if chosen := os.environ.get("NPU_EMULATOR_CACHE"):
        return Path(chosen)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "ascend-npu-emulator"


def library() -> Path:
    """Return the path of the compiled extension module, and build it if it is not in the cache.

    Several processes may call this at once: one builds, the others wait.

    Raises:
        BuildError: if the compiler, the Python headers or the cache directory is missing, or the
            compiler failed.
    """
    import torch

    target = cache_directory() / f"{MODULE}-{_key(torch.__version__)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"emulated NPU: cannot create the cache directory {target.parent} ({error.strerror}); "
            "set NPU_EMULATOR_CACHE to a directory that can be written"
        ) from error
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(target, Path(torch.__file__).parent)
    return target


def _key(torch_version: str) -> str:
    """Return a short digest of sources, flags, torch, Python and compiler."""
    digest = hashlib.sha256()
    for part in (*FLAGS, torch_version, sys.version, sysconfig.get_platform(), _compiler_name()):
        digest.update(part.encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(str(source.relative_to(SOURCES)).encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_name() -> str:
    return os.environ.get("CXX") or "c++"


def _compile(target: Path, torch_root: Path) -> None:
    compiler = shutil.which(_compiler_name())
    if compiler is None:
        raise BuildError(
            f"emulated NPU: no C++ compiler: {_compiler_name()!r} is not on PATH. "
            "Install g++ (11 or newer), or name another compiler in CXX"
        )
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        raise BuildError(
            f"emulated NPU: no Python headers in {headers}. Install them (Debian and Ubuntu: "
            "python3-dev)"
        )
    handle, draft = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    included = (
        SOURCES,
        torch_root / "include",
        torch_root / "include/torch/csrc/api/include",
        headers,
    )
    command = [
        *(
            compiler,
            *FLAGS,
            *(f"-I{path}" for path in included),
            str(SOURCES / "npu.cpp"),
            "-o",
            draft,
        ),
        *(f"-L{torch_root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]
    print(
        "npu-emulate: compiling the emulated NPU, once (half a minute to a minute) ...",
        file=sys.stderr,
        flush=True,
    )
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            # The last lines may be notes. The first error is the cause.
            lines = done.stderr.splitlines()
            errors = "\n".join([line for line in lines if "error" in line][:10] or lines[-5:])
            raise BuildError(
                f"emulated NPU: the compiler failed:\n{errors}\ncommand: {' '.join(command)}"
            )
        os.chmod(draft, 0o644)
        os.replace(draft, target)
    finally:
        Path(draft).unlink(missing_ok=True)
    print(
        f"npu-emulate: compiled in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
    )
