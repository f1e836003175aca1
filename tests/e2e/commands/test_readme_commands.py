"""The README's commands that start emulated NPUs, run as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def test_any_command_runs_on_emulated_npus() -> None:
    found = re.search(r"^\.venv/bin/npu-emulate .*$", README, re.MULTILINE)
    assert found is not None
    command = [re.sub(r"^\.venv/bin", str(BIN), word) for word in shlex.split(found[0])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "2\n"


def test_the_demo_matches_sixteen_of_sixteen_in_late_mode(tmp_path: Path) -> None:
    """`make demo` with the emulated NPU in late mode."""
    make = ["make", "--dry-run", "--no-print-directory", "demo"]
    recipe = subprocess.run(make, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert recipe.splitlines()[-1] == f"{BIN.parent.name}/{BIN.name}/hsx demo"
    command = [str(BIN / "hsx"), "demo", "--late", "--output", str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("16 of 16 requests match")
    published = re.search(
        r'vllm:hsx_files_total\{outcome="published"\} +│ +(\d+) │ +(\d+) │', done.stdout
    )
    assert published is not None and sum(map(int, published.groups())) == 16, done.stdout
