"""`hsx doctor` reports what is missing, what differs and what does not work, each with something to do about it."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import blocks

import vllm_ascend_hsx
from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.cli import doctor as command
from vllm_ascend_hsx.compat import versions as compat_versions
from vllm_ascend_hsx.compat.patch_points import MARK, POINTS, PatchPoint, Use, problem_of
from vllm_ascend_hsx.compat.runner import RUNNER_HOOKS
from vllm_ascend_hsx.compat.versions import Pair
from vllm_ascend_hsx.doctor import patch_points, software, storage
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.doctor.patch_points import check_patch_points
from vllm_ascend_hsx.doctor.software import check_software
from vllm_ascend_hsx.doctor.storage import check_storage, filesystem_of
from vllm_ascend_hsx.doctor.target import check_target, stored_format
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions

PACKAGE = Path(vllm_ascend_hsx.__file__).parent
ROOT = Path(__file__).parents[2]


def by_name(found: Iterator[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in found}


# The declared patch points


NOT_DECLARING = ("__init__", "patch_points", "qwen3_next", "targets", "versions")


def declaring_sources() -> list[str]:
    """What reaches into vLLM or vllm-ascend."""
    paths = [path for path in (PACKAGE / "compat").glob("*.py") if path.stem not in NOT_DECLARING]
    return [path.read_text() for path in (*paths, PACKAGE / "plugin.py")]


def test_every_import_from_vllm_is_declared() -> None:
    imported = {
        (node.module, alias.name)
        for source in declaring_sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("vllm", "vllm_ascend")
        for alias in node.names
    }
    assert len(imported) >= 12
    assert imported <= {(point.module, point.path[0]) for point in POINTS}


def test_every_declaration_is_used_and_there_is_one_of_each() -> None:
    sources = "\n".join(declaring_sources())
    declared = {point.path[-1] for point in POINTS if not point.replacement} - set(RUNNER_HOOKS)
    assert len(declared) >= 12
    assert not [name for name in declared if len(re.findall(rf"\b{name}\b", sources)) < 2]
    assert len({(point.name, point.versions) for point in POINTS}) == len(POINTS)


def test_what_a_patch_takes_is_read_from_its_function() -> None:
    by_path = {".".join(point.path): point for point in POINTS}
    whole, rest = by_path["Scheduler._connector_finished"], by_path["ServingTokens.serve_tokens"]
    assert (whole.use, whole.takes) == (Use.REPLACED, ("self", "request"))
    assert (rest.use, rest.takes) == (Use.PASSED_ON, ("self", "request"))


@pytest.mark.parametrize(
    ("installed", "versions", "fits"),
    [
        ("0.23.0+empty", ">=0.23,<0.24", True),
        ("0.23.0.post1", ">=0.23,<0.24", True),
        ("0.26.0rc1", ">=0.26,<0.30", True),
        ("0.26.0rc1", ">=0.23,<0.24", False),
        ("0.27.0", ">=0.26,<0.27", True),  # nobody has checked it: as the newest checked release before it
        ("0.9.0", ">=0.23,<0.24", True),  # as the oldest
        (None, ">=0.26,<0.27", True),  # not installed, so never imported
    ],
)
def test_a_patch_is_for_the_releases_that_it_names(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, versions: str, fits: bool
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(compat_versions, "version", version)
    monkeypatch.setattr(compat_versions, "CHECKED_PAIRS", (Pair("0.23.0", "0.23.0.post1"), Pair("0.26.0", "0.26.0rc1")))
    compat_versions.release_to_patch.cache_clear()
    try:
        for module in ("vllm.config", "vllm_ascend.worker"):
            assert PatchPoint(module, ("f",), Use.NAMED, (), (), "it works", versions).fits is fits
    finally:
        compat_versions.release_to_patch.cache_clear()


REGISTER = """
import sys
import wrapt
from vllm_ascend_hsx import plugin
from vllm_ascend_hsx.compat import patch_points

