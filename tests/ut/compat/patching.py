"""Apply patches of the plugin to a module created by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_hsx.compat.patch_points import POINTS, PatchPoint


def points_of(*functions: Callable[..., Any]) -> list[PatchPoint]:
    """Return the patch points that the functions replace."""
    return [point for point in POINTS if point.replacement in functions]


def apply(module: Any, *functions: Callable[..., Any]) -> None:
    """Apply each function to the patch points that the module has."""
    for function in functions:
        here = {
            point.path: point for point in points_of(function) if hasattr(module, point.path[0])
        }
        for point in here.values():
            point.apply(module)
        assert here, f"the module has no place for {function.__name__}"
