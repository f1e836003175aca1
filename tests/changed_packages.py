"""A copy of the installed vllm and vllm_ascend with changes to a few files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.compat import installed

_FIND = (
    "import importlib.util as u, pathlib; print(*(pathlib.Path(u.find_spec(n).origin).parent for "
    "n in ('vllm', 'vllm_ascend')))"
)


class Change(NamedTuple):
    """A text in a file, the replacement, and the expected report."""

    file: str
    text: str
    by: str
    report: str = ""


def copy_installed(folder: Path, changes: Sequence[Change]) -> dict[str, str]:
    """Copy both packages into `folder`, with the changes. Return an environment that uses it."""
    found = subprocess.run(
        [sys.executable, "-c", _FIND], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()[-1]
    files = [change.file for change in changes]
    for package in map(Path, found.split()):
        _copy_by_links(package, folder / package.name, files)
    for change in changes:
        path = folder / change.file
        source = path.read_text()
        assert change.text in source, change
        path.write_text(source.replace(change.text, change.by, 1))
    ours = Path(installed.__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ours)])}


def _copy_by_links(package: Path, target: Path, files: Sequence[str]) -> None:
    """Create directories that contain one of the files; link everything else."""
    target.mkdir()
    for each in package.iterdir():
        inside = f"{target.name}/{each.name}"
        below = [file.partition("/")[2] for file in files if file.startswith(inside + "/")]
        if each.is_dir() and below:
            _copy_by_links(each, target / each.name, below)
        elif inside in files:
            shutil.copy2(each, target / each.name)
        elif each.name != "__pycache__":
            (target / each.name).symlink_to(each)
