"""Check versions of vLLM, vllm-ascend, torch, torch-npu, CANN and driver, NPUs, and the plugin."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS, has_model_runner_v2
from vllm_ascend_hsx.config import PLUGIN_NAME
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.doctor.images import image_of, is_same_base

TOPIC = "software"
EMULATOR = "ascend_npu_emulator"
PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_TARGET = "vllm_ascend_hsx.plugin:register"
# CANN's default directories, newest first (hiascend.com, CANN 8.5.0 and 8.0.0, instg_0044).
_CANN_HOMES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DRIVER = "usr/local/Ascend/driver/version.info"
_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


def check_software(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Iterator[Finding]:
    """Yield a finding for each component with a version, and for NPUs and plugin.

    Args:
        environ: environment variables.
        root: root directory of the machine's files.
    """
    emulated = npu_is_emulated()
    wanted = _wanted_by_vllm_ascend()
    # True on a machine without NPUs, as opposed to an incomplete installation.
    foreign = not emulated and not (
        count_npus(root)
        or _version_in(root / _DRIVER)
        or _find_cann(environ, root)
        or installed_version("torch-npu")
    )
    if foreign:
        problem = "this machine has none: no /dev/davinci*, no driver, no CANN and no torch-npu"
        yield _problem(
            "NPUs",
            problem,
            (
                "Use a machine with an Ascend NPU, or see how it works without one: hsx emulate -- "
                "hsx doctor."
            ),
        )
    yield _package("vllm", [pair.vllm for pair in CHECKED_PAIRS], "vllm-ascend")
    partners = [pair.vllm_ascend for pair in CHECKED_PAIRS if pair.vllm == _release("vllm")]
    yield _package("vllm-ascend", partners or [pair.vllm_ascend for pair in CHECKED_PAIRS], "vllm")
    for name in ("torch", "torch-npu"):
        yield _torch(name, wanted[name], emulated, foreign)
    if emulated:
        found = (
            f"{environ.get('NPU_EMULATOR_NPUS', 'some')}, emulated on the CPU; CANN and driver are "
            "not used"
        )
        yield Finding(
            TOPIC, "NPUs", "note", found, "For real work use a machine with an Ascend NPU."
        )
    elif not foreign:
        yield _cann(environ, root, wanted["CANN"])
        yield _driver(root)
        yield _npus(root)
    yield _plugin(environ)
    # An integer (vllm/envs.py:1921, 0.23.0). compat/runner.py documents why it is refused.
    chosen = environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if chosen.strip() != "0" and not has_model_runner_v2():
        problem = (
            f"VLLM_USE_V2_MODEL_RUNNER={chosen}: extraction needs vllm-ascend 0.30 or later for "
            "this model runner"
        )
        yield _problem("model runner", problem, "Unset VLLM_USE_V2_MODEL_RUNNER.")


def installed_version(name: str) -> str | None:
    """Return the version in a package's metadata, or None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def npu_is_emulated() -> bool:
    """Return True if the metadata of torch_npu names the emulator."""
    try:
        return EMULATOR in str(distribution("torch_npu").metadata["Summary"])
    except PackageNotFoundError:
        return False


def cann_version(home: Path) -> str | None:
    """Return the version of the CANN toolkit in a directory, or None.

    `<arch>-linux/ascend_toolkit_install.info` has it as `version=` (hiascend.com, CANN 8.5.0,
    instg_0044); torch_npu reads the same file (torch_npu/utils/collect_env.py, get_cann_version).
    Otherwise `runtime/version.info` has it as `Version=`, in some releases as `component:release`.
    """
    for name in (
        f"{platform.machine()}-linux/ascend_toolkit_install.info",
        "ascend_toolkit_install.info",
        "runtime/version.info",
    ):
        version = _version_in(home / name)
        if version is not None:
            return version.rpartition(":")[2].rstrip("]")
    return None


def _version_in(file: Path) -> str | None:
    try:
        match = _VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


