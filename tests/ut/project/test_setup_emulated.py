"""Set-up of the emulated stack: exact pins, no CUDA packages, no repeated steps."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "setup_emulated", ROOT / "tools" / "setup_emulated.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_release_of_vllm_ascend_pins_the_matching_vllm(setup: ModuleType) -> None:
    found = {
        release: setup.read_pins(setup.PINS / f"{release}.txt") for release in setup.releases()
    }
    assert setup.DEFAULT in found
    assert {pins["vllm-ascend"]: pins["vllm"] for pins in found.values()} == {
        pair.vllm_ascend: pair.vllm for pair in CHECKED_PAIRS
    }
    assert all(pins["vllm-ascend"] == release for release, pins in found.items())


@pytest.mark.parametrize("release", ["", "0.30.0rc2"])
def test_make_and_the_set_up_choose_the_same_environment(setup: ModuleType, release: str) -> None:
    environment = {**os.environ, "VLLM_ASCEND": release or setup.DEFAULT}
    printed = subprocess.run(
        ["make", "-n", "docs"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    code = "import setup_emulated; print(setup_emulated.VENV.name)"
    command = [sys.executable, "-c", code]
    environment["PYTHONPATH"] = str(ROOT / "tools")
    venv = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    assert venv == (f".venv-{release}" if release else ".venv")
    assert f"\n{venv}/bin/python -m mkdocs" in f"\n{printed}"


def test_unknown_release_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "VLLM_ASCEND", "0.9.1")
    with pytest.raises(
        setup.SetupError, match=r"VLLM_ASCEND=0\.9\.1 is not known; choose one of 0\.23\.0, "
    ):
        setup.check_host()


def test_no_pin_is_a_package_that_needs_an_accelerator(setup: ModuleType) -> None:
    assert [name for name in setup.all_pins() if setup.FOREIGN.match(name)] == []


@pytest.mark.parametrize("line", ["numpy>=1.26", "numpy", "-e .", "git+https://x/y", "numpy==2.*"])
def test_anything_but_an_exact_pin_is_an_error(
    line: str, setup: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "pins.txt"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(setup.SetupError, match=r"pins\.txt:2: .* is not an exact pin"):
        setup.read_pins(path)


def test_a_cuda_build_is_refused_by_its_own_requirements(setup: ModuleType) -> None:
    requires = [
        "sympy>=1.13.3",
        'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"',
        "cuda-bindings<14",
    ]
    with pytest.raises(setup.SetupError, match=r"torch 2\.13\.0, a CUDA build .*find-links"):
        setup.refuse_cuda_metadata({"version": "2.13.0", "requires_dist": requires})
    setup.refuse_cuda_metadata(
        {"version": "2.13.0+cpu", "requires_dist": ["sympy>=1.13.3", "filelock"]}
    )
    setup.refuse_cuda_metadata({"version": "2.13.0+cpu"})


def test_this_environment_matches_the_pins() -> None:
    """Check in a separate process: the emulator's torch_npu may be on the path of this process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / "setup_emulated.py"), "--check"]
    environment["VLLM_ASCEND"] = version("vllm_ascend")
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_and_replaced_packages_are_reported(setup: ModuleType) -> None:
    right = {**setup.all_pins(), "torch": "2.13.0+cpu", "something-of-the-user": "1.0"}
    assert setup.find_problems(right, None) == []
    wrong = {**right, "numpy": "2.0.0", "nvidia-nccl-cu13": "2.29.7"}
    del wrong["vllm"]
    assert setup.find_problems(wrong, "13.0") == [
        f"numpy is 2.0.0, the pin is {setup.all_pins()['numpy']}",
        f"vllm is missing, the pin is {setup.all_pins()['vllm']}",
        "nvidia-nccl-cu13 2.29.7 is installed; it does not belong on an emulated NPU",
        "torch is a CUDA build (13.0); something replaced the CPU build",
    ]


