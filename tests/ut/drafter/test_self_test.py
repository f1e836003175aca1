"""The self-test names the step with wrong rows, and launches the operators of later steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
from vllm_ascend.spec_decode.extract_hidden_states_proposer import AscendExtractHiddenStatesProposer

from ascend_npu_emulator.native import core
from vllm_ascend_hsx.drafter import self_test
from vllm_ascend_hsx.drafter.drafter import Drafter
from vllm_ascend_hsx.drafter.landing import HostChunk, Lander
from vllm_ascend_hsx.drafter.proposer import HsxProposer
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.self_test import SelfTestError, run_self_test
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.protocol.errors import UserError

DEVICE = torch.device("npu:0")
HIDDEN = 64


def make_staging(
    num_layers: int = 3,
    rotated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = DEVICE,
) -> StagingCache:
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    return StagingCache(
        num_slots=2,
        slot_rows=150,
        num_layers=num_layers,
        hidden_size=HIDDEN,
        dtype=dtype,
        device=device,
        layer_order=(*range(1, num_layers), 0),
        rotation=rotation.to(device) if rotated else None,
    )


@pytest.fixture(autouse=True)
def sound_memory() -> Iterator[None]:
    torch.npu.host_empty_cache()  # type: ignore[attr-defined]
    yield
    core.set_pinned_fault(core.PinnedFault.NONE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_layers", "rotated"), [(3, False), (3, True), (40, False), (40, True)]
)
def test_a_sound_device_passes(num_layers: int, rotated: bool, dtype: torch.dtype) -> None:
    staging = make_staging(num_layers, rotated, dtype)
    run_self_test(staging)
    assert staging.take() is None
    assert all(slot.issued.is_set() for slot in staging.slots)


# Faults: each patches one call of the device.

Patch = Callable[[pytest.MonkeyPatch], None]


def null_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    core.set_pinned_fault(core.PinnedFault.NULL)


def fails(target: Any, name: str) -> Patch:
    def call(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("The Inner error is reported as above, error code is 507015\nmore")

    return lambda monkeypatch: monkeypatch.setattr(target, name, call)


def stacks_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.stack
    monkeypatch.setattr(torch, "stack", lambda layers, **options: real(layers[::-1], **options))


def leaves_rows_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", lambda rows, matrix, out: out.copy_(rows))


def loses_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda rows, matrix, out: real(rows, matrix.zero_(), out=out))


def to_host(change: Callable[[torch.Tensor, torch.Tensor], object]) -> Patch:
    """Replace the copies from the device into pinned memory."""
    real = torch.Tensor.copy_

    def copy(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if target.device.type == "cpu" and source.device.type == "npu" and non_blocking:
            change(target, source)
            return target
        return real(target, source, non_blocking)

    return lambda monkeypatch: monkeypatch.setattr(torch.Tensor, "copy_", copy)


def shifted(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.roll(1, 0).cpu())


def refused(target: torch.Tensor, source: torch.Tensor) -> None:
    raise RuntimeError("aclrtMemcpyAsync failed, error code is 107002")


def never_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_LANDS_IN_S", 0.2)
    monkeypatch.setattr(torch.npu.Event, "query", lambda event: False)  # type: ignore[attr-defined]


FAULTS: dict[str, tuple[bool, Patch, str]] = {
    "null pointer": (False, null_pointers, "'ring' has failed: UserError: .*null pointer"),
    "no upload": (
        False,
        fails(self_test.Pattern, "upload"),
        "'upload' has failed: RuntimeError: The Inner error.* 507015[.] Run",
    ),
    "stack fails": (
        False,
        fails(torch, "stack"),
        "'stack' has failed: RuntimeError: The Inner error",
    ),
    "other layers": (
        False,
        stacks_other_layers,
        "'stack' has failed: row 0, layer 0, element 0 is",
    ),
    "mm fails": (True, fails(torch, "mm"), "'turn back' has failed: RuntimeError"),
    "rows stay rotated": (
        True,
        leaves_rows_rotated,
        "'turn back' has failed: row 0, .* instead of",
    ),
    "matrix is lost": (
        True,
        loses_the_matrix,
        "'turn back' has failed: the rotation on the device is not orthogonal",
    ),
    "copy is refused": (
        False,
        to_host(refused),
        "'copy' has failed: RuntimeError: aclrtMemcpyAsync failed",
    ),
    "copy of other rows": (
        False,
        to_host(shifted),
        "'copy' has failed: row 0, layer 0, element 0 is",
    ),
    "copy that never lands": (False, never_lands, "'copy' has failed: TimeoutError: 0 of 150 rows"),
}


@pytest.mark.parametrize(("rotated", "fault", "message"), list(FAULTS.values()), ids=list(FAULTS))
def test_fault_ends_the_start_with_an_error_that_names_the_step(
    monkeypatch: pytest.MonkeyPatch, rotated: bool, fault: Patch, message: str
) -> None:
    staging = make_staging(rotated=rotated)
    fault(monkeypatch)
    with pytest.raises(SelfTestError, match=f"^self-test={message}") as failure:
        run_self_test(staging)
    assert "\n" not in str(failure.value)
    assert failure.value.remedy


def test_the_proposer_tests_its_staging_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(staging=make_staging())
    monkeypatch.setattr(
        "vllm_ascend_hsx.drafter.drafter.find_layers", lambda config, kind: {"layer": layer}
    )
    formats: list[str] = []

    def load_model(self: Any, target: torch.nn.Module) -> None:
        formats.append(self.vllm_config.load_config.load_format)

    monkeypatch.setattr(AscendExtractHiddenStatesProposer, "load_model", load_model)
    kept = SimpleNamespace(config=SimpleNamespace(rotation="keep"))
    monkeypatch.setattr("vllm_ascend_hsx.drafter.drafter.read_settings", lambda config: kept)
    proposer = HsxProposer.__new__(HsxProposer)
    proposer.vllm_config = SimpleNamespace(load_config="the target's")
    proposer.load_model(torch.nn.Module())
    assert proposer.staging is layer.staging
    assert (formats, proposer.vllm_config.load_config) == (["dummy"], "the target's"), (
        "the drafter reads no checkpoint"
    )
    stacks_other_layers(monkeypatch)
    with pytest.raises(SelfTestError, match="'stack'"):
        proposer.load_model(torch.nn.Module())


@pytest.mark.parametrize(
    ("basis", "wish", "refused"),
    [("", "undo", True), ("", "keep", False), ("model", "undo", False)],
)
def test_rotated_target_without_a_declared_rotation_is_refused(
    monkeypatch: pytest.MonkeyPatch, basis: str, wish: str, refused: bool
) -> None:
    layer = SimpleNamespace(staging=make_staging())
    settings = SimpleNamespace(
        config=SimpleNamespace(rotation=wish), row_format=SimpleNamespace(basis=basis)
    )
    monkeypatch.setattr(
        "vllm_ascend_hsx.drafter.drafter.find_layers", lambda config, kind: {"layer": layer}
    )
    monkeypatch.setattr("vllm_ascend_hsx.drafter.drafter.read_settings", lambda config: settings)
    target = torch.nn.Module()
    target.norm = torch.nn.LayerNorm(HIDDEN)  # all weights are 1
    drafter = Drafter()
    drafter.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="a-w8a8-rot", quantization="ascend")
    )
    with (
        pytest.raises(UserError, match="model='a-w8a8-rot' is rotated")
        if refused
        else nullcontext()
    ):
        drafter.finish_loading(target)


# Each case has a device on which no other test launches operators.
@pytest.mark.parametrize(
    ("num_layers", "rotated", "index"), [(3, False, 1), (40, False, 2), (3, True, 3), (40, True, 4)]
)
def test_self_test_launches_every_operator_and_allocates_all_memory_of_a_step(
    num_layers: int, rotated: bool, index: int
) -> None:
    device = torch.device("npu", index)
    with torch.npu.device(device):  # type: ignore[attr-defined]
        staging = make_staging(num_layers, rotated, device=device)
        rows = [
            torch.ones(200, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(num_layers)
        ]
        ring = PinnedRing(1 << 20, (num_layers, HIDDEN), torch.bfloat16)
        run_self_test(staging)
        gc.collect()
        launched, free = core.first_launches(), torch.npu.mem_get_info(device)  # type: ignore[attr-defined]
        chunks: list[HostChunk] = []
        lander = Lander(ring, device, chunks.append, lambda error: None)
        staging.pass_on = lander.submit
        staging.write(rows, [Span("a", 0, 200, 0)])
        last = staging.take()
        assert last is not None
        lander.submit(last)
        assert lander.close(60)
    assert sum(len(chunk.rows) for chunk in chunks) == 200
    assert core.first_launches() == launched
    assert torch.npu.mem_get_info(device) == free  # type: ignore[attr-defined]
