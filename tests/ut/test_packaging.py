"""What is in the wheel, and what installing it would pull in."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy of the checkout, so that the build leaves nothing here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vllm_ascend_hsx", source / "vllm_ascend_hsx")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", source, source]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (path,) = source.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_every_file_of_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    package = ROOT / "vllm_ascend_hsx"
    files = {
        str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - wheel == set()


def test_the_emulator_s_source_and_its_torch_npu_are_in_the_wheel(wheel: set[str]) -> None:
    assert [name for name in wheel if name.startswith("vllm_ascend_hsx/emulator/") and name.endswith(".cpp")]
    assert "vllm_ascend_hsx/emulator/site/torch_npu/__init__.py" in wheel
    assert "vllm_ascend_hsx/py.typed" in wheel


def test_nothing_but_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    outside = {name for name in wheel if not name.startswith(("vllm_ascend_hsx/", "vllm_ascend_hsx-"))}
    assert outside == set()
    assert [name for name in wheel if name.endswith(".pyc")] == []


def test_installing_it_pulls_in_no_torch_no_vllm_and_nothing_of_a_vendor() -> None:
    always = [text for text in requires("vllm-ascend-hsx") or [] if "extra ==" not in text]
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in always}
    assert names == {"awscrt", "filelock", "httpx", "numpy", "pydantic", "rich", "safetensors", "wrapt"}