other = patch_points.PatchPoint("vllm_ascend.worker.worker", ("f",), patch_points.Use.REPLACED, (), (), "", ">=99", print)
patch_points.POINTS.append(other)
hooked = []
register = wrapt.register_post_import_hook
wrapt.register_post_import_hook = lambda hook, name: (hooked.append((hook, name)), register(hook, name))
plugin.register()
plugin.register()
ours = [(point.apply, point.module) for point in patch_points.POINTS if point.replacement and point is not other]
early = [name for name in sys.modules if name.startswith(("vllm_ascend.worker", "vllm_ascend.patch", "vllm_ascend.ops"))]
from vllm.v1.core.sched.scheduler import Scheduler
print("FOUND", len(ours) >= 28, hooked == ours, early, Scheduler._connector_finished.__wrapped__.__name__)
"""


def test_the_plugin_applies_every_patch_once_when_its_module_is_imported() -> None:
    """And imports nothing that vllm-ascend patches: a general plugin is loaded before."""
    hsx = [str(Path(sys.executable).with_name("hsx")), "emulate", "--"]
    done = subprocess.run([*hsx, sys.executable, "-c", REGISTER], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found == ["FOUND True True [] _connector_finished"], done.stdout + done.stderr


def exact(self: Any, timeout: Any) -> None: ...
def renamed(self: Any, seconds: Any) -> None: ...
def one_more(self: Any, timeout: Any, force: bool = False) -> None: ...
def one_required(self: Any, timeout: Any, force: bool) -> None: ...


@pytest.mark.parametrize(
    ("use", "function", "holds"),
    [
        (Use.REPLACED, exact, True),
        (Use.REPLACED, renamed, False),
        (Use.REPLACED, one_more, False),
        (Use.PASSED_ON, one_required, True),
        (Use.PASSED_ON, renamed, False),
        (Use.CALLED, one_more, True),
        (Use.CALLED, one_required, False),
        (Use.NAMED, renamed, True),
    ],
)
def test_a_patch_point_holds_as_far_as_we_rely_on_its_signature(use: Use, function: Callable[..., None], holds: bool) -> None:
    point = PatchPoint("module", ("Class", "method"), use, ("self", "timeout"), (), "it stops", "")
    module = SimpleNamespace(Class=SimpleNamespace(method=function))
    assert (problem_of(point, lambda name: module) is None) is holds


def test_what_is_given_by_name_must_be_a_parameter() -> None:
    point = PatchPoint("module", ("f",), Use.CALLED, ("self",), ("timeout",), "it stops", "")
    assert problem_of(point, lambda name: SimpleNamespace(f=exact)) is None
    assert problem_of(point, lambda name: SimpleNamespace(f=renamed)) is not None


def write_tree(directory: Path, leave_out: str = "", rename: tuple[str, str] = ("", "")) -> None:
    """Modules with everything that is declared; without one of them, or with another parameter."""
    sources: dict[str, dict[str, list[str]]] = {"vllm_ascend.ops": {}}
    for point in POINTS:
        classes = sources.setdefault(point.module, {})
        if point.name == leave_out:
            continue
        parameters = ", ".join((*point.takes, *point.keywords))
        if rename[0] == point.name:
            parameters = parameters.replace(*rename[1].split("="))
        owner, name = (point.path[0], point.path[1]) if len(point.path) == 2 else ("", point.path[0])
        body = classes.setdefault(owner, [])
        body.append(f"{name} = 1" if point.use is Use.NAMED and not name.startswith("__") else f"def {name}({parameters}): ...")
    for module, classes in sources.items():
        path = directory.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        lines = [line for name, body in classes.items() if not name for line in body]
        for name, body in classes.items():
            lines += [f"class {name}:", *(f"    {line}" for line in body)] if name else []
        (path / "__init__.py").write_text("\n".join(lines) + "\n")
    for path in directory.rglob("*"):
        if path.is_dir():
            (path / "__init__.py").touch()


def check_tree(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(PACKAGE.parent)]))
    return list(check_patch_points())


def test_a_patch_point_that_is_gone_from_the_installed_packages_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "vllm.v1.core.sched.scheduler.Scheduler.update_from_output"
    write_tree(tmp_path, leave_out=gone)
    found = check_tree(tmp_path, monkeypatch)
    (problem,) = [each for each in found if each.verdict != "ok"]
    assert (problem.name, problem.verdict) == (gone, "problem")
    assert "is not there" in problem.found and "names the failure of its file" in problem.found
    assert "Its version is right" in problem.what_to_do
    assert len(found) == len(POINTS)


def test_a_patch_point_with_other_parameters_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = "vllm_ascend.patch.platform.patch_balance_schedule._disable_preemption_on_prefill_node"
    write_tree(tmp_path, rename=(changed, "vllm_config=scheduler_config"))
    (problem,) = [each for each in check_tree(tmp_path, monkeypatch) if each.verdict != "ok"]
    assert problem.name == changed
    assert problem.found.startswith("its parameters are (scheduler_config), not (vllm_config);")


def test_packages_that_cannot_be_imported_are_one_finding_with_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path)
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("import libascendcl_that_is_not_there\n")
    problems = [each for each in check_tree(tmp_path, monkeypatch) if each.verdict != "ok"]
    number = sum(point.module.startswith("vllm_ascend.") for point in POINTS)
    assert [each.name for each in problems] == ["imports"]
    assert problems[0].found.startswith(f"{number} of {len(POINTS)} patch points could not be checked: ModuleNotFoundError")
    assert "libascendcl_that_is_not_there" in problems[0].found


def test_a_process_that_dies_is_a_finding_with_its_last_line() -> None:
    code = "import os, sys; sys.stderr.write('loading\\nlibhccl.so: undefined symbol\\n'); sys.stderr.flush(); os._exit(9)"
    (found,) = check_patch_points(command=[sys.executable, "-c", code])
    assert found.verdict == "problem" and found.found.endswith("libhccl.so: undefined symbol")
    (consequence,) = check_patch_points(False, [sys.executable, "-c", code])
    assert (consequence.verdict, consequence.what_to_do) == ("note", "Mend what is wrong above, and look again.")
    (silent,) = check_patch_points(command=[sys.executable, "-c", "import os; os._exit(9)"])
    assert silent.found.endswith("exit code 9")


IMPORTS_FAIL = [["a.b", "called", "it works", ["ModuleNotFoundError: No module named 'torch_npu'", True]]]
CHANGED = [["a.b", "called", "it works", ["a.b is not there", False]]]


@pytest.mark.parametrize(
    ("found", "software_is_right", "verdict", "remedy"),
    [
        (IMPORTS_FAIL, False, "note", "Mend what is wrong above, and look again."),
        (IMPORTS_FAIL, True, "problem", "Find out why python -c 'import vllm_ascend.ops' fails."),
        (CHANGED, False, "problem", "Mend what is wrong above, and look again."),
        (CHANGED, True, "problem", "Its version is right, so something has changed it: leave other plugins out (VLLM_PLUGINS)"),
    ],
)
def test_a_patch_point_that_fails_is_a_consequence_of_what_is_installed_or_has_a_remedy_of_its_own(
    found: list[Any], software_is_right: bool, verdict: str, remedy: str
) -> None:
    code = f"print({MARK + json.dumps(found)!r})"
    (finding,) = check_patch_points(software_is_right, [sys.executable, "-c", code])
    assert (finding.verdict, finding.what_to_do[: len(remedy)]) == (verdict, remedy)


def test_a_process_that_hangs_is_a_finding() -> None:
    (found,) = check_patch_points(command=[sys.executable, "-c", "import signal; signal.pause()"], timeout=0.5)
    assert found.verdict == "problem" and "0.5 seconds" in found.found


# Software


def install(directory: Path, name: str, version: str, rest: str = "") -> None:
    """Metadata of a package, as pip leaves it."""
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{rest}")


VLLM_ASCEND = "Requires-Dist: torch==2.10.0\nRequires-Dist: torch-npu==2.10.0.post4\n\n- CANN == 9.1.0 (see the release notes)\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an Ascend machine has, as metadata that comes before this machine's, and in place of the emulated torch_npu."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, version, rest in (
        ("vllm", "0.23.0+empty", ""),
        ("vllm-ascend", "0.23.0", VLLM_ASCEND),
        ("torch", "2.10.0+cpu", ""),
        ("torch-npu", "2.10.0.post4", ""),
    ):
        install(packages, name, version, rest)
    others = [each for each in sys.path if Path(each).resolve() != software.SITE.resolve()]
    # One change: what syspath_prepend undoes would be put back without the emulator.
    monkeypatch.setattr(sys, "path", [str(packages), *others])
    return packages


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of an Ascend machine."""
    root = tmp_path / "root"
    toolkit = root / "usr/local/Ascend/cann" / f"{platform.machine()}-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C25\ncompatible_version=[V100R001C23]\n"
    )
    driver = root / "usr/local/Ascend/driver"
    driver.mkdir()
    (driver / "version.info").write_text("Version=26.0.rc1\nascendhal_version=7.35.23\npackage_version=26.0.rc1\n")
    (root / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (root / "dev" / name).touch()
    return root


def environ_of(root: Path, **more: str) -> dict[str, str]:
    return {"ASCEND_HOME_PATH": str(root / "usr/local/Ascend/cann"), **more}


def test_a_machine_that_has_everything_is_told_its_versions(installed: Path, machine: Path) -> None:
    found = by_name(check_software(environ_of(machine), machine))
    assert {each.verdict for each in found.values()} == {"ok"}
    versions = {name: each.found for name, each in found.items() if name != "plugin"}
    assert versions == {
        "vllm": "0.23.0+empty",
        "vllm-ascend": "0.23.0",
        "torch": "2.10.0+cpu",
        "torch-npu": "2.10.0.post4",
        "CANN": "9.1.0",
        "driver": "26.0.rc1",
        "NPUs": "2",
    }


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("vllm", "0.24.0", "0.23.0"),
        ("vllm-ascend", "0.23.1", "0.23.0"),
        ("torch", "2.11.0", "2.10.0"),
        ("torch-npu", "2.10.0", "2.10.0.post4"),
    ],
)
def test_a_version_that_differs_is_a_problem_that_names_the_right_one(
    installed: Path, machine: Path, name: str, version: str, expected: str
) -> None:
    without(installed, name)
    install(installed, name, version, VLLM_ASCEND if name == "vllm-ascend" else "")
    found = by_name(check_software(environ_of(machine), machine))[name]
    assert found.verdict == "problem"
    assert version in found.found and f"pip install {name}=={expected}" in found.what_to_do


