"""`hsx doctor` on an emulated NPU: every patch point holds with the real wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat.patch_points import POINTS

HSX = str(Path(sys.executable).with_name("hsx"))


@pytest.mark.long
def test_a_machine_without_an_npu_has_one_problem_and_one_remedy() -> None:
    """No remedy installs a package that is right, or one that needs an NPU."""
    done = subprocess.run([HSX, "doctor", "--json"], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    (problem,) = [each for each in found if each["verdict"] == "problem"]
    assert problem["name"] == "NPUs" and "hsx emulate -- hsx doctor" in problem["what_to_do"]
    assert not [each["what_to_do"] for each in found if "pip install" in each["what_to_do"]]
    assert {each["name"]: each["verdict"] for each in found}["vllm"] == "ok"


@pytest.mark.long
def test_every_patch_point_holds_on_the_real_wheels(tmp_path: Path) -> None:
    words = ["doctor", "--json", "--out", str(tmp_path / "rows"), "--model", "minimax-m2"]
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [HSX, "emulate", "--npus", "2", "--", HSX, *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["findings"]
    held = {
        each["name"]
        for each in found
        if each["topic"] == "patch points" and each["verdict"] == "ok"
    }
    assert held == {point.name for point in POINTS if point.fits}
    assert {each["topic"] for each in found} == {"software", "patch points", "storage", "target"}
    assert next(each["found"] for each in found if each["name"] == "NPUs").startswith("2, emulated")
    assert not list((tmp_path / "rows").iterdir())
