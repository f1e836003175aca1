"""Checks for Python 3.10 to 3.12 and aarch64 that Python 3.11 on x86-64 can run."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

from ascend_npu_emulator import build

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST, *NEWER = ("3.10", "3.11", "3.12")
EXTRAS = ("data", "ray", "reader", "benchmark", "mooncake")
# vllm-ascend's images with Ubuntu 22.04 have glibc 2.35, and with openEuler a newer one.
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64", "manylinux_2_35_aarch64")
CROSS_COMPILER = "aarch64-linux-gnu-g++"


def run(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def vermin(*paths: Path) -> tuple[int, str]:
    """Run vermin without the rule for Python 2's type `long`: we call torch's `.long()`."""
    tool = Path(sys.executable).with_name("vermin")
    return run(
        tool,
        f"--target={OLDEST}-",
        "--no-tips",
        "--eval-annotations",
        "--violations",
        "--exclude=long",
        *paths,
    )


def test_code_runs_on_the_oldest_python(tmp_path: Path) -> None:
    code, printed = vermin(ROOT / "vllm_ascend_hsx", ROOT / "emulator" / "ascend_npu_emulator")
    assert code == 0, printed
    assert f"Minimum required versions: {OLDEST}" in printed
    (tmp_path / "newer.py").write_text("from datetime import UTC\n")
    assert vermin(tmp_path)[0] == 1


@pytest.mark.long  # `make lint` checks the oldest version
@pytest.mark.parametrize("version", NEWER)
def test_types_hold_on_newer_pythons(version: str) -> None:
    code, printed = run(sys.executable, "-m", "mypy", "--python-version", version)
    assert code == 0, printed


@pytest.mark.long
@pytest.mark.parametrize("version", [OLDEST, *NEWER])
def test_every_dependency_has_a_wheel_for_aarch64(version: str, tmp_path: Path) -> None:
    """Omit the dependencies of extras: the user chooses the build of torch."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
    ]
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    command = [
        *pip,
        "--only-binary=:all:",
        "--target",
        str(tmp_path),
        "--python-version",
        version,
        *platforms,
    ]
    code, printed = run(*command, *PROJECT["dependencies"])
    assert code == 0, printed
    extras = [
        requirement for extra in EXTRAS for requirement in PROJECT["optional-dependencies"][extra]
    ]
    code, printed = run(*command, "--no-deps", *extras)
    assert code == 0, printed


@pytest.mark.long
def test_the_emulator_compiles_for_aarch64() -> None:
    """Compile without linking: torch's libraries for aarch64 are not installed."""
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"{CROSS_COMPILER} is not installed (Debian and Ubuntu: g++-aarch64-linux-gnu)")
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    headers = Path(torch.origin).parent / "include"
    included = (
        build.SOURCES,
        headers,
        headers / "torch/csrc/api/include",
        sysconfig.get_path("include"),
    )
    code, printed = run(
        CROSS_COMPILER,
        *build.FLAGS,
        "-fsyntax-only",
        *(f"-I{path}" for path in included),
        build.SOURCES / "npu.cpp",
    )
    assert code == 0, printed
