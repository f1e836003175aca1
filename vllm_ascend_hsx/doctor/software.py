"""What is installed: vLLM, vllm-ascend, torch, torch_npu, CANN, driver, NPUs and our plugin, beside what they should be."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS
from vllm_ascend_hsx.config import PLUGIN_NAME
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.emulator.launch import SITE
from vllm_ascend_hsx.emulator.settings import Settings

TOPIC = "software"
PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_TARGET = "vllm_ascend_hsx.plugin:register"
# CANN's default directories, newest layout first: hiascend.com, CANN 8.5.0 and 8.0.0, "File Paths" (instg_0044).
_CANN_HOMES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DRIVER = "usr/local/Ascend/driver/version.info"
_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)


def check_software(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at everything that has a version, and at the plugin.

    Args:
        environ: the environment variables.
        root: the directory in which the machine's files are looked for.
    """
    emulated = npu_is_emulated()
    wanted = _wanted_by_vllm_ascend()
    another_machine = not emulated and _has_nothing_of_ascend(environ, root)
    if another_machine:
        remedy = "Use a machine with an Ascend NPU, or see how it works without one: hsx emulate -- hsx doctor."
        problem = "this machine has none: no /dev/davinci0 or the like, no driver, no CANN, no torch-npu"
        yield Finding(TOPIC, "NPUs", "problem", problem, remedy)
    yield _package("vllm", [pair.vllm for pair in CHECKED_PAIRS])
    partners = [pair.vllm_ascend for pair in CHECKED_PAIRS if pair.vllm == _release("vllm")]
    yield _package("vllm-ascend", partners or [pair.vllm_ascend for pair in CHECKED_PAIRS])
    for name in ("torch", "torch-npu"):
        yield _with_an_npu(name, wanted.get(name)) if another_machine else _torch(name, wanted.get(name), emulated)
    if emulated:
        number = environ.get("HSX_EMULATOR_NPUS", str(Settings.npus))
        problem = f"{number}, emulated on the CPU: CANN and driver are not used"
        yield Finding(TOPIC, "NPUs", "note", problem, "For real work use a machine with an Ascend NPU.")
    elif not another_machine:
        yield _cann(environ, root, wanted.get("CANN"))
        yield _driver(root)
        yield _npus(root)
    yield _plugin(environ)
    yield from _runner(environ)


def installed_version(name: str) -> str | None:
    """The version of a package, by its metadata; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def npu_is_emulated() -> bool:
    """Whether torch_npu is the emulator's."""
    try:
        return Path(str(distribution("torch_npu").locate_file(""))).resolve() == SITE.resolve()
    except PackageNotFoundError:
        return False


