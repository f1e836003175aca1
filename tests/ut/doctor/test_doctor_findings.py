"""Findings of `hsx doctor` about software, storage and target, each with a remedy."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import requires
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from releases import installed_is

from ascend_npu_emulator.launch import SITE
from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS
from vllm_ascend_hsx.doctor import software, storage
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.doctor.images import IMAGES, Image, image_of
from vllm_ascend_hsx.doctor.software import check_software
from vllm_ascend_hsx.doctor.storage import check_storage, filesystem_of
from vllm_ascend_hsx.doctor.target import check_target, stored_format
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions


def by_name(found: Iterator[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in found}


# Software


def install(directory: Path, name: str, version: str, rest: str = "") -> None:
    """Write the metadata of a package, as pip does."""
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{rest}"
    )


VLLM_ASCEND = (
    "Requires-Dist: torch==2.10.0\nRequires-Dist: torch-npu==2.10.0.post4\n\n- CANN == 9.1.0 "
    "(see the release notes)\n"
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the metadata of an Ascend machine before that of this machine and the emulator."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, version, rest in (
        ("vllm", "0.23.0+empty", ""),
        ("vllm-ascend", "0.23.0", VLLM_ASCEND),
        ("torch", "2.10.0+cpu", ""),
        ("torch-npu", "2.10.0.post4", ""),
    ):
        install(packages, name, version, rest)
    others = [each for each in sys.path if Path(each).resolve() != SITE.resolve()]
    # One change, because undoing syspath_prepend separately would lose the emulator.
    monkeypatch.setattr(sys, "path", [str(packages), *others])
    return packages


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Create the files of an Ascend machine."""
    root = tmp_path / "root"
    toolkit = root / "usr/local/Ascend/cann" / f"{platform.machine()}-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C25\ncompatible_version=[V100R001C23]\n"
    )
    driver = root / "usr/local/Ascend/driver"
    driver.mkdir()
    (driver / "version.info").write_text(
        "Version=26.0.rc1\nascendhal_version=7.35.23\npackage_version=26.0.rc1\n"
    )
    (root / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (root / "dev" / name).touch()
    return root


def without(packages: Path, name: str) -> None:
    (metadata,) = packages.glob(f"{name.replace('-', '_')}-[0-9]*.dist-info")
    (metadata / "METADATA").unlink()
    metadata.rmdir()


def environ_of(root: Path, **more: str) -> dict[str, str]:
    return {"ASCEND_HOME_PATH": str(root / "usr/local/Ascend/cann"), **more}


@pytest.mark.parametrize(
    "environ",
    [{}, {"VLLM_PLUGINS": "ascend,ascend_hsx"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}],
    ids=str,
)
def test_complete_machine_gets_its_versions(
    installed: Path, machine: Path, environ: dict[str, str]
) -> None:
    found = by_name(check_software(environ_of(machine, **environ), machine))
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


@dataclass(frozen=True)
class Change:
    """A change to a complete machine, and the resulting problem.

    Attributes:
        environ: changed variables.
        packages: changed versions by name; None for a package that is not installed.
        cann: text of the toolkit's file.
        name, found, what_to_do: fields of the finding; parts of the last two.
    """

    name: str
    found: str
    what_to_do: str
    packages: dict[str, str | None] = field(default_factory=dict)
    cann: str = ""
    environ: dict[str, str] = field(default_factory=dict)


CHANGES = {
    "a pair of two releases": Change(
        "vllm-ascend",
        "vllm 0.30.0 is for 0.30.0rc2",
        "Run pip install vllm-ascend==0.30.0rc2.",
        {"vllm": "0.30.0"},
    ),
    "torch": Change("torch", "2.11.0", "pip install torch==2.10.0", {"torch": "2.11.0"}),
    "torch-npu": Change(
        "torch-npu",
        "2.9.0",
        "Elsewhere run pip install torch-npu==2.10.0.post4.",
        {"torch-npu": "2.9.0.post4"},
    ),
    "no torch-npu": Change(
        "torch-npu", "", "Install it: pip install torch-npu==2.10.0.post4.", {"torch-npu": None}
    ),
    "another CANN": Change("CANN", "8.5.0; vllm-ascend requires 9.1.0", "", cann="version=8.5.0\n"),
    "the CANN of a later image": Change(
        "CANN", "9.2.0; vllm-ascend requires 9.1.0", "", cann="version=9.2.0\n"
    ),
    "a CANN that no variable names": Change(
        "CANN", "9.1.0", "set_env.sh", environ={"ASCEND_HOME_PATH": ""}
    ),
    "a plugin that is left out": Change(
        "plugin",
        "",
        "Add ascend_hsx to VLLM_PLUGINS, or unset it.",
        environ={"VLLM_PLUGINS": "ascend,ascend_model"},
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_difference_is_one_problem_with_the_right_version(
    installed: Path, machine: Path, change: Change
) -> None:
    for name, version in change.packages.items():
        without(installed, name)
        if version is not None:
            install(installed, name, version, VLLM_ASCEND if name == "vllm-ascend" else "")
    if change.cann:
        (info,) = machine.rglob("ascend_toolkit_install.info")
        info.write_text(change.cann)
    (problem,) = [
        each
        for each in check_software(environ_of(machine, **change.environ), machine)
        if each.verdict == "problem"
    ]
    assert problem.name == change.name
    assert change.found in problem.found and change.what_to_do in problem.what_to_do


# Official images


@dataclass(frozen=True)
class Build:
    """Possible versions in an image, and the components with a note.

    Attributes:
        torch_npu: version of a daily build. It is not published, so earlier forms are used.
        cann: `version=` of the toolkit.
        vllm_ascend: version of an editable installation, if it differs from the release.
    """

    image: Image
    torch_npu: str
    cann: str
    notes: frozenset[str] = frozenset()
    vllm_ascend: str = ""


OF_0_23_0, OF_POST1, OF_0_26, OF_0_30 = IMAGES
DAILY = frozenset({"torch-npu", "CANN"})
BUILDS = {
    "0.23.0": Build(OF_0_23_0, "2.10.0.post4", "9.1.0"),
    "0.23.0.post1": Build(OF_POST1, "2.10.0.post4", "9.1.0"),
    "0.26.0rc1": Build(OF_0_26, "2.10.0.post4", "9.1.0"),
    "0.26.0rc1, built with a daily torch-npu": Build(
        OF_0_26, "2.10.0.post4.dev20260715", "9.1.0", frozenset({"torch-npu"})
    ),
    "0.30.0rc2": Build(OF_0_30, "2.10.0.post5.dev20260926", "9.2.0", DAILY),
    "0.30.0rc2, torch-npu without a post release": Build(
        OF_0_30, "2.10.0.dev20260926", "9.2.0_20260930220649", DAILY
    ),
    "0.30.0rc2, torch-npu with a commit": Build(
        OF_0_30, "2.10.0.post5+gitabc1234", "9.2.0.B030", DAILY
    ),
    "0.30.0rc2, the named torch-npu with a commit": Build(
        OF_0_30, "2.10.0.post4+git5dd8ef3", "9.2.0", frozenset({"CANN"})
    ),
    "0.30.0rc2, as its metadata says": Build(OF_0_30, "2.10.0.post4", "9.1.0"),
    "0.30.0rc2, from a later commit": Build(
        OF_0_30,
        "2.10.0.post5.dev20260926",
        "9.2.0",
        DAILY | {"vllm-ascend"},
        "0.30.0rc3.dev0+g1234567.d20261020",
    ),
}


def build_image(packages: Path, machine: Path, build: Build) -> None:
    """Install the metadata and the file of the CANN toolkit of an image."""
    versions = {
        "vllm": f"{next(pair.vllm for pair in CHECKED_PAIRS if pair.vllm_ascend == build.image.vllm_ascend)}+empty",
        "vllm-ascend": build.vllm_ascend or build.image.vllm_ascend,
        "torch": f"{build.image.torch}+cpu",
        "torch-npu": build.torch_npu,
    }
    for name, version in versions.items():
        without(packages, name)
        install(packages, name, version, VLLM_ASCEND if name == "vllm-ascend" else "")
    (info,) = machine.rglob("ascend_toolkit_install.info")
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={build.cann}\n")


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_versions_of_official_images_are_no_problem(
    installed: Path, machine: Path, build: Build
) -> None:
    build_image(installed, machine, build)
    found = by_name(check_software(environ_of(machine), machine))
    assert [each for each in found.values() if each.verdict == "problem"] == []
    assert {name for name, each in found.items() if each.verdict == "note"} == build.notes
    assert all(
        "requires" in found[name].found and "pip install" not in found[name].what_to_do
        for name in build.notes & DAILY
    )


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.vllm_ascend)
@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (
            {"torch_npu": "2.9.0.post4"},
            "In a container of vllm-ascend's image, start a new container.",
        ),
        ({"cann": "9.0.1"}, "use vllm-ascend's container image"),
    ],
    ids=["torch-npu", "CANN"],
)
def test_other_base_release_is_one_problem_with_the_image_as_remedy(
    installed: Path, machine: Path, image: Image, wrong: dict[str, str], remedy: str
) -> None:
    build_image(installed, machine, replace(Build(image, "2.10.0.post4", image.cann), **wrong))  # type: ignore[arg-type]
    (problem,) = [
        each for each in check_software(environ_of(machine), machine) if each.verdict == "problem"
    ]
    assert remedy in problem.what_to_do
    assert (problem.name == "CANN") == ("cann" in wrong)
    if image is OF_0_30 and "cann" in wrong:
        assert problem.found == "9.0.1; vllm-ascend requires 9.1.0 or 9.2.0"


