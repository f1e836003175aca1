"""Fixtures for the tests of the emulated NPU: late mode on or off, a smaller memory, a fresh stream of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu; found through tests/ut/conftest.py

from vllm_ascend_hsx.emulator.native import core


@pytest.fixture
def late() -> Iterator[None]:
    """Late mode, whatever the environment says; queued work is finished before and after."""
    yield from _mode(True)


@pytest.fixture
def prompt() -> Iterator[None]:
    """The normal mode: work runs when it is called."""
    yield from _mode(False)


@pytest.fixture(params=["prompt", "late"])
def any_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both modes, one after the other."""
    yield from _mode(request.param == "late")


def _mode(late: bool) -> Iterator[None]:
    before = core.late()
    _settle()
    core.set_late(late)
    yield
    _settle()
    core.set_late(before)


def _settle() -> None:
    for index in range(torch.npu.device_count()):
        torch.npu.synchronize(index)


@pytest.fixture
def set_hbm() -> Iterator[Callable[[int], None]]:
    """Sets the memory of every NPU, in bytes, for the test."""
    _, total = torch.npu.mem_get_info()
    yield core.set_hbm
    core.set_hbm(total)