def cann_version(home: Path) -> str | None:
    """The version of the CANN toolkit below a directory; None if there is none.

    It is the line `version=` of `<arch>-linux/ascend_toolkit_install.info` (hiascend.com, CANN 8.5.0, "File Paths", instg_0044), the file
    that torch_npu reads, too (torch_npu/utils/collect_env.py, get_cann_version). Without it, `Version=` of `runtime/version.info`, which is
    `component:release` in some releases.
    """
    for name in (f"{platform.machine()}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "runtime/version.info"):
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


def _wanted_by_vllm_ascend() -> dict[str, str]:
    """The versions that the installed vllm-ascend names: of torch and torch-npu in its requirements, of CANN in its description."""
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
    if match:
        wanted["CANN"] = match[1]
    return wanted


def _release(name: str) -> str | None:
    """Return the installed version without its local part, as in 0.23.0 for 0.23.0+empty; None if there is none."""
    version = installed_version(name)
    return None if version is None else version.partition("+")[0]


def _package(name: str, checked: list[str]) -> Finding:
    version = installed_version(name)
    remedy = f"Install it: pip install {name}=={checked[-1]}."
    if version is None:
        return Finding(TOPIC, name, "problem", "not installed", remedy)
    if _release(name) not in checked:
        problem = f"{version}; vllm-ascend-hsx was checked against {' and '.join(dict.fromkeys(checked))}"
        return Finding(TOPIC, name, "problem", problem, remedy)
    return Finding(TOPIC, name, "ok", version)


def _torch(name: str, wanted: str | None, emulated: bool) -> Finding:
    version = installed_version(name)
    remedy = f"Install it: pip install {name}=={wanted}." if wanted else f"Install vllm-ascend, which brings its {name}."
    if version is None:
        return Finding(TOPIC, name, "problem", "not installed", remedy)
    if emulated and name == "torch-npu":
        return Finding(TOPIC, name, "note", f"{version}, emulated")
    if wanted is None or _release(name) == wanted:
        return Finding(TOPIC, name, "ok", version)
    if emulated:
        return Finding(TOPIC, name, "note", f"{version}; the emulated NPU takes it, real ones want {wanted}")
    return Finding(TOPIC, name, "problem", f"{version}; vllm-ascend wants {wanted}", remedy)


def _has_nothing_of_ascend(environ: Mapping[str, str], root: Path) -> bool:
    """Whether this is another kind of machine, rather than one whose set-up is not complete."""
    there = (_num_npus(root), _version_in(root / _DRIVER), _find_cann(environ, root), installed_version("torch-npu"))
    return not any(there)


def _with_an_npu(name: str, wanted: str | None) -> Finding:
    """What is to be known of torch on a machine without an NPU, where nobody needs to install another one."""
    version = installed_version(name)
    if version is not None and (wanted is None or _release(name) == wanted):
        return Finding(TOPIC, name, "ok", version)
    wants = f"; with an NPU vllm-ascend wants {wanted}" if wanted else ""
    return Finding(TOPIC, name, "note", f"{version or 'not installed'}{wants}")


def _find_cann(environ: Mapping[str, str], root: Path) -> tuple[Path, str] | None:
    homes = [*_named_homes(environ), *(root / home for home in _CANN_HOMES)]
    return next(((home, version) for home in homes if (version := cann_version(home))), None)


def _named_homes(environ: Mapping[str, str]) -> list[Path]:
    return [Path(environ[name]) for name in _CANN_VARIABLES if environ.get(name)]


def _cann(environ: Mapping[str, str], root: Path, wanted: str | None) -> Finding:
    found = _find_cann(environ, root)
    install = "Install the CANN toolkit" + (f" {wanted}" if wanted else "") + " and its ops package, or use vllm-ascend's container image."
    if found is None:
        return Finding(TOPIC, "CANN", "problem", "not found", install)
    home, version = found
    if home not in _named_homes(environ):
        problem = f"{version} in {home}, but neither {' nor '.join(_CANN_VARIABLES)} leads there"
        return Finding(TOPIC, "CANN", "problem", problem, f"source {home}/set_env.sh (or the one in the directory above), and start again.")
    if wanted is not None and version.lower() != wanted.lower():
        return Finding(TOPIC, "CANN", "problem", f"{version}; vllm-ascend wants {wanted}", install)
    return Finding(TOPIC, "CANN", "ok", version)


def _driver(root: Path) -> Finding:
    """`Version=` of the driver's version.info, which a container has only if it is mounted (docs.vllm.ai/projects/ascend, installation)."""
    version = _version_in(root / _DRIVER)
    if version is None:
        remedy = f"Install the NPU driver; in a container, mount /{_DRIVER} and /usr/local/Ascend/driver/lib64."
        return Finding(TOPIC, "driver", "problem", f"/{_DRIVER} is not there, or names no version", remedy)
    return Finding(TOPIC, "driver", "ok", version)


def _num_npus(root: Path) -> int:
    """An NPU is /dev/davinci<number> (docs.vllm.ai/projects/ascend, installation)."""
    return sum(re.fullmatch(r"davinci\d+", path.name) is not None for path in (root / "dev").glob("davinci*"))


def _npus(root: Path) -> Finding:
    number = _num_npus(root)
    if number == 0:
        remedy = "Use a machine with an Ascend NPU, hand its /dev/davinci* to the container, or use `hsx emulate`."
        return Finding(TOPIC, "NPUs", "problem", "there is no /dev/davinci0 or the like", remedy)
    return Finding(TOPIC, "NPUs", "ok", str(number))


def _runner(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The v2 runner is chosen by an integer (vllm/envs.py:1921, 0.23.0); compat/runner.py says why it cannot be used."""
    chosen = environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if chosen.strip() != "0":
        problem = f"VLLM_USE_V2_MODEL_RUNNER={chosen}: the v2 model runner is not supported"
        yield Finding(TOPIC, "model runner", "problem", problem, "Unset VLLM_USE_V2_MODEL_RUNNER.")


def _plugin(environ: Mapping[str, str]) -> Finding:
    found = [point.value for point in entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if _PLUGIN_TARGET not in found:
        remedy = "Install vllm-ascend-hsx with pip in the environment that has vllm."
        return Finding(TOPIC, "plugin", "problem", f"no entry point {PLUGIN_GROUP}: {PLUGIN_NAME}", remedy)
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        remedy = f"Add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it."
        return Finding(TOPIC, "plugin", "problem", f"VLLM_PLUGINS={allowed} keeps vLLM from loading {PLUGIN_NAME}", remedy)
    return Finding(TOPIC, "plugin", "ok", f"{PLUGIN_GROUP}: {PLUGIN_NAME}")
