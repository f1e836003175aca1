"""Contents of sdist and wheel, and the packages that they require."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import distributions
import numpy as np
import pytest
import tomllib
from packaging.requirements import Requirement

import vllm_ascend_hsx
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink

ROOT = Path(__file__).parents[3]
FORMAT = RowFormat(layer_ids=(2, 1), hidden_size=64, dtype="BF16", model="tiny")
# Modules that `import torch` and a DataLoader need. They are linked from this environment: pip may
# not find this build of torch.
TORCH = (
    "torch",
    "torchgen",
    "functorch",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "setuptools",
)
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
# Prints the metadata that a build of the wheel makes from an sdist.
METADATA = """
import os, sys, tarfile, tempfile
from setuptools import build_meta

work = tempfile.mkdtemp()
with tarfile.open(sys.argv[1]) as sdist:
    sdist.extractall(work, filter="data")
os.chdir(os.path.join(work, os.listdir(work)[0]))
sys.stdout, printed = sys.stderr, sys.stdout
name = build_meta.prepare_metadata_for_build_wheel(".")
print(open(os.path.join(name, "METADATA")).read(), file=printed)
"""
# Prints the number of modules, and the missing package or the error of each failed import.
IMPORTS = """
import importlib, pkgutil, vllm_ascend_hsx

