"""What readers do with quantised rows: whether a file's scales fit them, and what they were before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, QUANTIZATIONS, SCALES, Header
from vllm_ascend_hsx.protocol.rows import FP8_DTYPE, ROW_DTYPES

if TYPE_CHECKING:
    import torch

# float32 of the scale that no row goes below: of rows whose largest magnitude is under 4.5e-10, most or all becomes 0.
LEAST_SCALE = 9.999999960041972e-13


def dequantized(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in the model's dtype.

    In bfloat16 and float32 both factors are converted to that and then multiplied, as hs_connectors 0.9.0 does (fp8_utils.py:54): both
    readers give the same bits. In float16 the product is made in float32 first, for the scale of a small row has no float16.

    Args:
        rows: float8_e4m3fn [tokens, layers, hidden].
        scales: float32 [tokens, 1, 1].
        dtype: bfloat16, float16 or float32.
    """
    factors = scales.dtype if str(dtype) == "torch.float16" else dtype
    return rows.to(factors).mul_(scales.to(factors)).to(dtype)


def quantization_problem(header: Header) -> str | None:
    """What is wrong with how a file with hidden states says that they are quantised, if it does; None if nothing is."""
    states, scales = header.tensors[HIDDEN_STATES], header.tensors.get(SCALES)
    said = header.metadata.get("quantization")
    if said not in (None, *QUANTIZATIONS.values()):
        return f"its rows are quantised as {said!r}, which is not known here"
    if scales is None:
        return None if said is None else f"it says that its rows are {said}, and has no {SCALES}"
    if states.dtype != FP8_DTYPE or scales.dtype != "F32" or scales.shape != (*states.shape[:1], *[1] * len(states.shape[1:])):
        return f"{SCALES} {scales.dtype} {list(scales.shape)} does not fit {HIDDEN_STATES} {states.dtype} {list(states.shape)}"
    before = header.metadata.get("dtype", "BF16")
    return None if before in ROW_DTYPES else f"it says that its rows were {before} before they were quantised"