def test_finished_set_up_is_repeated_only_after_a_change(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==2.3.5\n")
    monkeypatch.setattr(setup, "VENV", venv)
    monkeypatch.setattr(setup, "STAMP", venv / "stamp.json")
    monkeypatch.setattr(setup, "PIN_FILES", (pins,))
    assert not setup.is_current()
    (venv / "stamp.json").write_text(json.dumps({"key": setup.setup_key()}))
    assert setup.is_current()
    (venv / "stamp.json").write_text('{"key": ')
    assert not setup.is_current()
    (venv / "stamp.json").write_text(json.dumps({"key": setup.setup_key()}))
    pins.write_text("numpy==2.3.6\n")
    assert not setup.is_current()


def test_refusal_of_another_python_names_the_required_version(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "PYTHON_VERSION", (3, 99))
    with pytest.raises(setup.SetupError, match=r"pinned for Python 3\.99.*make PYTHON="):
        setup.check_host()


def test_error_of_a_failed_step_has_the_end_of_the_output_and_the_path_of_the_log(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "log")
    with pytest.raises(setup.SetupError, match=r"building: failed .exit code 4.*log") as failure:
        setup.Steps(1).run(
            "building",
            ["true"],
            [sys.executable, "-c", "import sys; print('no room on disk'); sys.exit(4)"],
        )
    assert "no room on disk" in str(failure.value)


def test_incomplete_virtual_environment_is_detected(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "VENV", tmp_path)
    assert not setup.venv_works()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    assert not setup.venv_works()


def test_virtual_environment_of_another_python_is_detected(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    assert setup.venv_works()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert not setup.venv_works()


# Libraries of Mooncake


@pytest.fixture
def libraries() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "mooncake_libraries", ROOT / "tools" / "mooncake_libraries.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without libibverbs, with fake commands in bin/ and the package in site/mooncake."""
    package, own, commands = (
        tmp_path / "site" / "mooncake",
        tmp_path / "site" / "mooncake_transfer_engine_non_cuda.libs",
        tmp_path / "bin",
    )
    for folder in (package, own, commands):
        folder.mkdir(parents=True)
    put_command(
        commands,
        "ldd",
        (
            f'[ -e {own}/libibverbs.so.1 ] && echo "all there" || echo "\tlibibverbs.so.1 => not '
            'found"'
        ),
    )
    # Like apt: `update` fills the lists, a simulated installation prints the packages, and
    # `download` fetches them into the working directory.
    apt = f"""
echo "$@" >> {tmp_path}/calls
case "$*" in
  *update*) ;;
  *simulate*) echo "Inst libnl-3-200 (3.7 Debian [amd64])"; echo "Inst libibverbs1 (44 Debian [amd64])"; echo "Conf libibverbs1 (44)" ;;
  *download*) for each in "${{@: -2}}"; do touch "$each.deb"; done ;;
esac"""
    put_command(commands, "apt-get", apt)
    unpack = """
folder=$3/usr/lib/x86_64-linux-gnu; name=$(basename $2 .deb); [ $name = libibverbs1 ] && name=libibverbs
mkdir -p $folder/rsocket
touch $folder/$name.so.1.14.44.0 $folder/rsocket/preload.so.1
ln -sf $name.so.1.14.44.0 $folder/$name.so.1"""
    put_command(commands, "dpkg-deb", unpack)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    return tmp_path


def put_command(commands: Path, name: str, script: str) -> None:
    path = commands / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_missing_libraries_and_their_dependencies_are_downloaded_but_not_installed(
    libraries: ModuleType, machine: Path
) -> None:
    libraries.provide(machine / "site" / "mooncake")
    assert sorted(os.listdir(machine / "site" / libraries.OWN_LIBRARIES)) == [
        "libibverbs.so.1",
        "libnl-3-200.so.1",
    ]
    calls = (machine / "calls").read_text().splitlines()
    assert [call.partition(" -q")[0].split()[-1] for call in calls] == [
        "update",
        "--no-install-recommends",
        "download",
    ]
    assert calls[1].endswith("install --simulate --no-install-recommends -q libibverbs1")
    assert all("Dir::State::lists=/" in call and "Dir::Cache=/" in call for call in calls)
    libraries.provide(machine / "site" / "mooncake")
    assert len((machine / "calls").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("command", "script", "why"),
    [
        ("apt-get", None, "apt-get is missing; install the Debian packages libibverbs1"),
        ("apt-get", "echo E: no network; exit 100", "apt-get update failed: E: no network"),
        ("dpkg-deb", "exit 0", "Debian's packages do not have them"),
        (
            "ldd",
            'echo "\tlibnew.so.7 => not found"',
            "libnew.so.7 not found: no known Debian package has them",
        ),
        ("ldd", "echo not for this machine; exit 1", "not for this machine"),
    ],
)
def test_unavailable_libraries_are_reported_with_the_reason(
    libraries: ModuleType,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    script: str | None,
    why: str,
) -> None:
    if script is None:
        (machine / "bin" / command).unlink()
        monkeypatch.setattr(
            libraries.shutil, "which", lambda name: None if name == command else name
        )
    else:
        put_command(machine / "bin", command, script)
    with pytest.raises(libraries.LibrariesError) as failure:
        libraries.provide(machine / "site" / "mooncake")
    assert why in str(failure.value)