def broken(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return (error.name or "").partition(".")[0]
    except Exception as error:
        return repr(error)

names = [each.name for each in pkgutil.walk_packages(vllm_ascend_hsx.__path__, "vllm_ascend_hsx.", onerror=lambda name: None)]
print(len(names), sorted({each for each in map(broken, names) if each}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel built from the sdist."""
    return distributions.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    """Names of the files in the wheel."""
    (path,) = built.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


@pytest.fixture(scope="module")
def emulator_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = distributions.build(tmp_path_factory.mktemp("emulator"), emulator=True)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the unpacked sdist."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extractall(directory := tmp_path_factory.mktemp("sdist"), filter="data")
    (top,) = directory.iterdir()
    assert top.name == f"vllm_ascend_hsx-{vllm_ascend_hsx.__version__}"
    return top


def test_sdist_contains_only_the_package_and_its_documents(unpacked: Path) -> None:
    made = {"PKG-INFO", "setup.cfg", "vllm_ascend_hsx.egg-info"}
    assert {path.name for path in unpacked.iterdir()} == {
        *distributions.SOURCES,
        *made,
        "vllm_ascend_hsx",
    }
    assert [
        path
        for path in unpacked.rglob("*")
        if path.name == "__pycache__" or path.name.startswith("test_")
    ] == []


def test_sdist_contains_no_path_of_the_build_machine(unpacked: Path) -> None:
    places = re.compile(rb"/(home|Users|root)/|" + re.escape(str(ROOT).encode()) + b"/")
    named = {
        path.name: found[0]
        for path in unpacked.rglob("*")
        if path.is_file() and (found := places.search(path.read_bytes()))
    }
    assert named == {}


def test_every_file_of_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    package = ROOT / "vllm_ascend_hsx"
    files = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - wheel == set()


def test_the_wheel_has_no_emulator_no_cpp_and_no_test_fixtures(wheel: set[str]) -> None:
    assert "vllm_ascend_hsx/py.typed" in wheel
    suffixes = {Path(name).suffix for name in wheel if not name.startswith("vllm_ascend_hsx-")}
    assert suffixes == {".py", ".json", ".typed"}
    named = {name for name in wheel if re.search("emulator|quantised|/loop/", name)}
    assert named == set()


@pytest.mark.parametrize("repository", ["", "https://repository.invalid/hsx"])
def test_the_description_has_no_relative_links_and_urls_name_the_given_repository(
    repository: str, built: Path
) -> None:
    environment = {**os.environ, "HSX_REPO_URL": repository + "/" * bool(repository)}
    done = subprocess.run(
        [sys.executable, "-c", METADATA, next(built.glob("*.tar.gz"))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    metadata = message_from_string(done.stdout)
    body = metadata.get_payload()
    assert isinstance(body, str) and "make demo" in body
    links = re.findall(r"\]\(([^)]*)\)", body)
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    pages = [link.removeprefix(f"{repository}/blob/main/") for link in links]
    assert ("docs/train.md" in pages) == bool(repository)
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL") or [])
    assert urls.get("Source") == (repository or None)


def test_the_wheel_of_the_emulator_has_its_sources_and_torch_npu(emulator_wheel: Path) -> None:
    names = set(zipfile.ZipFile(emulator_wheel).namelist())
    package = ROOT / "emulator" / "ascend_npu_emulator"
    files = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - names == set()
    assert {name.split("/")[0] for name in names - files} == {
        emulator_wheel.name.rpartition("-py3")[0] + ".dist-info"
    }
    assert "ascend_npu_emulator/site/torch_npu/__init__.py" in names


def test_wheel_contains_only_the_package(wheel: set[str]) -> None:
    outside = {
        name for name in wheel if not name.startswith(("vllm_ascend_hsx/", "vllm_ascend_hsx-"))
    }
    assert outside == set()
    assert [name for name in wheel if name.endswith(".pyc")] == []


def test_package_requires_no_torch_vllm_or_vendor_package() -> None:
    always = [text for text in requires("vllm-ascend-hsx") or [] if "extra ==" not in text]
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in always}
    assert names == {
        "awscrt",
        "httpx",
        "numpy",
        "openai",
        "packaging",
        "pydantic",
        "rich",
        "safetensors",
        "wrapt",
    }


def interpreter(version: str) -> str:
    """Return the path of this version of Python. Skip the test if it is not installed."""
    found = shutil.which(f"python{version}")
    works = (
        found
        and subprocess.run(
            [found, "-c", "import venv"], stderr=subprocess.DEVNULL, check=False
        ).returncode
        == 0
    )
    if not (found and works):
        pytest.skip(f"python{version} is not on PATH")
    return found


OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = [
    pytest.param(each, marks=[] if each == OWN else pytest.mark.long)
    for each in ("3.10", "3.11", "3.12")
]


@pytest.fixture(scope="module", params=VERSIONS)
def empty(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """bin/ of an environment with only the wheel and the packages that it requires."""
    python = sys.executable if request.param == OWN else interpreter(request.param)
    where = tmp_path_factory.mktemp("empty")
    subprocess.run([python, "-m", "venv", where], check=True)
    pip = [where / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    (path,) = built.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--quiet", path],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    listed = subprocess.run(
        [*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout
    assert not re.findall(
        "^(?:torch|vllm|nvidia).*==", listed.replace("vllm-ascend-hsx==", ""), re.MULTILINE
    )
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
    """Run without the variables of this process. Return the exit code and the output."""
    environment = {"PATH": "/usr/bin:/bin", **({} if torch is None else {"PYTHONPATH": str(torch)})}
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_commands_work_or_name_the_missing_package_in_an_empty_environment(
    empty: Path, files: Path, tmp_path: Path
) -> None:
    assert run(empty / "hsx", "--version") == (0, f"hsx {vllm_ascend_hsx.__version__}\n")
    code, printed = run(
        empty / "hsx", "plan", "minimax-m2", "--tp", "8", "--dp", "2", "--layers", "2,31,59,62"
    )
    assert (code, "TP=8 x DP=2" in printed) == (0, True), printed
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 62, "architectures": ["MiniMaxM2ForCausalLM"]}'
    )
    code, printed = run(empty / "hsx", "serve", tmp_path, "--dry-run")
    assert (code, printed.split()[:3]) == (0, ["vllm", "serve", str(tmp_path)])
    code, printed = run(
        empty / "hsx",
        "generate",
        "--data",
        tmp_path / "none.jsonl",
        "--output",
        tmp_path / "o",
        "--endpoint",
        "http://localhost:1/v1",
    )
    assert (code, "Traceback" in printed) == (2, False), printed
    code, printed = run(empty / "hsx", "inspect", files)
    assert (code, "Traceback" in printed) == (1, False), printed
    assert printed.splitlines()[-1].startswith(
        "hsx inspect: torch is not installed; install any build of torch"
    )
    assert run(empty / "hsx", "verify", files)[0] == 0
    code, printed = run(
        empty / "python",
        "-c",
        f"import vllm_ascend_hsx; vllm_ascend_hsx.load({str(files / 'one.safetensors')!r})",
    )
    assert (code, "vllm-ascend-hsx[reader]" in printed.splitlines()[-1]) == (1, True)


def test_emulator_is_installed_separately_from_the_plugin(
    empty: Path, emulator_wheel: Path
) -> None:
    code, printed = run(empty / "hsx", "emulate", "--", "true")
    assert (code, "install vllm-ascend-hsx[demo]" in printed) == (2, True), printed
    pip = [empty / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, emulator_wheel], check=True)
    for command in ("npu-emulate", "hsx emulate"):
        name, *words = command.split()
        code, printed = run(empty / name, *words, "--npus", "2", "--", "env")
        assert (code, "NPU_EMULATOR_NPUS=2" in printed) == (0, True), printed
    subprocess.run([*pip[:3], "uninstall", "--quiet", "--yes", "ascend-npu-emulator"], check=True)


def test_extra_demo_allows_the_emulator_of_this_checkout(emulator_wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = map(Requirement, project["optional-dependencies"]["demo"])
    _, version, *_ = emulator_wheel.name.split("-")
    assert wanted.name == "ascend-npu-emulator" and version in wanted.specifier


def test_every_module_imports_or_lacks_a_package_of_the_server_or_an_extra(
    empty: Path,
) -> None:
    code, printed = run(empty / "python", "-c", IMPORTS)
    number, lacking = printed.split(maxsplit=1)
    assert code == 0 and int(number) > 150, printed
    of_server = {
        "openai",
        "tokenizers",
        "torch",
        "torch_npu",
        "transformers",
        "vllm",
        "vllm_ascend",
    }
    assert set(ast.literal_eval(lacking)) <= {
        *of_server,
        "ascend_npu_emulator",
        "mooncake",
        "pyarrow",
        "ray",
        "speculators",
    }


@pytest.mark.parametrize("empty", [OWN], indirect=True)  # this torch is built for this Python
def test_reader_works_after_torch_is_added(empty: Path, files: Path, tmp_path: Path) -> None:
    site = Path(import_module("torch").__file__ or "").parents[1]
    for name in TORCH:
        (tmp_path / name).symlink_to(site / name)
    code, printed = run(empty / "python", "-c", READS, files, torch=tmp_path)
    assert (code, printed.splitlines()[-1]) == (0, "384.0 [[0, 1, 2]]"), printed
    for command in ("inspect", "verify"):
        code, printed = run(empty / "hsx", command, files, torch=tmp_path)
        assert code == 0, printed
