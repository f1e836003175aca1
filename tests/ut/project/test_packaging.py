"""What is in the wheel, and what installing it would pull in."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest

import vllm_ascend_hsx
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink

ROOT = Path(__file__).parents[3]
FORMAT = RowFormat(layer_ids=(2, 1), hidden_size=64, dtype="BF16", model="tiny")
# What `import torch` and a DataLoader need, of a build that pip may not find by itself.
TORCH = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "setuptools")
READS = """
import sys, torch
from torch.utils.data import DataLoader
from vllm_ascend_hsx import HiddenStatesDataset, collate, load, open_dir

directory = sys.argv[1]
(path, states), = open_dir(directory)
assert torch.equal(load(path, verify=True).hidden_states, states.hidden_states)
(batch,) = DataLoader(HiddenStatesDataset(directory, verify=True), collate_fn=collate, num_workers=1)
print(states.hidden_states.float().sum().item(), batch["token_ids"].tolist())
assert not {"vllm", "vllm_ascend", "torch_npu"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that the build leaves nothing here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vllm_ascend_hsx", source / "vllm_ascend_hsx", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", source, source]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (path,) = source.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    """Names of the files in it."""
    return set(zipfile.ZipFile(built).namelist())


def test_every_file_of_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    package = ROOT / "vllm_ascend_hsx"
    files = {
        str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - wheel == set()


def test_the_emulator_s_source_and_its_torch_npu_are_in_the_wheel(wheel: set[str]) -> None:
    assert [name for name in wheel if name.startswith("vllm_ascend_hsx/emulator/") and name.endswith(".cpp")]
    assert "vllm_ascend_hsx/emulator/site/torch_npu/__init__.py" in wheel
    assert "vllm_ascend_hsx/py.typed" in wheel


def test_nothing_but_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    outside = {name for name in wheel if not name.startswith(("vllm_ascend_hsx/", "vllm_ascend_hsx-"))}
    assert outside == set()
    assert [name for name in wheel if name.endswith(".pyc")] == []


def test_installing_it_pulls_in_no_torch_no_vllm_and_nothing_of_a_vendor() -> None:
    always = [text for text in requires("vllm-ascend-hsx") or [] if "extra ==" not in text]
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in always}
    assert names == {"awscrt", "filelock", "httpx", "numpy", "packaging", "pydantic", "rich", "safetensors", "wrapt"}


@pytest.fixture(scope="module")
def empty(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with nothing in it but the wheel and what it asks for."""
    where = tmp_path_factory.mktemp("empty")
    venv.create(where, with_pip=True)
    pip = [where / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", built], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    assert not re.findall("^(?:torch|vllm|nvidia).*==", listed.replace("vllm-ascend-hsx==", ""), re.MULTILINE)
    return where / "bin"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    with FileSink(directory, FORMAT) as sink:
        file = sink.open("request", directory / "one.safetensors", 3)
        file.write(0, np.full((3, *FORMAT.row_shape), 0x3F80, np.uint16))  # ones
        file.commit(np.arange(3), 3)
    return directory


def run(*command: str | Path, torch: Path | None = None) -> tuple[int, str]:
    """(exit code, what was printed) in an environment that leads nowhere else."""
    environment = {"PATH": "/usr/bin:/bin", **({} if torch is None else {"PYTHONPATH": str(torch)})}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_in_an_empty_environment_the_commands_work_or_name_what_they_need(empty: Path, files: Path, tmp_path: Path) -> None:
    assert run(empty / "hsx", "--version") == (0, f"hsx {vllm_ascend_hsx.__version__}\n")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 62, "architectures": ["MiniMaxM2ForCausalLM"]}')
    code, printed = run(empty / "hsx", "serve", tmp_path, "--dry-run")
    assert (code, printed.split()[:3]) == (0, ["vllm", "serve", str(tmp_path)])
    code, printed = run(empty / "hsx", "generate", "--data", tmp_path / "none.jsonl", "--output", tmp_path / "o", "--endpoint", "http://localhost:1/v1")
    assert (code, "Traceback" in printed) == (2, False), printed
    code, printed = run(empty / "hsx", "inspect", files)
    assert (code, "Traceback" in printed) == (1, False), printed
    assert printed.splitlines()[-1].startswith("hsx inspect: torch is not installed here; install torch")
    assert run(empty / "hsx", "verify", files)[0] == 0
    code, printed = run(empty / "python", "-c", f"import vllm_ascend_hsx; vllm_ascend_hsx.load({str(files / 'one.safetensors')!r})")
    assert (code, "vllm-ascend-hsx[reader]" in printed.splitlines()[-1]) == (1, True)


def test_with_torch_beside_it_the_reader_works(empty: Path, files: Path, tmp_path: Path) -> None:
    site = Path(import_module("torch").__file__ or "").parents[1]
    for name in TORCH:
        (tmp_path / name).symlink_to(site / name)
    code, printed = run(empty / "python", "-c", READS, files, torch=tmp_path)
    assert (code, printed.splitlines()[-1]) == (0, "384.0 [[0, 1, 2]]"), printed
    for command in ("inspect", "verify"):
        code, printed = run(empty / "hsx", command, files, torch=tmp_path)
        assert code == 0, printed
