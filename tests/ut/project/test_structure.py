"""Mutants match the code that they change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[3]
MUTANTS = tomllib.loads((ROOT / "tests" / "mutations" / "mutants.toml").read_text())["mutant"]


def test_each_mutant_changes_one_place_and_names_tests_that_exist() -> None:
    assert len(MUTANTS) > 300
    places = {
        each["name"]: (ROOT / each["file"]).read_text().count(each["replace"]) for each in MUTANTS
    }
    assert {name: count for name, count in places.items() if count != 1} == {}
    for each in MUTANTS:
        for path, _, name in (test.partition("::") for test in each["tests"]):
            assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text(), each[
                "name"
            ]


def test_each_mutant_is_valid_code_and_uses_only_defined_names(tmp_path: Path) -> None:
    """Any test would fail for other mutants, so they would measure nothing."""
    names = {}
    for number, each in enumerate(MUTANTS):
        if each["file"].endswith(".py"):
            path = tmp_path / f"mutant_{number}.py"
            path.write_text((ROOT / each["file"]).read_text().replace(each["replace"], each["by"]))
            names[str(path)] = each["name"]
    options = ["--isolated", "--no-cache", "--select", "F821,F823", "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", *options, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert {names[each["filename"]]: each["message"] for each in json.loads(done.stdout)} == {}
