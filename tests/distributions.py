"""sdists and wheels of this checkout, as `make dist` builds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Parts of the checkout: the contents of the sdist, and some other files.
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "README.zh.md",
    "LICENSE",
    "CHANGELOG.md",
    "SECURITY.md",
)
OTHERS = ("Makefile", "docs", "emulator", "requirements", "tools")


EMULATOR_SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def build(work: Path, *, emulator: bool = False) -> Path:
    """Build sdist and wheel of the plugin, or of the emulator. Return the folder.

    They are built in a copy below the folder `work`, to leave no build files here. The copy is a
    repository, because setuptools-scm, if installed, adds every file of a repository to the sdist.
    """
    source, output = work / "source", work / "dist"
    source.mkdir()
    top = ROOT / "emulator" if emulator else ROOT
    names = (
        (*EMULATOR_SOURCES, "ascend_npu_emulator")
        if emulator
        else (*SOURCES, *OTHERS, "vllm_ascend_hsx")
    )
    for name in names:
        copy = shutil.copytree if (top / name).is_dir() else shutil.copy
        copy(top / name, source / name)
    (source / "tests").mkdir()
    # setuptools adds tests/test*.py to an sdist, unless MANIFEST.in excludes them.
    shutil.copy(__file__, source / "tests" / "test_copied.py")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (
        ("init", "--quiet"),
        ("add", "--all"),
        (*identity, "commit", "--quiet", "--message", "copy"),
    ):
        subprocess.run(["git", "-C", source, *words], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert sorted(path.suffix for path in output.iterdir()) == [".gz", ".whl"]
    return output
