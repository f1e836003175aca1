"""The commands of both READMEs that start emulated NPUs, run as written."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from documents import blocks

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def test_any_command_runs_on_emulated_npus() -> None:
    found = re.search(r"^\.venv/bin/npu-emulate .*$", README, re.MULTILINE)
    assert found is not None
    command = [re.sub(r"^\.venv/bin", str(BIN), word) for word in shlex.split(found[0])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "2\n"


def test_the_commands_of_the_emulators_readme_work(tmp_path: Path) -> None:
    def run(command: Sequence[str | Path]) -> str:
        return subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def block(label: str) -> str:
        (found,) = blocks("emulator/README.md", label)
        return found

    words = shlex.split(block("npu-emulate"))
    assert run([BIN / words[0], *words[1:4], BIN / words[4], *words[5:]]) == "2\n"
    assert run([sys.executable, "-c", block("processes")]) == "4\n"
    (tmp_path / "conftest.py").write_text(block("conftest"))
    test = "import torch, torch_npu\ndef test_npus(): assert torch.npu.device_count() == 2\n"
    (tmp_path / "test_npus.py").write_text(test)
    assert "1 passed" in run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"])


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
