"""vllm-ascend's fused norm and gate, run from source, against the definition."""

from __future__ import annotations

import pytest
import torch
from emulated import close, random
from releases import only_with
from test_ops_triton import kernels_of

SOURCE, KERNEL = "ops/triton/fused_norm_gate.py", "_fused_norm_gate_kernel"
SWISH, SIGMOID = 0, 1
ROWS, WIDTH, EPS = 7, 12, 1e-6

pytestmark = only_with(">=0.26", f"it has no {SOURCE}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [SWISH, SIGMOID])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_rows_are_normalized_and_gated(
    is_rms_norm: bool, norm_before_gate: bool, activation: int, dtype: torch.dtype
) -> None:
    x, gate = (random(ROWS, WIDTH, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, bias = (random(WIDTH, seed=seed, dtype=dtype) for seed in (2, 3))
    out, mean, rstd = torch.zeros_like(x), torch.zeros(ROWS), torch.zeros(ROWS)
    options = {
        "feature_size": WIDTH, "block_feature": 16, "block_rows": 2, "activation": activation,
        "norm_before_gate": norm_before_gate, "is_rms_norm": is_rms_norm, "has_bias": True,
    }  # fmt: skip
    # Two programs for four tiles of two rows. The last tile is half full.
    kernels_of("vllm_ascend", SOURCE)[KERNEL][(2,)](
        x, gate, out, weight, bias, mean, rstd, EPS, ROWS, 2, **options
    )
    factor = gate.double().sigmoid() * (gate.double() if activation == SWISH else 1)
    rows = x.double() if norm_before_gate else x.double() * factor
    centre = 0 if is_rms_norm else rows.mean(-1, keepdim=True)
    scale = 1 / ((rows - centre).square().mean(-1, keepdim=True) + EPS).sqrt()
    exact = (rows - centre) * scale * weight.double() + bias.double()
    close(out, exact * factor if norm_before_gate else exact)
    close(rstd, scale[:, 0], roundings=4)
    if not is_rms_norm:
        close(mean, centre[:, 0])