class _Wanted(NamedTuple):
    """Versions of a component that fit vllm-ascend; None if unknown.

    Attributes:
        named: version in vllm-ascend's metadata.
        in_image: version in vllm-ascend's official image.
    """

    named: str | None
    in_image: str | None

    @property
    def either(self) -> str:
        return " or ".join(dict.fromkeys(filter(None, self)))


def _wanted_by_vllm_ascend() -> dict[str, _Wanted]:
    """Return the versions of torch, torch-npu and CANN that fit the installed vllm-ascend."""
    named = _named_by_vllm_ascend()
    image = image_of(_release("vllm-ascend") or "")
    in_image = (
        {"torch": image.torch, "torch-npu": image.torch_npu, "CANN": image.cann} if image else {}
    )
    return {
        name: _Wanted(named.get(name), in_image.get(name))
        for name in ("torch", "torch-npu", "CANN")
    }


def _named_by_vllm_ascend() -> dict[str, str]:
    """Return the versions of torch, torch-npu and CANN in vllm-ascend's metadata."""
    try:
        vllm_ascend = distribution("vllm-ascend")
    except PackageNotFoundError:
        return {}
    wanted = {}
    for requirement in vllm_ascend.requires or ():
        match = re.match(r"(torch|torch[-_]npu)\s*==\s*([^\s;,]+)", requirement)
        if match:
            wanted[match[1].replace("_", "-")] = match[2]
    match = re.search(r"\bCANN\s*==\s*([\w.]*\w)", vllm_ascend.read_text("METADATA") or "")
    return wanted | ({"CANN": match[1]} if match else {})


def _release(name: str) -> str | None:
    """Return the installed version without its local part (0.23.0 for 0.23.0+empty), or None."""
    version = installed_version(name)
    return None if version is None else version.partition("+")[0]


def _ok(name: str, found: str) -> Finding:
    return Finding(TOPIC, name, "ok", found)


def _problem(name: str, found: str, remedy: str) -> Finding:
    return Finding(TOPIC, name, "problem", found, remedy)


def _package(name: str, checked: list[str], partner: str) -> Finding:
    """Check a package's release against the releases that fit the installed `partner`."""
    version, release = installed_version(name), _release(name)
    remedy = f"pip install {name}=={checked[0]}"
    if version is None:
        return _problem(name, "not installed", f"Install it: {remedy}.")
    if release in checked:
        return _ok(name, version)
    if any(release in pair for pair in CHECKED_PAIRS):
        return _problem(
            name,
            f"{version}; {partner} {installed_version(partner)} is for {' or '.join(checked)}",
            f"Run {remedy}.",
        )
    found = (
        f"{version} was not checked, only {', '.join(dict.fromkeys(checked))} "
        f"{'was' if len(set(checked)) == 1 else 'were'}"
    )
    return Finding(TOPIC, name, "note", found, f"If a patch point does not hold: {remedy}.")


def _other_build(name: str, version: str, wanted: _Wanted) -> Finding | None:
    """Return a note if this is another build of a release that fits, else None."""
    if wanted.in_image not in (None, wanted.named) and is_same_base(version, wanted.in_image):
        found = f"{version}, as in vllm-ascend's image; the package requires {wanted.named}"
        return Finding(TOPIC, name, "note", found)
    if wanted.named is None or not is_same_base(version, wanted.named):
        return None
    found = f"{version}; vllm-ascend requires another build, {wanted.named}"
    remedy = f"In an image, keep it. Elsewhere, install {wanted.named} if an operator is missing."
    return Finding(TOPIC, name, "note", found, remedy)


