"""Requests over HTTP with the fastapi of vllm-ascend's images: vllm-ascend requires < 0.124."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The newest version within the images' constraint, with the newest starlette that it accepts.
PACKAGES = ("fastapi==0.123.10", "starlette==0.50.0", "prometheus-fastapi-instrumentator==7.1.0")
TESTS = ("tests/e2e/traffic/test_http_requests.py", "tests/e2e/traffic/test_http_endpoints.py")


@pytest.mark.long  # it downloads packages
def test_http_requests_are_answered_as_with_the_fastapi_of_the_pins(tmp_path: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*pip, "--target", str(tmp_path), *PACKAGES], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    emulated = [str(Path(sys.executable).with_name("hsx")), "emulate", "--", sys.executable, "-c"]
    probe = "import fastapi, starlette; print(fastapi.__version__, starlette.__version__)"
    found = subprocess.run(
        [*emulated, probe], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert found.split() == ["0.123.10", "0.50.0"]  # so servers of the tests have them, too
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) > 50
