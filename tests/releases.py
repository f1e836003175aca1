"""Marks for tests that apply only to some releases of vllm-ascend, or to one model runner."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.versions import release_to_patch

VLLM_ASCEND = "vllm_ascend"


def installed_is(versions: str) -> bool:
    """Return True if the installed vllm-ascend is in `versions`, for example ">=0.26"."""
    return release_to_patch(VLLM_ASCEND) in SpecifierSet(versions)


def only_with(versions: str, why: str) -> pytest.MarkDecorator:
    """Skip a test unless the installed vllm-ascend is in `versions`.

    Args:
        versions: releases without suffixes, for example "<0.26"; 0.26.0rc1 counts as 0.26.0.
        why: behaviour or defect of the other releases.
    """
    reason = f"about vllm-ascend {versions}, but {version(VLLM_ASCEND)} is installed: {why}"
    return pytest.mark.skipif(not installed_is(versions), reason=reason)


def only_on_v1(why: str) -> pytest.MarkDecorator:
    """Skip a test if all engines use model runner V2."""
    return pytest.mark.skipif(
        os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1", reason=f"about model runner V1: {why}"
    )
