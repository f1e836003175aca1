"""Versions in vllm-ascend's official images. Some differ from the package's metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """The official images of a release. They differ only in operating system and device.

    Source: Dockerfile, Dockerfile.openEuler, Dockerfile.a3 and Dockerfile.a3.openEuler of the
    release, and the requirements.txt that they install.

    Attributes:
        vllm_ascend: the release.
        cann: CANN version of the base image.
        torch_npu: version. For a daily build only the base release, because the full version is
            not published.
        triton_ascend: installed version.
        python, torch, mooncake, fastapi: versions that are equal in all images. fastapi is a
            constraint.
    """

    vllm_ascend: str
    cann: str = "9.1.0"
    torch_npu: str = "2.10.0.post4"
    triton_ascend: str = "3.2.2"
    python: str = "3.12"
    torch: str = "2.10.0"
    mooncake: str = "0.3.11.post1"
    fastapi: str = "<0.124.0"


IMAGES = (
    Image("0.23.0"),
    Image("0.23.0.post1"),
    Image("0.26.0rc1"),
    # Release images also have the daily builds of install_daily_deps.sh (Dockerfile:148).
    Image("0.30.0rc2", cann="9.2.0", torch_npu="2.10.0", triton_ascend="3.6.0+dev20260923230212"),
)


def image_of(vllm_ascend: str) -> Image | None:
    """Return the images of a release, or of the newest known version with the same base release.

    An image may be built from a later commit: the image of 0.30.0rc2 has 0.30.0rc3.dev0.
    """
    near = [image for image in IMAGES if is_same_base(image.vllm_ascend, vllm_ascend)]
    return next(
        (image for image in near if image.vllm_ascend == vllm_ascend), near[-1] if near else None
    )


def is_same_base(version: str, other: str) -> bool:
    """Return True for two builds of one base release, such as 2.10.0.post4 and 2.10.0.dev1+gitabc.

    CANN versions are not PEP 440 versions: 9.2.0_20260930220649 and 8.3.RC2 exist.
    """
    return _base(version) == _base(other)


def _base(version: str) -> str:
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version
