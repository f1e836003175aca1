"""Rows in float8 with a scale for each token, equal to those of hs_connectors bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from depth import depth
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.tensors import dequantized
from vllm_ascend_hsx.sinks import encoder
from vllm_ascend_hsx.sinks.encoder import Fp8PerToken, encoder_for

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
LAYER_IDS, HIDDEN = (2, 0, 3), 8
ROW_SHAPE = (len(LAYER_IDS), HIDDEN)
# The 127 magnitudes of float8_e4m3fn: 4 bits of exponent (bias 7, no infinity), 3 of mantissa; all
# ones is NaN.
MAGNITUDES = np.array(
    [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][
        :-1
    ]
)


def row_format(dtype: str = "BF16", hidden: int = HIDDEN) -> RowFormat:
    return RowFormat(LAYER_IDS, hidden, dtype, "tiny", "fp8")


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def rows_of(
    count: int, dtype: str = "BF16", version: int = 0, shape: tuple[int, int] = ROW_SHAPE
) -> torch.Tensor:
    """Rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(count * 100 + version)
    sizes = torch.logspace(-3, 3, max(count, 1))[:count].view(-1, 1, 1)
    return (torch.randn(count, *shape, generator=generator) * sizes).to(DTYPES[dtype])


def quantised(rows: torch.Tensor, dtype: str, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoded rows float8 [tokens, layers, hidden] and the scales float32 [tokens]."""
    made = Fp8PerToken(
        RowFormat(tuple(range(rows.shape[1])), rows.shape[2], dtype, quantization="fp8")
    )
    stored = made.encode(first, as_rows(rows).reshape(-1).data)
    scales = made.scales(first + len(rows))[first:]
    values = torch.from_numpy(np.frombuffer(stored, np.uint8).copy()).view(torch.float8_e4m3fn)
    return values.reshape(rows.shape), torch.from_numpy(scales)


@st.composite
def any_rows(draw: st.DrawFn) -> tuple[str, torch.Tensor]:
    """Rows of arbitrary bits, or of one magnitude with zeros and subnormal numbers."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = (draw(st.integers(1, 5)), 2, 4 * draw(st.integers(1, 4)))
    bits = hnp.arrays(BITS[dtype], shape)
    small = hnp.arrays(BITS[dtype], shape, elements=st.integers(0, 300))
    rows = torch.from_numpy(draw(st.one_of(bits, small))).view(DTYPES[dtype])
    return dtype, torch.where(rows.isfinite(), rows, torch.zeros_like(rows)) if draw(
        st.booleans()
    ) else rows


@settings(max_examples=depth(400))
@given(case=any_rows(), step=st.sampled_from([1, 8, 40, 1 << 18]))
def test_values_and_scales_equal_those_of_hs_connectors_bit_for_bit(
    case: tuple[str, torch.Tensor], step: int
) -> None:
    dtype, rows = case
    theirs, their_scales = quantize_tensor_to_fp8(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_AT_A_TIME", step)
        ours, scales = quantised(rows, dtype, first=3)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(
        scales.view(torch.int32)[scales.isfinite()],
        their_scales.view(-1).view(torch.int32)[scales.isfinite()],
    )
    assert torch.equal(scales, their_scales.view(-1)) or scales.isnan().equal(
        their_scales.view(-1).isnan()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-10, 1e-3, 1.0, 3e4])
def test_values_are_rounded_to_nearest_even(dtype: str, size: float) -> None:
    rows = (torch.linspace(-1, 1, 4 * 2 * 512, dtype=torch.float64).view(4, 2, 512) * size).to(
        DTYPES[dtype]
    )
    ours, scales = quantised(rows, dtype)
    largest = rows.double().abs().amax((1, 2))
    # hs_connectors divides in float32, as we do: the quotient may be off by half a unit of it.
    assert torch.allclose(scales.double(), (largest / 448).clamp(min=1e-12), rtol=2**-23, atol=0)
    wanted = (rows.float() / scales.view(-1, 1, 1)).double().numpy()
    distance = np.abs(np.abs(wanted)[..., None] - MAGNITUDES)
    nearest = np.where(distance == distance.min(-1, keepdims=True), np.arange(127), -1)
    even = np.where((nearest >= 0) & (nearest % 2 == 0), nearest, -1).max(-1)
    tied = (nearest >= 0).sum(-1) > 1
    codes = np.where(tied, even, nearest.max(-1))
    assert np.array_equal(ours.view(torch.uint8).numpy() & 0x7F, codes)
    assert np.array_equal(
        (ours.view(torch.uint8).numpy() >> 7).astype(bool), np.signbit(rows.float().numpy())
    )


def bound(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the error bound: half a unit of 3 bits of mantissa, or half of the smallest step."""
    return torch.maximum(rows.double().abs() * 2**-4, scales.double().view(-1, 1, 1) * 2**-10)


@settings(max_examples=depth(100))
@given(
    rows=hnp.arrays(np.float32, (3, 2, 16), elements=st.floats(-3e4, 3e4, width=32)),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_quantisation_error_is_within_the_documented_bound(rows: np.ndarray, dtype: str) -> None:
    given = torch.from_numpy(rows).to(DTYPES[dtype])
    stored, scales = quantised(given, dtype)
    exact = stored.double() * scales.double().view(-1, 1, 1)
    lost = (exact - given.double()).abs()
    assert bool(
        (lost <= bound(given, scales) * (1 + 2**-20)).all()
    )  # the quotient is rounded to float32 first
    # The reader rounds both factors and the product to the model's dtype.
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    read = dequantized(stored, scales.view(-1, 1, 1), DTYPES[dtype])
    assert bool(
        (
            (read.double() - exact).abs()
            <= exact.abs() * 2.02 * unit + torch.finfo(DTYPES[dtype]).tiny
        ).all()
    )


# Memory and threads


def test_rows_that_are_not_quantised_need_no_encoder() -> None:
    assert encoder_for(RowFormat(LAYER_IDS, HIDDEN, "BF16")) is None


def test_thread_reuses_its_quantisation_memory() -> None:
    made = Fp8PerToken(row_format(hidden=1024))
    rows = rows_of(8, shape=(3, 1024))
    addresses = set()
    for count in (8, 1, 3):
        stored = made.encode(0, as_rows(rows[:count]).reshape(-1).data)
        addresses.add(np.frombuffer(stored, np.uint8).ctypes.data)
        assert stored.nbytes == count * 3 * 1024
    (address,) = addresses
    assert address % 4096 == 0


def test_quantising_uses_one_thread_per_writer() -> None:
    """Other threads keep the default number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen: dict[str, int] = {}

    def write() -> None:
        Fp8PerToken(row_format()).encode(0, as_rows(rows_of(2)).reshape(-1).data)
        seen["writer"] = torch.get_num_threads()

    def other() -> None:
        seen["other"] = torch.get_num_threads()

    try:
        for target in (write, other):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert seen == {"writer": 1, "other": 4}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_read_only_rows_are_quantised() -> None:
    rows = rows_of(4)
    made = Fp8PerToken(row_format())
    assert (
        bytes(made.encode(0, memoryview(as_rows(rows).tobytes())))
        == as_rows(quantised(rows, "BF16")[0]).tobytes()
    )