def test_what_is_not_installed_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    found = by_name(check_software({}, tmp_path))
    assert {name for name, each in found.items() if each.verdict == "problem"} == {"NPUs", "vllm", "vllm-ascend", "plugin"}
    assert found["vllm"].what_to_do == "Install it: pip install vllm==0.23.0."
    assert found["plugin"].found == "no entry point vllm.general_plugins: ascend_hsx"


def without(packages: Path, name: str) -> None:
    (metadata,) = packages.glob(f"{name.replace('-', '_')}-[0-9]*.dist-info")
    (metadata / "METADATA").unlink()
    metadata.rmdir()


def test_a_machine_without_an_npu_has_one_problem_and_is_told_of_the_emulator(installed: Path, tmp_path: Path) -> None:
    without(installed, "torch-npu")
    without(installed, "torch")
    install(installed, "torch", "2.13.0+cpu")
    found = list(check_software({}, tmp_path))
    (problem,) = [each for each in found if each.verdict == "problem"]
    assert found[0] == problem and problem.name == "NPUs"
    assert "hsx emulate -- hsx doctor" in problem.what_to_do
    notes = [each for each in found if each.verdict == "note"]
    assert {each.name for each in notes} == {"torch", "torch-npu"}
    assert not [each for each in found if "nstall" in each.what_to_do]


