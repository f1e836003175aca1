"""Rows of a rotated target are turned back while they are staged, and not changed otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from releases import only_with
from safetensors.torch import save_file

from vllm_ascend_hsx.drafter import shapes
from vllm_ascend_hsx.drafter.rotation import TurnBack
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache

LAYERS, HIDDEN, TOKENS = 3, 16, 24
LAYER_ORDER = (2, 0, 1)
DEVICE = torch.device("npu:0")


def orthogonal(size: int, seed: int = 0) -> torch.Tensor:
    """Return a rotation that differs from the inverse: wrong or repeated turns are visible."""
    return torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )[0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1024, 4], ids=["in one buffer", "in several"])
def test_staged_rows_are_in_the_models_own_basis(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int
) -> None:
    monkeypatch.setattr(shapes, "_TURNED_AT_ONCE", at_once)
    rotation, seeded = orthogonal(HIDDEN), torch.Generator().manual_seed(1)
    rows = [torch.randn(TOKENS, HIDDEN, generator=seeded) for _ in range(LAYERS)]
    rotated = [(layer @ rotation).to(dtype) for layer in rows]
    options = {
        "num_slots": 2,
        "slot_rows": TOKENS,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": dtype,
        "device": DEVICE,
    }
    cache = StagingCache(**options, layer_order=LAYER_ORDER, rotation=rotation)  # type: ignore[arg-type]
    cache.rows.fill_(7.0)
    cache.write([layer.to(DEVICE) for layer in rotated], [Span("a", 0, 9, 2), Span("b", 5, 3, 15)])
    slot = cache.take()
    assert slot is not None
    torch.npu.synchronize()  # type: ignore[attr-defined]
    for index, source in enumerate(LAYER_ORDER):
        expected = torch.cat([rows[source][2:11], rows[source][15:18]])
        found = slot.rows[:12, index].cpu()
        assert found.dtype == dtype
        # A row is rounded twice: in the output of the target, and when it is stored.
        torch.testing.assert_close(
            found.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05
        )
    assert torch.equal(slot.rows[12:].cpu(), torch.full_like(slot.rows[12:].cpu(), 7.0)), (
        "rows without a span are not written"
    )


@only_with("<0.30", "it turns drafts in models/llama_eagle3.py")
def test_draft_computes_the_same_from_rows_as_in_vllm_ascend(tmp_path: Path) -> None:
    """A draft trained on the rows computes the same when vllm-ascend serves it."""
    from vllm_ascend.patch.worker.patch_draft_quarot import make_load_weights

    class Draft(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(dtype="float32")
            self.model = torch.nn.Module()
            self.model.use_aux_hidden_state = True
            self.model.fc = torch.nn.Linear(LAYERS * HIDDEN, HIDDEN, bias=False)
            self.model.embed_tokens = torch.nn.Embedding(5, HIDDEN)

    rotation, weights, embedding = (
        orthogonal(HIDDEN),
        torch.randn(HIDDEN, LAYERS * HIDDEN),
        torch.randn(5, HIDDEN),
    )
    save_file({"global_rotation": rotation.contiguous()}, tmp_path / "q")
    save_file({"embed_tokens": embedding @ rotation}, tmp_path / "model.safetensors")
    draft = Draft()
    make_load_weights(tmp_path, tmp_path / "q")(draft, [("fc.weight", weights)])

    layers = [torch.randn(TOKENS, HIDDEN) for _ in range(LAYERS)]  # X @ Q, the output of the target
    rows = torch.empty(TOKENS, LAYERS, HIDDEN, device=DEVICE)
    TurnBack(rotation, TOKENS, DEVICE)([layer.to(DEVICE) for layer in layers], rows)
    served = draft.model.fc(torch.cat(layers, dim=1))
    torch.testing.assert_close(rows.flatten(1).cpu() @ weights.T, served, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        draft.model.embed_tokens.weight.data, embedding, rtol=1e-4, atol=1e-4
    )


def test_rows_are_turned_back_after_sleep_discards_device_memory() -> None:
    """After sleep level 2, memory is mapped at the same address, without data."""
    rotation, rows = orthogonal(HIDDEN), torch.randn(TOKENS, HIDDEN)
    turn, out = TurnBack(rotation, TOKENS, DEVICE), torch.empty(TOKENS, 1, HIDDEN, device=DEVICE)
    for _ in range(3):
        turn.before_sleep()
        turn.before_sleep()  # a second call does not copy the lost memory
        for buffer in (turn._transposed, turn._rotated, turn._turned):
            buffer.fill_(float("nan"))
        turn.before_sleep()
        turn([(rows @ rotation).to(DEVICE)], out)
        torch.testing.assert_close(out[:, 0].cpu(), rows, rtol=0, atol=1e-5)


def test_rotation_buffers_are_allocated_once() -> None:
    """vLLM measures memory before the first request, and would not count memory of later steps.

    A step takes only the workspace of the matrix product: 20 MiB, like products of the target
    (mat_mul_v3/op_host/op_tiling/matmul_v3_base_tiling.cpp:2819, ops-nn 9.1.0).
    """
    turn = TurnBack(orthogonal(HIDDEN), 4, DEVICE)
    layers = [torch.ones(9, HIDDEN, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]
    out = torch.empty(9, LAYERS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    turn(layers, out)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    torch.npu.reset_peak_memory_stats()  # type: ignore[attr-defined]
    before = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    turn(layers, out)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    assert torch.npu.max_memory_allocated() - before == 20 << 20  # type: ignore[attr-defined]
