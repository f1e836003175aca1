"""`npu-emulate`, the settings that it passes on, and the cache of the compiled library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import scenarios

from ascend_npu_emulator import build
from ascend_npu_emulator.launch import SITE, environment, main
from ascend_npu_emulator.settings import SettingError, Settings, parse_size


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `npu-emulate` as a user types it."""
    environ = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("NPU_EMULATOR_") or k == "NPU_EMULATOR_CACHE"
    } | variables
    program = "import sys; from ascend_npu_emulator.launch import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


SHOW = (
    "import torch, os; p = torch.npu.get_device_properties(0); from "
    "ascend_npu_emulator.native import core; "
    "print(torch.npu.device_count(), p.total_memory, core.late(), core.queue())"
)


SET = {
    "NPU_EMULATOR_NPUS": "5",
    "NPU_EMULATOR_HBM": "1GiB",
    "NPU_EMULATOR_LATE": "1",
    "NPU_EMULATOR_QUEUE": "1",
}
MACHINES: dict[str, tuple[tuple[str, ...], dict[str, str], list[str]]] = {
    "options": (
        ("--npus", "3", "--hbm", "512MiB", "--late"),
        {},
        ["3", str(512 << 20), "True", "False"],
    ),
    "queue mode": (("--queue",), {}, ["8", str(2 << 30), "False", "True"]),
    "defaults": ((), {}, ["8", str(2 << 30), "False", "False"]),
    "variables as the defaults": (
        ("--npus", "2"),
        SET,
        ["2", str(1 << 30), "True", "True"],
    ),
}


@scenarios("options, variables, shown", MACHINES)
def test_command_runs_on_the_configured_machine(
    options: tuple[str, ...], variables: dict[str, str], shown: list[str]
) -> None:
    done = run(*options, "--", sys.executable, "-c", SHOW, **variables)
    assert done.stdout.split() == shown, done.stderr


def test_vllm_ascend_detects_the_given_soc() -> None:
    program = """
import torch
from vllm_ascend.utils import check_ascend_device_type, get_ascend_device_type
check_ascend_device_type()
print(get_ascend_device_type().name, torch.npu.get_device_name(), torch.npu.get_soc_version())
"""
    done = run("--soc", "a3", "--", sys.executable, "-c", program)
    assert done.stdout.split()[-3:] == ["A3", "Ascend910_9362", "255"], done.stderr


@pytest.mark.parametrize("options", [(), ("--late",)], ids=["at once", "late"])
def test_device_memory_does_not_reveal_old_host_memory(options: tuple[str, ...]) -> None:
    """Upstream multiplies unwritten padding rows by 0. The product is 0 unless a row has NaN."""
    used = (
        "import torch, numpy; used = [numpy.full(4096, -1, numpy.int16) for _ in range(99)]; del "
        "used; "
    )
    shown = (
        "print({torch.empty(4096, dtype=torch.bfloat16, device='npu').float().unique().item() "
        "for _ in range(99)})"
    )
    done = run(*options, "--", sys.executable, "-c", used + shown)
    assert done.stdout.strip() == "{784.0}", done.stderr


@pytest.mark.parametrize("imports", ["torch, torch_npu", "torch_npu, torch"])
def test_torch_and_torch_npu_can_be_imported_in_either_order(imports: str) -> None:
    shown = (
        "print(torch.npu.device_count(), torch_npu.npu.device_count(), "
        "os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    )
    done = run("--npus", "3", "--", sys.executable, "-c", f"import {imports}, os; {shown}")
    assert done.stdout.split() == ["3", "3", "None"], done.stderr


def test_help_shows_the_defaults() -> None:
    text = run("--help").stdout
    assert "(default: 8)" in text
    assert "(default: 2GiB)" in text


def test_child_processes_inherit_the_devices_and_exit_codes_pass_through() -> None:
    inner = (
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {SHOW!r}]) or 7)"
    )
    done = run("--npus", "4", "--", sys.executable, "-c", inner)
    assert done.stdout.split()[0] == "4"
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no command given"),
        (("--npus", "2", "--"), 2, "no command given"),
        (
            ("--npus", "none", "--", "true"),
            2,
            "--npus='none' cannot be used: give a number from 1 to 64",
        ),
        (("--npus", "65", "--", "true"), 2, "--npus='65' cannot be used"),
        (
            ("--hbm", "huge", "--", "true"),
            2,
            "--hbm='huge' cannot be used: give a size such as 512MiB or 2GiB",
        ),
        (("--hbm", "1MiB", "--", "true"), 2, "at least 256MiB"),
        (("--", "no-such-program"), 127, "'no-such-program' is not on PATH"),
    ],
)
def test_invalid_command_line_gives_a_one_line_error(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_environment_puts_the_site_directory_first_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/somewhere", str(SITE)]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    added = environment(npus=4, hbm_bytes=1 << 30, late=True)
    assert added["PYTHONPATH"].split(os.pathsep) == [str(SITE), "/somewhere"]
    expected = {
        "NPU_EMULATOR_NPUS": "4",
        "NPU_EMULATOR_LATE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    assert expected.items() <= added.items()
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the user's choice is kept
    assert environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("1.5G", 3 << 29),
        ("2 gib", 2 << 30),
        ("256M", 256 << 20),
    ],
)
def test_units_of_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size("--hbm", text) == size


