"""Create a virtual environment with unmodified, pinned vllm and vllm-ascend on emulated NPUs.

The variable VLLM_ASCEND selects the release of vllm-ascend and the matching vllm. requirements/ has
a file for each release. The environment is .venv for the default release, and .venv-RELEASE for
others. Standard library only.

Every package is pinned and installed without dependencies. vllm-ascend requires another torch and
torch_npu, and pip would install CUDA builds. torch is the CPU build of the pinned version that pip
finds with the user's configuration (index, find-links). A CUDA build is refused before anything is
installed. A second call does nothing, and an interrupted set-up is resumed.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "0.23.0"
VLLM_ASCEND = os.environ.get("VLLM_ASCEND") or DEFAULT
VENV = ROOT / (".venv" if VLLM_ASCEND == DEFAULT else f".venv-{VLLM_ASCEND}")
STAMP = VENV / "hsx-setup.json"
LOG = VENV / "hsx-setup.log"
MOONCAKE_LIBRARIES = ROOT / "tools" / "mooncake_libraries.py"
PINS = ROOT / "requirements"
PIN_FILES = (PINS / "common.txt", PINS / "dev.txt", PINS / f"{VLLM_ASCEND}.txt")
SOURCES = ("vllm", "vllm-ascend")  # installed last: the builds import the other packages
PYTHON_VERSION = (3, 11)  # the version of the pins
FREE_BYTES = 4 << 30
# Packages that replace the CPU stack or belong to a machine with a real accelerator.
FOREIGN = re.compile(r"^(nvidia|cuda)-|^torch-npu$|^triton-ascend$")


class SetupError(Exception):
    """A failure. The message names the remedy."""


def canonical(name: str) -> str:
    """Return the normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Return {canonical name: exact version}; any other line is an error."""
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)", text)
        if match is None:
            raise SetupError(
                f"{path.name}:{number}: {text!r} is not an exact pin; write name==version"
            )
        pins[canonical(match[1])] = match[2]
    return pins


def all_pins() -> dict[str, str]:
    pins: dict[str, str] = {}
    for path in PIN_FILES:
        pins.update(read_pins(path))
    return pins


def releases() -> list[str]:
    """Return the releases of vllm-ascend that can be set up."""
    return sorted(path.stem for path in PINS.glob("[0-9]*.txt"))


def setup_key() -> str:
    """Return a hash of all inputs of the environment. After a change, it must be updated."""
    digest = hashlib.sha256()
    projects = [path for top in (ROOT, ROOT / "emulator") for path in top.glob("*/_version.py")]
    projects += [ROOT / "pyproject.toml", ROOT / "emulator" / "pyproject.toml"]
    for path in (*PIN_FILES, *projects, Path(__file__), MOONCAKE_LIBRARIES):
        digest.update(path.read_bytes())
    digest.update(f"{ROOT} {platform.python_version()} {platform.machine()}".encode())
    return digest.hexdigest()


def is_current() -> bool:
    try:
        return (
            bool(json.loads(STAMP.read_text())["key"] == setup_key())
            and (VENV / "bin" / "python").exists()
        )
    except (OSError, ValueError, KeyError):
        return False


def check_host() -> None:
    """Raise SetupError if this machine lacks a requirement, before any download."""
    if VLLM_ASCEND not in releases():
        raise SetupError(
            f"VLLM_ASCEND={VLLM_ASCEND} is not known; choose one of {', '.join(releases())}"
        )
    if sys.version_info[:2] != PYTHON_VERSION:
        want = ".".join(map(str, PYTHON_VERSION))
        raise SetupError(
            f"the emulated stack is pinned for Python {want}, but this is Python "
            f"{platform.python_version()} ({sys.executable}); "
            f"call `make PYTHON=/path/to/python{want} ...`"
        )
    if sys.platform != "linux":
        raise SetupError(f"the emulated NPU runs only on Linux, but this is {sys.platform}")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise SetupError(
            "no C++ compiler found (g++); the emulated NPU has a C++ file. Install g++ and call again"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise SetupError(
            f"{header} is missing; install the development package of this Python (python3.11-dev)"
        )
    free = shutil.disk_usage(ROOT).free
    if free < FREE_BYTES and not VENV.exists():
        raise SetupError(
            f"{free >> 20} MiB are free in {ROOT}, but the set-up needs {FREE_BYTES >> 20} MiB; free "
            "some space and call again"
        )


def venv_works() -> bool:
    """Return True if the venv has pip and this Python. A moved venv mixes two versions."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return False
    probe = [python, "-c", "import pip, sys; print((sys.base_prefix, sys.version))"]
    found = subprocess.run(
        probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    ).stdout
    return found.strip() == str((sys.base_prefix, sys.version))


