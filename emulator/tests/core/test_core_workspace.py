"""The workspace of operators in device memory, and the list of first launches."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from emulated import MIB, capture, scenarios

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("any_mode")
DEVICE = 7  # no other test leaves tensors there
ROWS, HIDDEN = 64, 1024


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=f"npu:{DEVICE}")


def layers(count: int) -> list[torch.Tensor]:
    return [on_device(ROWS, HIDDEN, dtype=torch.bfloat16) for _ in range(count)]


def stack(count: int, slot_layers: int) -> Callable[[], object]:
    """Return a call that stacks `count` layers into a slot of `slot_layers` layers."""
    inputs, slot = layers(count), on_device(ROWS, slot_layers, HIDDEN, dtype=torch.bfloat16)
    return lambda: torch.stack(inputs, dim=1, out=slot[:, :count])


def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def matmul() -> Callable[[], object]:
    left, right, out = on_device(ROWS, HIDDEN), on_device(HIDDEN, HIDDEN), on_device(ROWS, HIDDEN)
    return lambda: torch.mm(left, right, out=out)


ROW = ROWS * HIDDEN
CASES: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    # matmul_v3_base_tiling.cpp:2819, ops-nn 9.1.0
    "mm": (matmul, 20 * MIB),
    # SplitToStack in aclnn_stack.cpp:157, ops-math 9.1.0
    "stack of 32": (lambda: stack(32, 32), 0),
    "stack of 33": (lambda: stack(33, 33), 33 * ROW * 2),
    # ViewCopy in contiguous.cpp:670: the last kernel writes a contiguous output
    "stack into a part of a slot": (lambda: stack(32, 40), 32 * ROW * 2),
    "stack of 33 into a part of a slot": (lambda: stack(33, 40), 2 * 33 * ROW * 2),
    # aclnnInplaceCopy in aclnn_copy.cpp:106
    "copy into a part of a slot": (
        lambda: copy(layers(1)[0], on_device(ROWS, 3, HIDDEN, dtype=torch.bfloat16)[:, 1]),
        0,
    ),
    "cast": (lambda: copy(layers(1)[0], on_device(ROWS, HIDDEN)), 0),
    "cast into a part of a slot": (
        lambda: copy(
            on_device(ROWS, HIDDEN), on_device(ROWS, 3, HIDDEN, dtype=torch.bfloat16)[:, 1]
        ),
        ROW * 2,
    ),
}


def settled() -> None:
    gc.collect()
    torch.npu.synchronize(DEVICE)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(DEVICE)


@scenarios("prepare, expected", CASES)
def test_operator_workspace_comes_from_the_caching_allocator(
    prepare: Callable[[], Callable[[], object]], expected: int
) -> None:
    """TASK_QUEUE_ENABLE is 1 by default (op-plugin 8b9c8534, utils/op_api_common.h:341)."""
    with torch.npu.device(DEVICE):
        launch = prepare()
        settled()
        held = torch.npu.memory_allocated(DEVICE)
        launch()
    assert torch.npu.max_memory_allocated(DEVICE) - held == expected
    assert torch.npu.memory_allocated(DEVICE) == held
    assert torch.npu.memory_reserved(DEVICE) >= held + expected, "kept in the cache"


@scenarios("prepare, expected", CASES)
def test_torchs_counters_exclude_the_workspace_of_task_queue_2(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], Callable[[], object]], expected: int
) -> None:
    """The block has 32 extra bytes, and is rounded up to 2 MiB.

    See NPUWorkspaceAllocator.cpp:75 in torch_npu 2.10.0.post4.
    """
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with torch.npu.device(DEVICE):
        launch = prepare()
        settled()
        reserved, (free, _) = torch.npu.memory_reserved(DEVICE), torch.npu.mem_get_info(DEVICE)
        for _ in range(2):
            launch()
    assert torch.npu.max_memory_allocated(DEVICE) == torch.npu.memory_allocated(DEVICE)
    assert torch.npu.memory_reserved(DEVICE) == reserved
    kept = -(-(expected + 32) // (2 * MIB)) * 2 * MIB if expected else 0
    assert free - torch.npu.mem_get_info(DEVICE)[0] == kept
    torch.npu.empty_cache()  # NPUCachingAllocator.cpp:1661
    assert torch.npu.mem_get_info(DEVICE)[0] == free


def test_kept_workspace_is_released_when_tensors_need_memory(
    monkeypatch: pytest.MonkeyPatch, set_hbm: Callable[[int], None]
) -> None:
    """The last try before "out of memory" frees the workspace (NPUCachingAllocator.cpp:1274)."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    set_hbm((107 + 64) * MIB)  # a context has 107 MiB
    with torch.npu.device(DEVICE):
        launch = matmul()
        settled()
        launch()
        tensor = on_device(50 * MIB, dtype=torch.uint8)
        with pytest.raises(
            torch.OutOfMemoryError, match="NPUWorkspaceAllocator tried to allocate 20.00 MiB"
        ):
            launch()
    del tensor


def test_first_launch_is_listed_once_per_device_and_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.float64):
        x = on_device(4, dtype=dtype)
        torch.logaddexp2(x, x)
    name = f"npu:{DEVICE} aten::logaddexp2.out"
    noted = [launch for launch in core.first_launches() if launch.startswith(name)]
    assert noted == [f"{name} Double", f"{name} Float"]


def test_captured_operator_takes_no_separate_workspace() -> None:
    with torch.npu.device(DEVICE):
        launch = matmul()
        launch()
        settled()
        held = torch.npu.memory_allocated(DEVICE)
        graph = capture(
            launch, stream=torch.npu.Stream(DEVICE)
        )  # the default stream is on the device of the first capture
        graph.replay()
        torch.npu.synchronize(DEVICE)
    assert torch.npu.max_memory_allocated(DEVICE) == held