WRONG_VARIABLES = {
    "NPU_EMULATOR_NPUS": "0",
    "NPU_EMULATOR_HBM": "lots",
    "NPU_EMULATOR_LATE": "yes",
    "NPU_EMULATOR_SOC": "A3",
    "NPU_EMULATOR_QUEUE": "on",
    "NPU_EMULATOR_SPIN": "fast",
}


@pytest.mark.parametrize(("name", "value"), WRONG_VARIABLES.items())
def test_error_names_invalid_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name}='{value}' cannot be used"):
        Settings.from_environment()


def test_visible_devices_are_counted_until_the_first_unknown_id() -> None:
    program = """
import os, torch
for visible in ("0,2", "1,9,2", "", "3"):
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible  # read until a device is used
    print(torch.npu.device_count())
"""
    assert run("--npus", "4", "--", sys.executable, "-c", program).stdout.split() == [
        "2",
        "1",
        "0",
        "1",
    ]


def test_forked_child_cannot_use_devices_after_its_parent() -> None:
    program = """
import os, torch
torch.ones(1, device="npu")
if os.fork() == 0:
    try:
        torch.ones(1, device="npu")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = run("--", sys.executable, "-c", program)
    assert "Cannot re-initialize NPU in forked subprocess" in done.stdout, done.stderr


# ---- the compiled library ----

FAKE_COMPILER = """#!/bin/sh
echo compiled >> "$COUNT"
sleep 1
while [ $# -gt 0 ]; do
  if [ "$1" = "-o" ]; then echo library > "$2"; fi
  shift
done
"""


def test_processes_that_start_together_compile_the_library_once(tmp_path: Path) -> None:
    compiler, count = tmp_path / "c++", tmp_path / "count"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    environ = {
        **os.environ,
        "CXX": str(compiler),
        "COUNT": str(count),
        "NPU_EMULATOR_CACHE": str(tmp_path / "cache"),
    }
    # Loading the devices would compile the library too.
    environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    program = "from ascend_npu_emulator.build import library; print(library().read_text().strip())"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [out for out, _ in outputs] == ["library\n"] * 4, outputs
    assert count.read_text() == "compiled\n"
    assert sum("npu-emulate: compiling the emulated NPU, once" in err for _, err in outputs) == 1
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_missing_compiler_is_a_clear_error(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        build.BuildError,
        match="no C\\+\\+ compiler: 'no-such-compiler' is not on PATH. Install g\\+\\+",
    ):
        build.library()


def test_missing_python_headers_are_a_clear_error(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(build.BuildError, match=f"no Python headers in {tmp_path}.*python3-dev"):
        build.library()


def test_compiler_failure_is_quoted_and_leaves_no_file(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'npu.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="error: no such thing"):
        build.library()
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]


def test_error_names_unwritable_cache_and_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        build.BuildError, match="cannot create the cache directory.*NPU_EMULATOR_CACHE"
    ):
        build.library()


def test_cache_key_depends_on_source_torch_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {build._key("2.13.0")}
    names.add(build._key("2.13.1"))
    monkeypatch.setenv("CXX", "clang++")
    names.add(build._key("2.13.0"))
    (tmp_path / "npu.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    names.add(build._key("2.13.0"))
    assert len(names) == 4
