"""Counters of device memory, and detection of pinned memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from emulated import MIB, scenarios

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("any_mode")
DEVICE = 5  # no other test leaves tensors there
CONTEXT = 107 * MIB  # the context of this process


@pytest.fixture(autouse=True)
def clean_device() -> None:
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(DEVICE)
    assert torch.npu.memory_allocated(DEVICE) == 0


def megabytes(n: int) -> torch.Tensor:
    return torch.empty(n * MIB, dtype=torch.uint8, device=f"npu:{DEVICE}")


def test_memory_stays_allocated_until_its_last_view_is_freed() -> None:
    x = megabytes(3)
    assert torch.npu.memory_allocated(DEVICE) == 3 * MIB
    view = x[:MIB].view(2, -1)
    assert torch.npu.memory_allocated(DEVICE) == 3 * MIB
    del x
    assert torch.npu.memory_allocated(DEVICE) == 3 * MIB
    del view
    assert torch.npu.memory_allocated(DEVICE) == 0


def test_operator_results_are_counted_on_their_device_in_rounded_sizes() -> None:
    x = megabytes(1).fill_(1)
    y = x + x
    indices = x[:4].nonzero()
    assert torch.npu.memory_allocated(DEVICE) == 2 * MIB + 512
    assert torch.npu.memory_stats(DEVICE)["requested_bytes.all.current"] == 2 * MIB + 32
    del y, indices


def test_reserved_memory_is_not_free_until_the_cache_is_emptied() -> None:
    torch.empty(0, device=f"npu:{DEVICE}")
    total = torch.npu.mem_get_info(DEVICE)[1]
    room = total - CONTEXT
    x = megabytes(8)
    del x
    assert (torch.npu.memory_allocated(DEVICE), torch.npu.memory_reserved(DEVICE)) == (0, 8 * MIB)
    assert (
        torch.npu.mem_get_info(DEVICE)
        == torch.accelerator.get_memory_info(DEVICE)
        == (room - 8 * MIB, total)
    )
    y = megabytes(6)  # from the cache
    assert torch.npu.memory_reserved(DEVICE) == 8 * MIB
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved(DEVICE) == 6 * MIB
    del y
    torch.accelerator.empty_cache()
    assert torch.npu.memory_reserved(DEVICE) == 0
    assert torch.npu.mem_get_info(DEVICE)[0] == room


def test_peak_memory_is_kept_until_it_is_reset() -> None:
    x = megabytes(6)
    del x
    assert torch.npu.max_memory_allocated(DEVICE) == 6 * MIB
    torch.npu.reset_peak_memory_stats(DEVICE)
    assert torch.npu.max_memory_allocated(DEVICE) == 0
    assert torch.npu.memory_stats(torch.device("npu", DEVICE))["allocated_bytes.all.peak"] == 0


def test_counters_that_vllm_reads_exist() -> None:
    x = megabytes(1)
    stats = torch.accelerator.memory_stats(DEVICE)
    for name in (
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "active_bytes.all.current",
        "num_ooms",
        "num_alloc_retries",
    ):
        assert name in stats
    assert torch.accelerator.memory_reserved(DEVICE) == torch.npu.memory_reserved(DEVICE) == 2 * MIB
    del x


def test_out_of_memory_is_an_error_and_the_device_stays_usable(
    set_hbm: Callable[[int], None],
) -> None:
    set_hbm(64 * MIB + CONTEXT)
    x = megabytes(40)
    room = r"NPU 5; 171.00 MiB total capacity; 107.00 MiB in contexts; 40.00 MiB already allocated; 24.00 MiB free"
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"NPU out of memory. Tried to allocate 30.00 MiB \({room}.*--hbm",
    ):
        megabytes(30)
    assert torch.npu.memory_stats(DEVICE)["num_ooms"] >= 1
    with pytest.raises(RuntimeError, match="out of memory"):
        x.to(torch.float32)
    assert torch.npu.current_device() == 0
    y = megabytes(20)
    del x, y
    z = megabytes(60)  # the smaller cached pieces are freed first
    del z


def test_resized_storage_is_counted_with_its_new_size() -> None:
    x = megabytes(1)
    x.resize_(4 * MIB)
    assert torch.npu.memory_allocated(DEVICE) == 4 * MIB
    x.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated(DEVICE) == 0


def test_large_zero_tensor_uses_no_host_memory_until_it_is_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    x = torch.zeros(512 * MIB, dtype=torch.uint8, device=f"npu:{DEVICE}")
    assert torch.npu.memory_allocated(DEVICE) == 512 * MIB
    assert resident() - before < 64 * MIB
    assert int(x[:MIB].max()) == 0
    del x


def test_new_memory_in_late_mode_holds_garbage() -> None:
    if not core.late():
        pytest.skip("in prompt mode the host waits for each operator")
    on_device = [
        torch.empty(5, dtype=dtype, device="npu")
        for dtype in (torch.float32, torch.bfloat16, torch.int32)
    ]
    assert all(t.abs().min() > 700 and t.isfinite().all() for t in on_device)
    assert torch.empty(5, pin_memory=True).isnan().all()


# ---- pinned memory ----

PINNED: dict[str, Callable[[], torch.Tensor]] = {
    "pin_memory()": lambda: torch.ones(5).pin_memory(),
    "empty": lambda: torch.empty(5, pin_memory=True),
    "zeros": lambda: torch.zeros(5, pin_memory=True),
    "a slice": lambda: torch.zeros(5, 3, pin_memory=True)[2:, 1],
    "numpy's view of it": lambda: torch.from_numpy(torch.zeros(5, pin_memory=True).numpy()),
    "a non-blocking copy": lambda: torch.ones(5, device="npu").to("cpu", non_blocking=True),
}
PAGEABLE: dict[str, Callable[[], torch.Tensor]] = {
    "empty, pageable": lambda: torch.empty(5),
    "a copy of pinned memory": lambda: torch.ones(5).pin_memory().clone(),
    "a blocking copy": lambda: torch.ones(5, device="npu").cpu(),
    "device memory": lambda: torch.ones(5, device="npu"),
}


@scenarios(
    "make, pinned",
    {name: (make, table is PINNED) for table in (PAGEABLE, PINNED) for name, make in table.items()},
)
def test_is_pinned_reports_pinned_memory(make: Callable[[], torch.Tensor], pinned: bool) -> None:
    assert make().is_pinned() == pinned


def test_freed_memory_is_no_longer_pinned() -> None:
    for k in range(20):
        torch.zeros(1 << k, pin_memory=True)
        assert not torch.zeros(
            1 << k
        ).is_pinned()  # malloc reuses the same bytes for most of these sizes


def test_device_tensors_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(1, device="npu").pin_memory()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(1, device="npu", pin_memory=True)


def test_device_zeros_are_never_pinned() -> None:
    """torch_npu's zeros ignores pin_memory. vllm-ascend's EAGLE proposer relies on this."""
    zeros = torch.zeros(3, dtype=torch.int32, device=f"npu:{DEVICE}", pin_memory=True)
    assert (zeros.device, zeros.dtype, zeros.tolist()) == (
        torch.device("npu", DEVICE),
        torch.int32,
        [0, 0, 0],
    )
    assert not zeros.is_pinned()
