"""Mutants stay in step with the code that they change."""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[3]


def test_each_mutant_changes_one_place_and_names_tests_that_exist() -> None:
    mutants = tomllib.loads((ROOT / "tests" / "mutations" / "mutants.toml").read_text())["mutant"]
    assert len(mutants) > 300
    places = {
        each["name"]: (ROOT / each["file"]).read_text().count(each["replace"]) for each in mutants
    }
    assert {name: count for name, count in places.items() if count != 1} == {}
    for each in mutants:
        for path, _, name in (test.partition("::") for test in each["tests"]):
            assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text(), each[
                "name"
            ]
