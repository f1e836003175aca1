"""Schemas of the operators of torch_npu and vllm-ascend, copied from these libraries.

They are text files with one schema per line: schemas/<namespace>.txt, and for vllm-ascend's
namespace one file for each release that changed it. With the real schemas, an argument of the wrong
name or type raises the same error as on hardware, before any reference runs.
"""

import re
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from packaging.version import Version

NAMESPACES = ("npu", "atb", "_C_ascend", "fla_npu")
OF_VLLM_ASCEND = "_C_ascend"
RELEASES = (
    "0.23.0",
    "0.26.0",
    "0.30.0",
)  # releases of vllm-ascend with a file; a release between two uses the earlier file
_QUALIFIED_NAME = re.compile(r"(\w+(?:\.\w+)?)\(")


@cache
def schemas(namespace: str, release: str | None = None) -> dict[str, str]:
    """Return the schemas of a namespace by operator name, such as "npu_grouped_matmul.List".

    Args:
        namespace: one of NAMESPACES.
        release: one of RELEASES; by default the release of the installed vllm-ascend.
    """
    name = (
        f"{namespace}-{release or _installed_release()}"
        if namespace == OF_VLLM_ASCEND
        else namespace
    )
    found: dict[str, str] = {}
    for line in (
        (files(__package__) / "schemas" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    ):
        if line and not line.startswith("#"):
            match = _QUALIFIED_NAME.match(line)
            assert match is not None, f"not a schema: {line!r}"
            found[match.group(1)] = line
    return found


@cache
def is_at_least(release: str) -> bool:
    """Return whether the installed vllm-ascend is this release or later."""
    return Version(_installed_release()) >= Version(release)


def _installed_release() -> str:
    """Return the latest of RELEASES that is not later than the installed vllm-ascend."""
    installed = Version(Version(version("vllm_ascend")).base_version)
    return max(
        (each for each in RELEASES if Version(each) <= installed), key=Version, default=RELEASES[0]
    )
