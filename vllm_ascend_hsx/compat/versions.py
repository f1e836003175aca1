"""The versions of vLLM and vllm-ascend that the plugin was checked against."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version


class Pair(NamedTuple):
    """A release of vLLM and the release of vllm-ascend made for it."""

    vllm: str
    vllm_ascend: str


CHECKED_PAIRS = (Pair("0.23.0", "0.23.0"),)
V0_23 = ">=0.23,<0.24"  # of either package


class IncompatibleVersionError(RuntimeError):
    """Something that the plugin relies on in vLLM or vllm-ascend is missing."""

    def __init__(self, what: str) -> None:
        checked = " or ".join(f"vllm {pair.vllm} with vllm-ascend {pair.vllm_ascend}" for pair in CHECKED_PAIRS)
        super().__init__(f"vllm-ascend-hsx needs {what}. It was checked against {checked}; install these versions.")


@functools.cache
def release_to_patch(package: str) -> Version:
    """Return the checked release whose patches fit the installed one best.

    A version that was not checked is treated as the newest checked release before it, or else as
    the oldest; then whatever is missing raises IncompatibleVersionError. Suffixes are left out:
    0.30.0rc2 counts as 0.30.0, 0.23.0.post1 as 0.23.0.

    Args:
        package: "vllm" or "vllm_ascend".
    """
    checked = sorted({_release(getattr(pair, package)) for pair in CHECKED_PAIRS})
    try:
        installed = _release(version(package))
    except PackageNotFoundError:  # its modules are never imported
        return checked[-1]
    return max((each for each in checked if each <= installed), default=checked[0])


def _release(text: str) -> Version:
    return Version(Version(text).base_version)