def test_each_checked_release_has_a_row_of_images_with_the_versions_that_it_requires() -> None:
    """Compare with the metadata. Images of 0.30.0rc2 replace some packages with daily builds."""
    assert [image.vllm_ascend for image in IMAGES] == [pair.vllm_ascend for pair in CHECKED_PAIRS]
    image = image_of(installed_version("vllm-ascend"))
    assert image is not None and image.vllm_ascend == installed_version("vllm-ascend")
    required = {
        each.name: each.specifier for each in map(Requirement, requires("vllm-ascend") or ())
    }
    assert (
        str(required["torch"]) == f"=={image.torch}" and str(required["fastapi"]) == image.fastapi
    )
    assert required["torch-npu"].contains(image.torch_npu) == (image.torch_npu != image.torch)
    assert required["triton-ascend"].contains(image.triton_ascend) == (
        "dev" not in image.triton_ascend
    )


def test_model_runner_v2_is_a_problem_before_vllm_ascend_0_30(
    installed: Path, machine: Path
) -> None:
    found = check_software(environ_of(machine, VLLM_USE_V2_MODEL_RUNNER="1"), machine)
    assert [each.name for each in found if each.verdict == "problem"] == (
        [] if installed_is(">=0.30") else ["model runner"]
    )


@pytest.mark.parametrize(
    ("name", "version", "others"),
    [
        ("vllm", "0.24.0", "0.23.0, 0.26.0, 0.30.0 were"),
        ("vllm-ascend", "0.23.1", "0.23.0, 0.23.0.post1 were"),
    ],
)
def test_unchecked_release_is_only_a_note(
    installed: Path, machine: Path, name: str, version: str, others: str
) -> None:
    without(installed, name)
    install(installed, name, version, VLLM_ASCEND if name == "vllm-ascend" else "")
    found = by_name(check_software(environ_of(machine), machine))
    assert "problem" not in {each.verdict for each in found.values()}
    assert found[name] == Finding(
        "software",
        name,
        "note",
        f"{version} was not checked, only {others}",
        f"If a patch point does not hold: pip install {name}==0.23.0.",
    )


