"""Check and dequantise quantised rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, QUANTIZATIONS, SCALES, Header
from vllm_ascend_hsx.protocol.rows import FP8_DTYPE, ROW_DTYPES

if TYPE_CHECKING:
    import torch

# The smallest scale, as float32. Rows whose largest magnitude is below 4.5e-10 become mostly 0.
LEAST_SCALE = 9.999999960041972e-13


def dequantized(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows in the model's dtype.

    In bfloat16 and float32 both factors are converted to that dtype and multiplied, as in
    hs_connectors 0.9.0 (fp8_utils.py:54), so both readers give the same bits. In float16 the
    product is computed in float32 first, because scales of small rows are below float16's range.

    Args:
        rows: float8_e4m3fn [tokens, layers, hidden].
        scales: float32 [tokens, 1, 1].
        dtype: bfloat16, float16 or float32.
    """
    factors = scales.dtype if str(dtype) == "torch.float16" else dtype
    return rows.to(factors).mul_(scales.to(factors)).to(dtype)


def quantization_problem(header: Header) -> str | None:
    """Return what is wrong with a file's quantisation, or None if it is valid or absent."""
    states, scales = header.tensors[HIDDEN_STATES], header.tensors.get(SCALES)
    said = header.metadata.get("quantization")
    if said not in (None, *QUANTIZATIONS.values()):
        return f"its rows are quantised as {said!r}, which is unknown"
    if scales is None:
        return None if said is None else f"its rows are {said}, but it has no {SCALES}"
    if (
        states.dtype != FP8_DTYPE
        or scales.dtype != "F32"
        or scales.shape != (*states.shape[:1], *[1] * len(states.shape[1:]))
    ):
        return (
            f"{SCALES} {scales.dtype} {list(scales.shape)} does not fit {HIDDEN_STATES} "
            f"{states.dtype} {list(states.shape)}"
        )
    before = header.metadata.get("dtype", "BF16")
    return (
        None
        if before in ROW_DTYPES
        else f"its rows were quantised from {before}, which is not supported"
    )