@contextmanager
def running(
    command: Sequence[str | Path], output: IO[bytes] | int, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and wait for the end after the block. Stop it if the block fails."""
    added = {**os.environ, **environment}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=added
    )
    try:
        yield process
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()


class Steps:
    """Numbered steps on the terminal, with elapsed time. Output of commands goes to the log."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def run(self, title: str, *commands: Sequence[str | Path], **environment: str) -> None:
        """Run commands together; raise SetupError with the end of the output if one fails."""
        self.done += 1
        head = f"[{self.done}/{self.total}] {title}"
        began = time.monotonic()
        print(f"{head} ...", flush=True)
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("ab") as log, ExitStack() as stack:
            begin = log.tell()
            log.writelines(f"$ {' '.join(map(str, command))}\n".encode() for command in commands)
            log.flush()
            finished = threading.Event()
            reporter = threading.Thread(
                target=self._report, args=(head, began, finished), daemon=True
            )
            reporter.start()
            stack.callback(reporter.join)
            stack.callback(finished.set)
            processes = [
                stack.enter_context(running(command, log, **environment)) for command in commands
            ]
            codes = [process.wait() for process in processes]
        print(f"{head}: {time.monotonic() - began:.0f} s", flush=True)
        if code := next(filter(None, codes), 0):
            with LOG.open("rb") as log:
                log.seek(begin)
                tail = log.read().decode(errors="replace").splitlines()[-25:]
            raise SetupError(
                "\n".join(
                    [f"{title}: failed (exit code {code}); the whole output is in {LOG}", *tail]
                )
            )

    @staticmethod
    def _report(head: str, began: float, finished: threading.Event) -> None:
        every = 5 if sys.stdout.isatty() else 30
        while not finished.wait(every):
            with LOG.open("rb") as log:
                log.seek(max(0, LOG.stat().st_size - 400))
                last = log.read().decode(errors="replace").split("\n")[-2:]
            print(
                f"{head}: {time.monotonic() - began:.0f} s  {' '.join(last).strip()[:90]}",
                flush=True,
            )


def check_torch_candidate(pip: Sequence[str | Path], version: str) -> None:
    """Ask pip which torch it would install, and refuse a CUDA build by the metadata."""
    report = VENV / "hsx-torch.json"
    command = [
        *pip,
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
        "--report",
        report,
    ]
    result = subprocess.run(
        [*command, f"torch=={version}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SetupError(f"pip finds no torch {version}:\n{result.stdout.strip()}")
    refuse_cuda_metadata(json.loads(report.read_text())["install"][0]["metadata"])


def refuse_cuda_metadata(metadata: dict[str, object]) -> None:
    """Raise SetupError if a torch wheel's metadata requires CUDA packages."""
    requires = metadata.get("requires_dist") or []
    assert isinstance(requires, list)
    foreign = [
        text for text in requires if FOREIGN.match(canonical(re.split(r"[^A-Za-z0-9._-]", text)[0]))
    ]
    if foreign:
        raise SetupError(
            f"pip would install torch {metadata['version']}, a CUDA build (it requires "
            f"{foreign[0]!r} and {len(foreign) - 1} more). "
            "Let pip find the CPU build: configure PyTorch's CPU index as extra-index-url, or a "
            "directory with the wheel as "
            "find-links (`pip config set ...`, or PIP_EXTRA_INDEX_URL / PIP_FIND_LINKS), and "
            "call again"
        )


def find_problems(installed: dict[str, str], cuda: str | None) -> list[str]:
    """List the problems of packages {canonical name: version} and torch's torch.version.cuda."""
    problems = [
        f"{name} is {installed.get(name, 'missing')}, the pin is {version}"
        for name, version in all_pins().items()
        # A CPU build has the version 2.13.0+cpu.
        if installed.get(name, "").partition("+")[0] != version
    ]
    problems += [
        f"{name} {version} is installed; it does not belong on an emulated NPU"
        for name, version in sorted(installed.items())
        if FOREIGN.match(name)
    ]
    if cuda is not None:
        problems.append(f"torch is a CUDA build ({cuda}); something replaced the CPU build")
    return problems


def check_environment() -> list[str]:
    """List the problems of this interpreter's environment, one line each."""
    import torch

    installed = {
        canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()
    }
    problems = find_problems(installed, torch.version.cuda)
    for module in ("transformers", "openai", "vllm_ascend_hsx", "ascend_npu_emulator"):
        try:
            __import__(module)
        except ImportError as error:
            problems.append(f"import {module} fails: {error}")
    return problems


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock of the environment; a second call of make waits."""
    with VENV.with_name(f"{VENV.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up is running in this checkout; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up() -> None:
    started = time.monotonic()
    check_host()
    if not venv_works():
        # pip cannot repair an incomplete venv or a venv of another Python.
        shutil.rmtree(VENV, ignore_errors=True)
    STAMP.unlink(missing_ok=True)
    steps = Steps(total=8)
    python = VENV / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    steps.run("virtual environment", [sys.executable, "-m", "venv", VENV])
    check_torch_candidate(pip, all_pins()["torch"])
    pins = all_pins()
    others = [f"{name}=={version}" for name, version in pins.items() if name not in SOURCES]
    install = [*pip, "install", "--no-deps", "--no-compile"]
    # pip uses one processor: two processes install one half each.
    steps.run(
        f"{len(others)} pinned packages", [*install, *others[0::2]], [*install, *others[1::2]]
    )
    site_packages = sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)})
    # Only few models of transformers are in use.
    rarely_used = r"[\\/](tests?|testing|transformers[\\/]models)[\\/]"
    byte_code = [python, "-m", "compileall", "-q", "-j", "0", "-x", rarely_used, site_packages]
    # A build uses one processor: compile the installed packages at the same time.
    with running(byte_code, subprocess.DEVNULL):
        build_sources(steps, python, pip, pins, site_packages)
    # Otherwise the eight processes of the first server would all compile at once.
    steps.run("byte code", byte_code)
    steps.run("checks", [python, __file__, "--check"])
    partial = STAMP.with_suffix(".partial")
    partial.write_text(
        json.dumps({"key": setup_key(), "seconds": round(time.monotonic() - started)})
    )
    partial.rename(STAMP)
    print(f"{VENV} is ready after {time.monotonic() - started:.0f} s", flush=True)


def build_sources(
    steps: Steps,
    python: Path,
    pip: Sequence[str | Path],
    pins: Mapping[str, str],
    site_packages: str,
) -> None:
    # No cache: pip would install a wheel built earlier for another device.
    build = [*pip, "install", "--no-deps", "--no-compile", "--no-cache-dir", "--no-build-isolation"]
    for_vllm = {
        "VLLM_TARGET_DEVICE": "empty",
        # The default version ends in +empty. vllm-ascend does not know this version.
        "VLLM_VERSION_OVERRIDE": pins["vllm"],
        # vllm's optional Rust programs take minutes to compile and are not used.
        "CARGO": "no-cargo",
    }
    # A source distribution with Python code only, without CANN's compiler and npu-smi.
    for_ascend = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
    for name, title, options, environment in (
        (
            "vllm",
            f"vllm {pins['vllm']} from source, without a device",
            ["--no-binary", "vllm"],
            for_vllm,
        ),
        ("vllm-ascend", f"vllm-ascend {pins['vllm-ascend']}", [], for_ascend),
    ):
        if is_installed(python, name, pins[name]):
            steps.done += 1
        else:
            steps.run(title, [*build, *options, f"{name}=={pins[name]}"], **environment)
    editable = ("--editable", ROOT / "emulator", "--editable", ROOT)
    steps.run(
        "vllm-ascend-hsx and the emulator",
        [*pip, "install", "--no-deps", "--no-build-isolation", *editable],
    )
    try:
        steps.run(
            "libraries of Mooncake", [python, MOONCAKE_LIBRARIES, Path(site_packages, "mooncake")]
        )
    except SetupError as error:  # everything else works without Mooncake
        print(
            f"set-up: {error}\nset-up: continuing; tests that need Mooncake will be skipped",
            file=sys.stderr,
        )


def is_installed(python: Path, package: str, version: str) -> bool:
    code = (
        "import importlib.metadata as m, sys; print([d.version for d in "
        "m.distributions(name=sys.argv[1])])"
    )
    found = subprocess.run(
        [python, "-c", code, package], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return found.strip() == str([version])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Set up the emulated stack. A second call does nothing."
    )
    parser.add_argument(
        "--check", action="store_true", help="only check the environment of this interpreter"
    )
    arguments = parser.parse_args()
    try:
        if arguments.check:
            problems = check_environment()
            if problems:
                raise SetupError("\n".join(problems))
            return 0
        if is_current():
            return 0
        with one_at_a_time():
            if not is_current():
                set_up()
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; call again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