def test_an_npu_without_torch_npu_is_told_to_install_it(installed: Path, machine: Path) -> None:
    without(installed, "torch-npu")
    found = by_name(check_software(environ_of(machine), machine))
    assert {name for name, each in found.items() if each.verdict == "problem"} == {"torch-npu"}
    assert found["torch-npu"].what_to_do == "Install it: pip install torch-npu==2.10.0.post4."


def test_another_cann_is_a_problem(installed: Path, machine: Path) -> None:
    (info,) = machine.rglob("ascend_toolkit_install.info")
    info.write_text("version=8.5.0\n")
    found = by_name(check_software(environ_of(machine), machine))["CANN"]
    assert found.verdict == "problem" and found.found == "8.5.0; vllm-ascend wants 9.1.0"


def test_a_cann_that_no_variable_leads_to_is_a_problem(installed: Path, machine: Path) -> None:
    found = by_name(check_software({}, machine))["CANN"]
    assert found.verdict == "problem" and "9.1.0" in found.found
    assert "set_env.sh" in found.what_to_do


def test_the_release_is_read_where_the_toolkit_left_only_its_components_versions(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/version.info").write_text("Version=7.6.0.1.220:8.0.0\n")
    assert software.cann_version(tmp_path) == "8.0.0"


def test_a_container_without_driver_and_npus_is_told_what_to_mount(installed: Path, machine: Path) -> None:
    (machine / "usr/local/Ascend/driver/version.info").unlink()
    for path in (machine / "dev").iterdir():
        if path.name != "davinci_manager":
            path.unlink()
    found = by_name(check_software(environ_of(machine), machine))
    assert "mount /usr/local/Ascend/driver/version.info" in found["driver"].what_to_do
    assert found["NPUs"].verdict == "problem"


def test_a_plugin_that_vllm_is_kept_from_loading_is_a_problem(installed: Path, machine: Path) -> None:
    found = by_name(check_software(environ_of(machine, VLLM_PLUGINS="ascend,ascend_model"), machine))["plugin"]
    assert found.verdict == "problem" and found.what_to_do == "Add ascend_hsx to VLLM_PLUGINS, or unset it."
    found = by_name(check_software(environ_of(machine, VLLM_PLUGINS="ascend,ascend_hsx"), machine))["plugin"]
    assert found.verdict == "ok"


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False)])
def test_the_v2_runner_is_a_problem(installed: Path, machine: Path, value: str, refused: bool) -> None:
    found = by_name(check_software(environ_of(machine, VLLM_USE_V2_MODEL_RUNNER=value), machine))
    assert ("model runner" in found) is refused
    assert not refused or found["model runner"].verdict == "problem"


