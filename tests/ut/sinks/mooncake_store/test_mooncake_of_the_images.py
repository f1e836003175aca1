"""Sink and reader work with Mooncake 0.3.11.post1, the release in vllm-ascend's images.

Sources: `MOONCAKE_TAG` in Dockerfile of vllm-ascend 0.23.0 to 0.30.0rc2, and Mooncake's
mooncake-integration/store/store_py.cpp:1598 in 0.3.11.post1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake import store
from vllm_ascend_hsx.protocol.mooncake.store import load_package, soft_pinned

VERSION = "0.3.11.post1"
ROOT = Path(__file__).parents[4]
TESTS = (
    "tests/ut/sinks/mooncake_store/test_sink_mooncake.py",
    "tests/ut/sinks/mooncake_store/test_mooncake_objects.py",
    "tests/ut/sinks/mooncake_store/test_mooncake_killed.py",
    "tests/ut/sinks/mooncake_store/test_mooncake_ascend.py",
    "tests/ut/sinks/test_sink_contract.py",
)


class ConfigOfTheImages:
    """ReplicateConfig of 0.3.11.post1: pybind11 takes no other attributes."""

    __slots__ = ("preferred_segment", "with_hard_pin", "with_soft_pin")


class ConfigOf0313:
    """ReplicateConfig of 0.3.13.post1."""

    __slots__ = ("preferred_segment", "soft_pin_action", "with_hard_pin")


def test_errors_are_soft_pinned_in_both_mooncake_releases() -> None:
    of_images = soft_pinned(SimpleNamespace(ReplicateConfig=ConfigOfTheImages))  # type: ignore[arg-type]
    assert of_images.with_soft_pin is True
    later = SimpleNamespace(
        ReplicateConfig=ConfigOf0313, SoftPinAction=SimpleNamespace(ENABLE="enable")
    )
    assert soft_pinned(later).soft_pin_action == "enable"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [(ConfigOfTheImages, False), (ConfigOf0313, False), (SimpleNamespace, True)],
)
def test_package_without_hard_pins_is_refused(
    config: type, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(ReplicateConfig=config)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=package))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    if not is_refused:
        assert load_package() is package
        return
    with pytest.raises(
        UserError,
        match=r"too old: it cannot protect objects from eviction.*Install version 0\.3\.11 or later",
    ):
        load_package()


def pip(*words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        *words,
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long  # it downloads 40 MB
def test_sink_and_reader_tests_pass_with_the_release_of_the_images(
    tmp_path: Path,
) -> None:
    """With the build for x86-64 over TCP, `mooncake_master` included."""
    pip(
        "install",
        "--no-deps",
        "--target",
        str(tmp_path),
        f"mooncake-transfer-engine-non-cuda=={VERSION}",
    )
    installed = find_spec("mooncake")
    assert installed is not None and installed.submodule_search_locations
    # Debian's libraries are beside the installed release (tools/mooncake_libraries.py).
    libraries = Path(installed.submodule_search_locations[0]).with_name(
        "mooncake_transfer_engine_non_cuda.libs"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(libraries),
        "CI": "true",
    }
    probe = (
        "import mooncake.store; print(mooncake.store.__file__, hasattr(mooncake.store, "
        "'SoftPinAction'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert found.split() == [str(tmp_path / "mooncake/store.so"), "False"]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "600", "-k", "mooncake", *TESTS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) > 100 and "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.long
def test_build_of_the_images_has_all_called_names(tmp_path: Path) -> None:
    """Compares names in the libraries: a module for aarch64 cannot be imported here."""
    platform = [
        "--platform",
        "manylinux_2_35_aarch64",
        "--python-version",
        "3.12",
        "--only-binary",
        ":all:",
    ]
    pip(
        "download",
        "--no-deps",
        *platform,
        "--dest",
        str(tmp_path),
        f"mooncake-transfer-engine-npu=={VERSION}",
    )
    (wheel,) = tmp_path.glob("*.whl")
    sources = Path(str(store.__file__)).read_text()
    with zipfile.ZipFile(wheel) as archive:
        modules = {
            "_store": archive.read("mooncake/store.so"),
            "_engine": archive.read("mooncake/engine.so"),
        }
    for owner, module in modules.items():
        called = set(re.findall(rf"self\.{owner}\.(\w+)\(", sources))
        assert len(called) >= 4
        assert [name for name in sorted(called) if name.encode() not in module] == []
    options = ("with_hard_pin", "with_soft_pin", "preferred_segment")
    assert all(name.encode() in modules["_store"] for name in options)
