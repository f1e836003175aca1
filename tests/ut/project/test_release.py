"""Version, changelog, classifiers, issue forms and the image of a release agree."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from documents import DOCS, blocks, page, rows
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import COMMANDS
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown": {"value"}, "input": {"label"}, "textarea": {"label"}}


def test_version_is_in_one_place_and_heads_the_changelog() -> None:
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert str(Version(vllm_ascend_hsx.__version__)) == vllm_ascend_hsx.__version__
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert vllm_ascend_hsx.__version__ == next(each for each in headings if each != "Unreleased")


def test_classifiers_name_the_allowed_python_versions() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    named = set(re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE))
    assert named == {
        version for version in (f"3.{minor}" for minor in range(30)) if version in allowed
    }


def test_stable_names_equal_the_exports_of_the_package() -> None:
    table = {row[0]: row[1] for row in rows(page("migration.md"))}
    own = table["Python"].partition(" of `vllm_ascend_hsx`")[0]
    assert set(re.findall(r"`(\w+)`", own)) == set(vllm_ascend_hsx.__all__)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_is_valid(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    identifiers = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert identifiers and len(identifiers) == len(set(identifiers))
    for field in form["body"]:
        assert (
            FIELDS[field["type"]]
            <= field["attributes"].keys()
            <= {"label", "value", "description", "placeholder", "render"}
        )


def test_report_forms_ask_for_doctor_and_hardware_report() -> None:
    for name in ("bug", "hardware"):
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text()
        assert "`hsx doctor" in text or "Output of hsx doctor" in text
        assert "hsx hardware-report" in text and "if `hsx --help`" in text.lower()


def test_report_forms_name_existing_commands_and_files() -> None:
    texts = [path.read_text() for path in (*FORMS, ROOT / "SECURITY.md")]
    named = {name for text in texts for name in re.findall(r"`hsx ([a-z][\w-]*)", text)}
    assert named - {"hardware-report"} <= set(COMMANDS)  # the form adds "if `hsx --help` lists it"
    pages = {name for text in texts for name in re.findall(r"docs/([\w-]+\.md)", text)}
    assert pages and all((DOCS / name).is_file() for name in pages)


# The image

DOCKERFILE = ROOT / "docker" / "Dockerfile"
# From the installation guide (vllm-ascend v0.23.0, docs/source/installation.md). The guide also
# mounts the cache in the home directory for downloaded weights. The guides to several machines and
# to Mooncake mount /etc/hccn.conf
# (tutorials/features/pd_disaggregation_mooncake_multi_node.md:173).
DEVICES = {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
MOUNTS = {
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
    "/usr/local/Ascend/driver/lib64/",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/bin/npu-smi",
    "/usr/local/dcmi",
}
IMAGES = {"a2": ("vllm-ascend-hsx", "v0.23.0", 8), "a3": ("vllm-ascend-hsx:a3", "v0.23.0-a3", 16)}


def words(label: str) -> list[str]:
    (block,) = blocks("serve.md", label)
    return shlex.split(block.replace("\\\n", " "))


def values(command: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(command) if name == option]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", IMAGES)
def test_image_is_built_from_a_checked_release(name: str) -> None:
    image, tag, _ = IMAGES[name]
    command = words(f"build {name}")
    assert values(command, "-t") == [image] and values(command, "-f") == ["docker/Dockerfile"]
    text = DOCKERFILE.read_text()
    default = re.findall(r"^ARG TAG=(\S+)$", text, re.MULTILINE)
    assert (values(command, "--build-arg") or [f"TAG={default[0]}"]) == [f"TAG={tag}"]
    assert tag.removeprefix("v").removesuffix("-a3") in {pair.vllm_ascend for pair in CHECKED_PAIRS}
    assert f"#   {shlex.join(command)}\n" in text
    assert "nobody has built" in text.splitlines()[0] and "not been built" in page("serve.md")


@pytest.mark.parametrize("name", IMAGES)
def test_a_container_has_the_devices_and_mounts_of_vllm_ascends_guide(name: str) -> None:
    image, _, npus = IMAGES[name]
    command = words(f"run {name}")
    assert command[:2] == ["docker", "run"] and command[-2:] == [image, "bash"]
    assert set(values(command, "--device")) == DEVICES | {
        f"/dev/davinci{place}" for place in range(npus)
    }
    mounts = values(command, "-v")
    assert all(mount.partition(":")[0] == mount.partition(":")[2] for mount in mounts)
    assert {mount.partition(":")[0] for mount in mounts} == {
        *MOUNTS,
        "/data/models",
        "/data/hidden_states",
    }
    assert values(command, "-e") == ["HF_HOME=/data/models"]


def test_rdma_options_match_the_mooncake_guide() -> None:
    """Mooncake 0.3.11.post1, docs/source/getting_started/build.md:184."""
    command = words("run rdma")
    assert command[:2] == ["docker", "run"] and command[-1] == "..."
    assert values(command, "--device") == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]
    assert values(command, "--ulimit") == ["memlock=-1"]


def test_build_context_contains_the_sources_of_the_wheel() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "vllm_ascend_hsx"} <= kept
    assert all((ROOT / name).exists() for name in kept)


def test_documented_container_runs_an_existing_command() -> None:
    command = words("doctor")
    assert command[0] == "hsx" and command[1] in COMMANDS
