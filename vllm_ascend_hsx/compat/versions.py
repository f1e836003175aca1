"""Versions of vLLM and vllm-ascend that the plugin was checked with."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version


class Pair(NamedTuple):
    """A release of vLLM and the release of vllm-ascend made for it."""

    vllm: str
    vllm_ascend: str


CHECKED_PAIRS = (
    Pair("0.23.0", "0.23.0"),
    Pair("0.23.0", "0.23.0.post1"),
    Pair("0.26.0", "0.26.0rc1"),
    Pair("0.30.0", "0.30.0rc2"),
)
# Releases of either package.
V0_23 = ">=0.23,<0.24"
V0_26 = ">=0.26,<0.27"
BEFORE_0_30 = ">=0.23,<0.30"
SINCE_0_23 = ">=0.23"
SINCE_0_26 = ">=0.26"
SINCE_0_30 = ">=0.30"


class IncompatibleVersionError(RuntimeError):
    """An attribute of vLLM or vllm-ascend that the plugin needs is missing or has changed.

    Attributes:
        reason: description of the difference.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason = reason
        checked = " or ".join(
            f"vllm {pair.vllm} with vllm-ascend {pair.vllm_ascend}" for pair in CHECKED_PAIRS
        )
        remedy = f"Install one of these. {remedy}".rstrip()
        super().__init__(
            f"vllm-ascend-hsx cannot work here: {reason}\nChecked versions: {checked}. {remedy}"
        )


def installed_pair() -> Pair:
    """Return the installed releases, without local parts (0.23.0 for 0.23.0+empty).

    Raises IncompatibleVersionError if one of them is not installed.
    """
    try:
        return Pair(*(Version(version(package)).public for package in Pair._fields))
    except PackageNotFoundError as error:
        raise IncompatibleVersionError(f"{error.name} is not installed") from None


@functools.cache
def release_to_patch(package: str) -> Version:
    """Return the checked release whose patches fit the installed release best.

    An unchecked version counts as the newest checked release before it, or else as the oldest one.
    If something is missing, IncompatibleVersionError follows. Suffixes are ignored: 0.30.0rc2
    counts as 0.30.0, 0.23.0.post1 as 0.23.0.

    Args:
        package: "vllm" or "vllm_ascend".
    """
    checked = sorted({_release(getattr(pair, package)) for pair in CHECKED_PAIRS})
    try:
        installed = _release(version(package))
    except PackageNotFoundError:  # the modules are never imported
        return checked[-1]
    return max((each for each in checked if each <= installed), default=checked[0])


def has_model_runner_v2() -> bool:
    """Return True if the drafter works on the installed release's model runner V2."""
    return release_to_patch("vllm_ascend") in SpecifierSet(SINCE_0_30)


def _release(text: str) -> Version:
    return Version(Version(text).base_version)