def test_model_runner_v2_is_no_problem_from_0_30_on(
    installed: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "has_model_runner_v2", lambda: True)
    found = by_name(check_software(environ_of(machine, VLLM_USE_V2_MODEL_RUNNER="1"), machine))
    assert "model runner" not in found


def test_missing_packages_are_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    found = by_name(check_software({}, tmp_path))
    assert {name for name, each in found.items() if each.verdict == "problem"} == {
        "NPUs",
        "vllm",
        "vllm-ascend",
        "plugin",
    }
    assert found["vllm"].what_to_do == "Install it: pip install vllm==0.23.0."
    assert found["plugin"].found == "no entry point vllm.general_plugins: ascend_hsx"


def test_machine_without_npus_has_one_problem_that_names_the_emulator(
    installed: Path, tmp_path: Path
) -> None:
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


def test_cann_release_is_read_from_component_versions(
    tmp_path: Path,
) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/version.info").write_text("Version=7.6.0.1.220:8.0.0\n")
    assert software.cann_version(tmp_path) == "8.0.0"


def test_container_without_driver_is_told_what_to_mount(installed: Path, machine: Path) -> None:
    (machine / "usr/local/Ascend/driver/version.info").unlink()
    for path in (machine / "dev").iterdir():
        if path.name != "davinci_manager":
            path.unlink()
    found = by_name(check_software(environ_of(machine), machine))
    assert "mount /usr/local/Ascend/driver/version.info" in found["driver"].what_to_do
    assert found["NPUs"].verdict == "problem"


def test_emulated_npus_are_reported_as_emulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    found = by_name(check_software({"NPU_EMULATOR_NPUS": "4"}, tmp_path))
    assert found["NPUs"].verdict == "note" and found["NPUs"].found.startswith("4, emulated")
    assert "emulated" in found["torch-npu"].found
    assert {"CANN", "driver"}.isdisjoint(found)


# Storage


