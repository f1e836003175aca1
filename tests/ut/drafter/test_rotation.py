"""Rows of a rotated target are turned back while they are staged, and never otherwise changed."""

from __future__ import annotations

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu

from vllm_ascend_hsx.drafter import staging as staging_module
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache

LAYERS, HIDDEN, TOKENS = 3, 16, 24
LAYER_ORDER = (2, 0, 1)
DEVICE = torch.device("npu:0")


def orthogonal(size: int, seed: int = 0) -> torch.Tensor:
    """A rotation that is not its own inverse: turning twice, or the wrong way, is seen."""
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1024, 4], ids=["in one buffer", "in several"])
def test_staged_rows_are_in_the_models_own_basis(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int) -> None:
    monkeypatch.setattr(staging_module, "_TURNED_AT_ONCE", at_once)
    rotation, seeded = orthogonal(HIDDEN), torch.Generator().manual_seed(1)
    rows = [torch.randn(TOKENS, HIDDEN, generator=seeded) for _ in range(LAYERS)]
    rotated = [(layer @ rotation).to(dtype) for layer in rows]
    options = {"num_slots": 2, "max_tokens": TOKENS, "num_layers": LAYERS, "hidden_size": HIDDEN, "dtype": dtype, "device": DEVICE}
    cache = StagingCache(**options, layer_order=LAYER_ORDER, rotation=rotation.to(DEVICE))  # type: ignore[arg-type]
    cache.rows.fill_(7.0)
    cache.write([layer.to(DEVICE) for layer in rotated], [Span("a", 0, 9, 2), Span("b", 5, 3, 15)])
    slot = cache.take()
    assert slot is not None
    torch.npu.synchronize()  # type: ignore[attr-defined]
    for index, source in enumerate(LAYER_ORDER):
        expected = torch.cat([rows[source][2:11], rows[source][15:18]])
        found = slot.rows[:12, index].cpu()
        assert found.dtype == dtype
        # A row's own rounding, twice: as the target returns it, and as it is stored.
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(slot.rows[12:].cpu(), torch.full_like(slot.rows[12:].cpu(), 7.0)), "rows without a span are not written"


def test_its_buffers_are_allocated_once() -> None:
    """vLLM measures the memory before the first request; what a step took would be missing."""
    turn = staging_module.TurnBack(orthogonal(HIDDEN).to(DEVICE), 4)
    layers = [torch.ones(9, HIDDEN, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]
    out = torch.empty(9, LAYERS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    turn(layers, out)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    torch.npu.reset_peak_memory_stats()  # type: ignore[attr-defined]
    before = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    turn(layers, out)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    assert torch.npu.max_memory_allocated() == before  # type: ignore[attr-defined]
