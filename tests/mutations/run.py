"""Plant each mistake of mutants.toml in a copy of the project and expect the tests to fail.

`make mutants` runs it. A mutant names the file, a text that occurs there exactly once, the
replacement, and tests. One of these tests, or another test of their folders, must fail. Exits with
1 if a mutant survives, and with 2 if a mutant cannot be planted or the tests cannot run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = (
    "vllm_ascend_hsx",
    "emulator",
    "tests",
    "benchmarks",
    "tools",
    "docs",
    "requirements",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "mkdocs.yml",
    ".github",
    ".pre-commit-config.yaml",
)
TEST_TIMEOUT_S = 120  # for one test: a mutant may make it hang
TIMEOUT_S = 900  # in case a mutant makes pytest itself hang


class Mutant(NamedTuple):
    """One planted mistake; `tests` are arguments of pytest, below tests/."""

    name: str
    file: str
    replace: str
    by: str
    tests: list[str]


class PlantingError(Exception):
    """The text to replace does not occur exactly once, or the tests do not run."""


def read_mutants() -> list[Mutant]:
    """Return the mutants of the table. Raises PlantingError if two have the same name."""
    mutants = [Mutant(**each) for each in tomllib.loads(TABLE.read_text())["mutant"]]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlantingError(f"{sorted(twice)}: give each mutant a unique name")
    return mutants


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Plant the mutant in a copy, and remove it afterwards."""
    path = copy / mutant.file
    source = path.read_text()
    if (count := source.count(mutant.replace)) != 1:
        raise PlantingError(f"{mutant.file} has {mutant.replace!r} {count} times, not once")
    path.write_text(source.replace(mutant.replace, mutant.by))
    try:
        yield
    finally:
        path.write_text(source)


def is_caught(mutant: Mutant, copy: Path) -> bool:
    """Return True if a test fails: a named test, or another one of the same folders.

    So a named test may be deleted if another test of the folder catches the mutant.

    Raises:
        PlantingError: if the mutant cannot be planted, or pytest cannot run the tests.
    """
    named = [f"tests/{each}" for each in mutant.tests]
    # Folders with engines take minutes.
    folders = sorted(
        {
            str(Path(each.partition("::")[0]).parent)
            for each in named
            if each.startswith("tests/ut/")
        }
    )
    with planted(mutant, copy):
        if run_tests(named, copy):
            return True
        failed = run_tests(folders, copy) if folders else None
    # A test may fail in a copy for another reason, for example because it needs the repository.
    return failed is not None and not run_tests([failed], copy)


def run_tests(tests: list[str], copy: Path) -> str | None:
    """Return the first failing test, as an argument of pytest, or None.

    If a run ends without naming a failing test, for example because it hangs, return the first of
    `tests`.

    Raises:
        PlantingError: if pytest cannot run them.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
    options += ["--timeout-method=thread"]  # ends the process: a hanging test may hang at exit, too
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "emulator"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return tests[0]
    if done.returncode not in (0, 1):
        raise PlantingError(
            f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
        )
    if done.returncode == 0:
        return None
    found = re.search(
        r"^(?:FAILED|ERROR) (tests/\S+?::.+?|tests/\S+)(?: - .*)?$", done.stdout, re.MULTILINE
    )
    return found[1] if found else tests[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-k", metavar="TEXT", default="", help="only mutants with this text in name or file"
    )
    parser.add_argument(
        "-j",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of mutants at the same time",
    )
    parser.add_argument(
        "--tenth", action="store_true", help="a tenth of them, a different one each day"
    )
    options = parser.parse_args()
    mutants = [each for each in read_mutants() if options.k in f"{each.name} {each.file}"]
    if options.tenth:
        mutants = mutants[time.gmtime().tm_yday % 10 :: 10]
    survivors, broken = [], []
    with tempfile.TemporaryDirectory(prefix="hsx-mutants-") as directory:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.j):
            copy = Path(directory, str(number))
            copy.mkdir()
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy2(ROOT / name, copy / name)
            copies.put(copy)

        def try_one(mutant: Mutant) -> str:
            copy = copies.get()
            began = time.monotonic()
            try:
                verdict = "caught" if is_caught(mutant, copy) else "SURVIVES"
            except PlantingError as error:
                verdict = f"CANNOT BE TRIED: {error}"
            finally:
                copies.put(copy)
            return f"{time.monotonic() - began:6.1f} s  {mutant.name} ({mutant.file}): {verdict}"

        with ThreadPoolExecutor(options.j) as pool:
            for mutant, line in zip(mutants, pool.map(try_one, mutants), strict=True):
                print(line, flush=True)
                if "SURVIVES" in line:
                    survivors.append(mutant)
                elif "CANNOT" in line:
                    broken.append(mutant)
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors) - len(broken)} caught")
    return 2 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
