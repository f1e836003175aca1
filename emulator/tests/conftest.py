"""Fixtures of the emulator's tests: late mode, queue mode, device memory and hccl ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from ascend_npu_emulator.launch import activate

if find_spec("torch_npu") is None:
    activate(npus=8, late=True, queue=True)

import torch
import torch_npu  # noqa: F401 - registers torch.npu
from hccl_ranks import Ranks

from ascend_npu_emulator.native import core


@pytest.fixture
def late() -> Iterator[None]:
    """Enable late mode without queue mode. Finish queued work before and after the test."""
    yield from _mode(True)


@pytest.fixture(params=["prompt", "late"])
def any_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test in prompt mode and in late mode, both without queue mode."""
    yield from _mode(request.param == "late")


def _mode(late: bool) -> Iterator[None]:
    before = core.late(), core.queue()
    _settle()
    core.set_late(late)
    core.set_queue(False)
    yield
    _settle()
    core.set_late(before[0])
    core.set_queue(before[1])


@pytest.fixture
def queue_mode() -> Iterator[None]:
    """Enable queue mode. Clear failed tasks after the test."""
    before = core.queue()
    core.set_queue(True)
    yield
    core.reset_tasks()
    core.set_queue(before)


def _settle() -> None:
    for index in range(torch.npu.device_count()):
        torch.npu.synchronize(index)


@pytest.fixture
def set_hbm() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the memory of every NPU, in bytes, for the test."""
    _, total = torch.npu.mem_get_info()
    yield core.set_hbm
    core.set_hbm(total)


@pytest.fixture(scope="session", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Start one process per rank of an hccl group."""
    group = Ranks(request.param, tmp_path_factory.mktemp("hccl"))
    yield group
    group.close()


@pytest.fixture(params=[False, True], ids=["prompt", "late"])
def late_ranks(request: pytest.FixtureRequest) -> bool:
    """Return True if the ranks run in late mode."""
    return request.param