def _torch(name: str, wanted: _Wanted, emulated: bool, foreign: bool) -> Finding:
    version, named = installed_version(name), wanted.named
    if (
        version is not None
        and named in (None, _release(name))
        and not (emulated and name == "torch-npu")
    ):
        return _ok(name, version)
    if foreign:  # another version would not help
        wants = f"; with an NPU vllm-ascend requires {named}" if named else ""
        return Finding(TOPIC, name, "note", f"{version or 'not installed'}{wants}")
    if version is not None and emulated:
        wants = (
            ", emulated"
            if name == "torch-npu"
            else f"; works with emulated NPUs, real NPUs require {named}"
        )
        return Finding(TOPIC, name, "note", f"{version}{wants}")
    if version is None:
        remedy = (
            f"Install it: pip install {name}=={named}."
            if named
            else f"Install vllm-ascend; pip then installs {name}, too."
        )
        return _problem(name, "not installed", remedy)
    remedy = (
        "In a container of vllm-ascend's image, start a new container. Elsewhere run "
        f"pip install {name}=={named}."
    )
    return _other_build(name, version, wanted) or _problem(
        name, f"{version}; vllm-ascend requires {named}", remedy
    )


def _find_cann(environ: Mapping[str, str], root: Path) -> tuple[Path, str] | None:
    homes = [*_named_homes(environ), *(root / home for home in _CANN_HOMES)]
    return next(((home, version) for home in homes if (version := cann_version(home))), None)


def _named_homes(environ: Mapping[str, str]) -> list[Path]:
    return [Path(environ[name]) for name in _CANN_VARIABLES if environ.get(name)]


def _cann(environ: Mapping[str, str], root: Path, wanted: _Wanted) -> Finding:
    found = _find_cann(environ, root)
    right = f" {wanted.either}" if wanted.either else ""
    install = (
        f"Install the CANN toolkit{right} and its ops package, or use vllm-ascend's container "
        "image."
    )
    if found is None:
        return _problem("CANN", "not found", install)
    home, version = found
    if home not in _named_homes(environ):
        problem = f"{version} in {home}, but neither {' nor '.join(_CANN_VARIABLES)} is set to it"
        return _problem(
            "CANN",
            problem,
            f"source {home}/set_env.sh (or set_env.sh in the parent directory), and run again.",
        )
    if wanted.named is None or version.lower() == wanted.named.lower():
        return _ok("CANN", version)
    return _other_build("CANN", version, wanted) or _problem(
        "CANN", f"{version}; vllm-ascend requires {wanted.either}", install
    )


def _driver(root: Path) -> Finding:
    """Read version.info. Containers must mount it (docs.vllm.ai/projects/ascend, installation)."""
    version = _version_in(root / _DRIVER)
    if version is None:
        remedy = (
            f"Install the NPU driver; in a container, mount /{_DRIVER} and "
            "/usr/local/Ascend/driver/lib64."
        )
        return _problem("driver", f"/{_DRIVER} does not exist or has no version", remedy)
    return _ok("driver", version)


def count_npus(root: Path = Path("/")) -> int:
    """Count /dev/davinci<number> (docs.vllm.ai/projects/ascend, installation)."""
    return sum(
        re.fullmatch(r"davinci\d+", path.name) is not None
        for path in (root / "dev").glob("davinci*")
    )


def _npus(root: Path) -> Finding:
    if number := count_npus(root):
        return _ok("NPUs", str(number))
    remedy = (
        "Use a machine with an Ascend NPU, pass /dev/davinci* to the container, or use `hsx "
        "emulate`."
    )
    return _problem("NPUs", "there is no /dev/davinci*", remedy)


def _plugin(environ: Mapping[str, str]) -> Finding:
    found = f"{PLUGIN_GROUP}: {PLUGIN_NAME}"
    if _PLUGIN_TARGET not in [
        point.value for point in entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME
    ]:
        return _problem(
            "plugin",
            f"no entry point {found}",
            "Install vllm-ascend-hsx with pip in the environment that has vllm.",
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        problem = f"VLLM_PLUGINS={allowed} keeps vLLM from loading {PLUGIN_NAME}"
        return _problem("plugin", problem, f"Add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it.")
    return _ok("plugin", found)
