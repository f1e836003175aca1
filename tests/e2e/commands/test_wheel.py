"""The wheel, installed beside each release without the checkout: every patch point holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distributions
import pytest


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with only the wheel; it sees the packages of this environment."""
    where = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    (wheel,) = distributions.build(tmp_path_factory.mktemp("built")).glob("*.whl")
    pip = [where / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = where.glob("lib/python*/site-packages")
    # Only paths: the .pth of the editable install is not read.
    (site / "release.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    return where / "bin"


@pytest.mark.long
def test_the_doctor_of_the_wheel_finds_no_problem(installed: Path, tmp_path: Path) -> None:
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VLLM_PLUGINS")
    }
    hsx = str(installed / "hsx")
    where = [installed / "python", "-c", "import vllm_ascend_hsx; print(vllm_ascend_hsx.__file__)"]
    found = subprocess.run(
        where, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert found.startswith(str(installed.parent))
    command = [
        hsx,
        "emulate",
        "--npus",
        "2",
        "--",
        hsx,
        "doctor",
        "--json",
        "--out",
        "rows",
        "--model",
        "minimax-m2",
    ]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {each["verdict"] for each in json.loads(done.stdout)["findings"]}
    assert "problem" not in verdicts