@pytest.mark.parametrize(
    "options", [FileOptions(), FileOptions(use_lock=False), FileOptions(durability="fdatasync")]
)
def test_directory_is_tested_like_a_server_and_left_unchanged(
    tmp_path: Path, options: FileOptions
) -> None:
    (tmp_path / "other.safetensors").touch()
    found = by_name(check_storage(tmp_path, options, num_bytes=16 << 20))
    assert found["directory"].verdict == found["write speed"].verdict == "ok"
    assert "16 MiB" in found["write speed"].found and "estimate" in found["write speed"].found
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]


def test_free_space_is_counted_in_rows_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_free", lambda directory: 3 << 30)
    plain = by_name(check_storage(tmp_path, FileOptions(), num_bytes=16 << 20))["free space"]
    assert plain.found == "3.22 GB: about 98,304 tokens of 4 layers x 8,192 bytes"
    row_format = stored_format(config_json(tmp_path, hidden_size=1024))
    found = by_name(check_storage(tmp_path, FileOptions(), row_format, 16 << 20))["free space"]
    assert found.found == "3.22 GB: about 393,216 tokens of 4 layers x 2,048 bytes"
    assert stored_format("minimax-m2").hidden_size == 3072


def test_missing_directory_is_created_and_reported_as_new(tmp_path: Path) -> None:
    assert (
        "did not exist and was created"
        in by_name(check_storage(tmp_path / "new", FileOptions(), num_bytes=16 << 20))[
            "directory"
        ].found
    )
    assert (
        "did not exist"
        not in by_name(check_storage(tmp_path / "new", FileOptions(), num_bytes=16 << 20))[
            "directory"
        ].found
    )


def test_unusable_directory_is_a_problem_with_the_remedy_of_the_sink(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = check_storage(tmp_path / "file", FileOptions())
    assert found.verdict == "problem" and "is not a directory" in found.found
    assert found.what_to_do == "Choose a directory, or remove that file."


def test_full_disk_is_a_problem_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_free", lambda directory: 100 << 20)
    found = by_name(check_storage(tmp_path, FileOptions()))
    assert found["free space"].verdict == "problem"
    assert found["write speed"].verdict == "note" and found["write speed"].found.startswith(
        "not measured"
    )


def test_failed_write_is_a_problem_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    kinds = [
        filesystem_of(Path(path), tmp_path)
        for path in ("/srv", "/data", "/database", "/data/my files/rows")
    ]
    assert kinds == ["overlay", "ext4", "overlay", "lustre"]


# Target


def config_json(directory: Path, **fields: object) -> str:
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def test_target_that_collects_hidden_states_is_ok() -> None:
    found = by_name(check_target("minimax-m2"))
    assert found["model"].verdict == found["plan"].verdict == "ok"
    assert "MiniMaxM2ForCausalLM" in found["model"].found
    assert found["plan"].found == "62 layers x 3072, bfloat16: 6,144 bytes per token and layer"


def test_refused_target_is_a_problem_that_lists_supported_targets(tmp_path: Path) -> None:
    (found,) = check_target(config_json(tmp_path, architectures=["OPTForCausalLM"]))
    assert found.verdict == "problem" and "OPTForCausalLM" in found.found
    assert "MiniMaxM2ForCausalLM" in found.what_to_do


def test_unservable_target_is_a_problem_with_the_reason(
    tmp_path: Path,
) -> None:
    (found,) = check_target(
        config_json(
            tmp_path, architectures=["NemotronHForCausalLM"], hybrid_override_pattern="M*ME"
        )
    )
    assert found.verdict == "problem" and "NemotronHForCausalLM" in found.found
    assert (
        "Mamba-2" in found.found
        and "model_runner_v1.py" in found.found
        and "fused_moe" in found.found
    )
    assert "MiniMaxM2ForCausalLM" in found.what_to_do


def test_untested_target_is_a_note(tmp_path: Path) -> None:
    found = by_name(check_target(config_json(tmp_path, architectures=["ApertusForCausalLM"])))[
        "model"
    ]
    assert (
        found.verdict == "note"
        and "collected by the class itself" in found.found
        and "no test" in found.found
    )
    assert found.what_to_do.startswith(
        "First compare the rows with transformers: hsx demo --device npu --model "
    )


def test_a_target_that_cannot_be_planned_can_still_be_extracted(tmp_path: Path) -> None:
    model = config_json(tmp_path, architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)
    found = by_name(check_target(model))
    assert found["model"].verdict == "ok"
    assert found["plan"].verdict == "note" and "has no hidden_size" in found["plan"].found


def test_a_problem_without_a_remedy_cannot_be_reported() -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("software", "vllm", "problem", "not installed")
