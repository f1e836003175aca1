"""What stands in for torchvision: importable, unusable, and without what torchvision itself no longer has."""

from __future__ import annotations

import importlib

import pytest


def test_a_name_is_importable_and_says_that_it_is_not_there_when_used() -> None:
    transforms = importlib.import_module("torchvision.transforms")
    with pytest.raises(NotImplementedError, match=r"torchvision\.transforms\.Resize"):
        transforms.Resize(3)


def test_what_torchvision_has_removed_is_an_import_error() -> None:
    """datasets compares the type of every value with it if it can be imported (formatting/torch_formatter.py:83, 5.1.0)."""
    with pytest.raises(ImportError):
        from torchvision.io import VideoReader  # noqa: F401
    with pytest.raises(ImportError):
        importlib.import_module("torchvision.io.VideoReader")