def test_an_emulated_npu_is_named_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(software.SITE))
    found = by_name(check_software({"HSX_EMULATOR_NPUS": "4"}, tmp_path))
    assert found["NPUs"].verdict == "note" and found["NPUs"].found.startswith("4, emulated")
    assert "emulated" in found["torch-npu"].found
    assert {"CANN", "driver"}.isdisjoint(found)


# Storage


@pytest.mark.parametrize("options", [FileOptions(), FileOptions(use_lock=False), FileOptions(durability="fdatasync")])
def test_a_directory_is_used_as_a_server_does_and_left_as_it_was(tmp_path: Path, options: FileOptions) -> None:
    (tmp_path / "other.safetensors").touch()
    found = by_name(check_storage(tmp_path, options, num_bytes=16 << 20))
    assert found["directory"].verdict == found["write speed"].verdict == "ok"
    assert "16 MiB" in found["write speed"].found and "estimate" in found["write speed"].found
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]


def test_free_space_is_counted_in_rows_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_free", lambda directory: 3 << 30)
    plain = by_name(check_storage(tmp_path, FileOptions(), num_bytes=16 << 20))["free space"]
    assert plain.found == "3.22 GB: some 98,304 tokens of 4 layers x 8,192 bytes"
    row_format = stored_format(config_json(tmp_path, hidden_size=1024))
    found = by_name(check_storage(tmp_path, FileOptions(), row_format, 16 << 20))["free space"]
    assert found.found == "3.22 GB: some 393,216 tokens of 4 layers x 2,048 bytes"
    assert stored_format("minimax-m2").hidden_size == 3072


def test_a_directory_that_is_not_there_is_said_to_be_new(tmp_path: Path) -> None:
    assert "did not exist and was created" in by_name(check_storage(tmp_path / "new", FileOptions(), num_bytes=16 << 20))["directory"].found
    assert "did not exist" not in by_name(check_storage(tmp_path / "new", FileOptions(), num_bytes=16 << 20))["directory"].found


def test_a_directory_that_cannot_be_used_is_a_problem_with_the_sinks_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = check_storage(tmp_path / "file", FileOptions())
    assert found.verdict == "problem" and "cannot be a directory" in found.found
    assert found.what_to_do == "Name a directory, or remove what is there."


def test_a_full_disk_is_a_problem_and_nothing_is_written_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_free", lambda directory: 100 << 20)
    found = by_name(check_storage(tmp_path, FileOptions()))
    assert found["free space"].verdict == "problem"
    assert found["write speed"].verdict == "note" and found["write speed"].found.startswith("not measured")


def test_a_write_that_fails_is_a_problem_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend_hsx.sinks.request_file import RequestFile

    def fail(self: RequestFile, first: int, rows: Any) -> None:
        raise SinkError(self.request_id, self.path, "Input/output error (EIO)")

    monkeypatch.setattr(RequestFile, "write", fail)
    found = by_name(check_storage(tmp_path, FileOptions(), num_bytes=16 << 20))["write speed"]
    assert found.verdict == "problem" and "EIO" in found.found
    assert not list(tmp_path.iterdir())


def test_the_filesystem_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(
        "20 1 0:18 / / rw - overlay overlay rw\n"
        "21 20 0:19 / /data rw,noatime shared:2 - ext4 /dev/sda rw\n"
        "22 20 0:20 / /data/my\\040files rw - lustre mds:/fs rw\n"
    )
    kinds = [filesystem_of(Path(path), tmp_path) for path in ("/srv", "/data", "/database", "/data/my files/rows")]
    assert kinds == ["overlay", "ext4", "overlay", "lustre"]


