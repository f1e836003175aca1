"""The tree stays readable: no long source file, no crowded folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[3]
PARTS = ("vllm_ascend_hsx", "tests", "benchmarks", "tools")
SOURCES = (".py", ".cpp", ".h")
MOST_LINES = 350
MOST_FILES = 15


def files_of(*parts: str) -> Iterator[Path]:
    """Yield the files below these folders, as paths from the project's root."""
    for part in parts:
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def test_a_source_file_has_at_most_350_lines() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in files_of(*PARTS) if path.suffix in SOURCES}
    assert len(lines) > 300
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_folder_has_at_most_15_files() -> None:
    counts = Counter(str(path.parent) for path in files_of(*PARTS))
    assert len(counts) > 30
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_each_mutant_changes_one_place_and_names_tests_that_exist() -> None:
    mutants = tomllib.loads((ROOT / "tests" / "mutations" / "mutants.toml").read_text())["mutant"]
    assert len(mutants) > 300
    places = {each["name"]: (ROOT / each["file"]).read_text().count(each["replace"]) for each in mutants}
    assert {name: count for name, count in places.items() if count != 1} == {}
    for each in mutants:
        for path, _, name in (test.partition("::") for test in each["tests"]):
            assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text(), each["name"]