# Target


def config_json(directory: Path, **fields: object) -> str:
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def test_a_target_that_collects_hidden_states_is_good() -> None:
    found = by_name(check_target("minimax-m2"))
    assert found["model"].verdict == found["plan"].verdict == "ok"
    assert "MiniMaxM2ForCausalLM" in found["model"].found
    assert found["plan"].found == "62 layers x 3072, bfloat16: 6,144 bytes per token and layer"


def test_a_target_that_a_server_refuses_is_a_problem_that_lists_the_others(tmp_path: Path) -> None:
    (found,) = check_target(config_json(tmp_path, architectures=["OlmoForCausalLM"]))
    assert found.verdict == "problem" and "OlmoForCausalLM" in found.found
    assert "MiniMaxM2ForCausalLM" in found.what_to_do


def test_a_target_that_vllm_ascend_cannot_serve_is_a_problem_with_the_reason(tmp_path: Path) -> None:
    (found,) = check_target(config_json(tmp_path, architectures=["NemotronHForCausalLM"], hybrid_override_pattern="M*ME"))
    assert found.verdict == "problem" and "NemotronHForCausalLM" in found.found
    assert "Mamba-2" in found.found and "model_runner_v1.py" in found.found and "fused_moe/layer.py" in found.found
    assert "MiniMaxM2ForCausalLM" in found.what_to_do


def test_a_target_that_no_test_has_served_is_not_called_ok(tmp_path: Path) -> None:
    found = by_name(check_target(config_json(tmp_path, architectures=["LlamaForCausalLM"])))["model"]
    assert found.verdict == "note" and "collects hidden states" in found.found and "no test" in found.found
    assert found.what_to_do.startswith("Compare its rows with transformers first: hsx demo --device npu --model ")


def test_a_target_that_cannot_be_planned_can_still_be_extracted(tmp_path: Path) -> None:
    model = config_json(tmp_path, architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)
    found = by_name(check_target(model))
    assert found["model"].verdict == "ok"
    assert found["plan"].verdict == "note" and "has no hidden_size" in found["plan"].found


# The command


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Findings of software and patch points that the command is to show."""
    found = [Finding("software", "vllm", "ok", "0.23.0")]
    monkeypatch.setattr(command, "check_software", lambda: iter(found))
    held = Finding("patch points", "a.b", "ok", "called")
    monkeypatch.setattr(patch_points, "check_patch_points", lambda software_is_right: iter([held]))
    return found


def test_what_takes_long_is_announced_on_stderr(healthy: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"]
    assert "importing vllm and vllm-ascend" in shown.err and f"writing 256 MiB to {tmp_path}" in shown.err


def test_the_exit_code_says_whether_there_are_problems(healthy: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "all 1 hold" in (shown := capsys.readouterr().out) and "no problems" in shown
    healthy.append(Finding("software", "CANN", "problem", "not found [here]", "Install it."))
    assert command.main([]) == 1
    shown = capsys.readouterr().out
    assert "not found [here]" in shown and "Install it." in shown and "1 problem:" in shown


def test_json_has_every_finding(healthy: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--model", "qwen3.5-27b"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert asdict(healthy[0]) in shown["findings"]
    assert all(each["what_to_do"] for each in shown["findings"])
    assert {each["topic"] for each in shown["findings"]} == {"software", "patch points", "target"}


def test_a_model_that_is_none_is_a_mistake_in_the_command(healthy: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.startswith("hsx doctor: MODEL='no-such-model' is neither a preset nor a file")


@pytest.mark.parametrize("words", [["--io", "direct"], ["--no-lock"], ["--io", "fast", "--out", "x"], ["directory"]])
def test_options_that_say_nothing_are_refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parse_arguments(words)
    assert stopped.value.code == 2


def test_the_command_starts_without_torch_and_vllm() -> None:
    code = "import sys, vllm_ascend_hsx.cli.doctor; print({'torch', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout == "set()\n"


def test_the_documented_command_is_one_that_hsx_accepts() -> None:
    (shown,) = blocks("operations.md", "doctor")
    words = shlex.split(shown)
    assert words[:2] == ["hsx", "doctor"]
    assert command.parse_arguments(words[2:]).out == Path("/data/hidden_states")


def test_a_problem_without_a_remedy_cannot_be_reported() -> None:
    with pytest.raises(ValueError, match="something to do about it"):
        Finding("software", "vllm", "problem", "not installed")
