"""The normalisations, SwiGLU, the rotary embeddings and the fused product against their definitions, written as loops in float64."""

import math

import pytest
import torch

from vllm_ascend_hsx.emulator.ops import matmul, norm, rotary

# (absolute, relative): float32 may differ by the order of a sum, bfloat16 by the last of its 8 bits as well.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2**-9, 2**-7), torch.float16: (2**-12, 2**-10)}


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounds_to(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """``actual`` is ``exact`` (float64), but for the rounding of its dtype."""
    absolute, relative = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, atol=absolute, rtol=relative)


def rms_norm_of_row(row: list[float], gamma: list[float], epsilon: float) -> tuple[list[float], float]:
    rstd = 1.0 / math.sqrt(sum(value * value for value in row) / len(row) + epsilon)
    return [value * rstd * weight for value, weight in zip(row, gamma, strict=True)], rstd


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [rms_norm_of_row(row, gamma.double().tolist(), epsilon) for row in x.double().view(-1, x.shape[-1]).tolist()]
    y = torch.tensor([row for row, _ in rows], dtype=torch.float64).view(x.shape)
    return y, torch.tensor([rstd for _, rstd in rows], dtype=torch.float64).view(*x.shape[:-1], 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 32), (1, 7), (2, 3, 16)])
def test_rms_norm_is_x_over_its_root_mean_square_times_gamma(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gamma = random(shape, dtype), 1 + 0.1 * random(shape[-1:], dtype, 1)
    y, rstd = norm.npu_rms_norm(x, gamma, 1e-6)
    exact, exact_rstd = rms_norm(x, gamma, 1e-6)
    assert_rounds_to(y, exact)
    assert rstd.dtype == torch.float32
    assert_rounds_to(rstd, exact_rstd)


def test_rms_norm_over_two_dimensions_gives_one_reciprocal_per_pair() -> None:
    x, gamma = random((3, 2, 4)), random((2, 4), seed=1)
    y, rstd = norm.npu_rms_norm(x, gamma, 1e-5)
    exact, exact_rstd = rms_norm(x.view(3, 8), gamma.view(8), 1e-5)
    assert_rounds_to(y, exact.view(3, 2, 4))
    assert rstd.shape == (3, 1, 1)
    assert_rounds_to(rstd.view(3, 1), exact_rstd)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_normalises_the_rounded_sum_and_returns_it(dtype: torch.dtype) -> None:
    x1, x2, gamma = random((6, 24), dtype), 8 * random((6, 24), dtype, 1), random((24,), dtype, 2)
    y, rstd, total = norm.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    assert torch.equal(total, (x1.double() + x2.double()).to(dtype))
    exact, exact_rstd = rms_norm(total, gamma, 1e-6)
    assert_rounds_to(y, exact)
    assert_rounds_to(rstd, exact_rstd)


@pytest.mark.parametrize("with_bias", [False, True])
def test_add_rms_norm_bias_adds_beta_to_y_alone(with_bias: bool) -> None:
    x1, x2, gamma = random((4, 12)), random((4, 12), seed=1), random((12,), seed=2)
    beta = random((12,), seed=3) if with_bias else None
    y, _, total = norm.npu_add_rms_norm_bias(x1, x2, gamma, beta, 1e-6)
    exact, _ = rms_norm(total, gamma, 1e-6)
    assert_rounds_to(y, exact if beta is None else exact + beta.double())
    assert torch.equal(total, x1 + x2)


def test_gemma_rms_norm_weighs_by_one_plus_gamma() -> None:
    x, gamma = random((4, 12)), random((12,), seed=1)
    y, _ = norm.npu_gemma_rms_norm(x, gamma, 1e-6)
    assert_rounds_to(y, rms_norm(x, 1 + gamma.double(), 1e-6)[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), [((3, 8), -1), ((2, 6, 4), 1), ((5, 2), -1)])
def test_swiglu_is_silu_of_the_first_half_times_the_second(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = random(shape, dtype)
    first, second = x.double().movedim(dim, 0).chunk(2, 0)
    exact = torch.tensor([a / (1 + math.exp(-a)) * b for a, b in zip(first.flatten(), second.flatten(), strict=True)])
    actual = norm.npu_swiglu(x, dim).movedim(dim, 0)
    assert_rounds_to(actual, exact.double().view(actual.shape))


def rotated_row(head: list[float], cos: list[float], sin: list[float], neighbours: bool) -> list[float]:
    """One head turned: pair i is (i, i + R/2), or (2i, 2i + 1); elements past R stay."""
    half, out = len(cos), list(head)
    for i in range(half):
        low, high = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        out[low] = head[low] * cos[i] - head[high] * sin[i]
        out[high] = head[high] * cos[i] + head[low] * sin[i]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_turns_the_first_elements_of_each_head_in_place(
    neox: bool, rotary_dim: int, dtype: torch.dtype
) -> None:
    positions = torch.tensor([4, 0, 2])
    cache = random((6, rotary_dim), dtype, 5)
    query, key = random((3, 2 * 8), dtype), random((3, 8), dtype, 1)
    expected = []
    for tensor in (query, key):
        heads = tensor.double().view(3, -1, 8)
        rows = [
            [rotated_row(head, *cache[p].double().chunk(2), not neox) for head in heads[t].tolist()]
            for t, p in enumerate(positions.tolist())
        ]
        expected.append(torch.tensor(rows, dtype=torch.float64).view(tensor.shape))
    rotary._npu_rotary_embedding(positions, query, key, 8, cache, neox)
    assert_rounds_to(query, expected[0])
    assert_rounds_to(key, expected[1])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_is_r1_times_x_plus_r2_times_the_turned_x(mode: str) -> None:
    x, r1, r2 = random((2, 3, 4, 6)), random((1, 3, 1, 6), seed=1), random((1, 3, 1, 6), seed=2)
    exact = torch.empty(2, 3, 4, 6, dtype=torch.float64)
    for b, s, n, d in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).tolist():
        partner, sign = ((d + 3) % 6, -1 if d < 3 else 1) if mode == "half" else (d ^ 1, -1 if d % 2 == 0 else 1)
        exact[b, s, n, d] = r1[0, s, 0, d].double() * x[b, s, n, d] + r2[0, s, 0, d].double() * sign * x[b, s, n, partner]
    assert_rounds_to(rotary.npu_rotary_mul(x, r1, r2, mode), exact)


@pytest.mark.parametrize(("layout", "lead"), [("BSND", (2, 3)), ("TND", (5,))])
def test_apply_rotary_pos_emb_turns_query_and_key_in_place(layout: str, lead: tuple[int, ...]) -> None:
    query, key = random((*lead, 4, 64)), random((*lead, 2, 64), seed=1)
    angles = random((*lead, 1, 32), seed=2)
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    expected = []
    for tensor in (query, key):
        low, high = tensor.double().chunk(2, -1)
        c, s = torch.cos(angles.double()), torch.sin(angles.double())
        expected.append(torch.cat((low * c - high * s, high * c + low * s), -1))
    out = rotary.npu_apply_rotary_pos_emb(query, key, cos, sin, layout)
    assert out[0] is query
    assert out[1] is key
    for actual, exact in zip(out, expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, atol=1e-5, rtol=1e-5)


def test_matmul_add_adds_the_product_of_the_transpose() -> None:
    x, weight, c = random((2, 4), torch.float16), random((2, 3), torch.float16, 1), random((4, 3), seed=2)
    exact = c.double() + x.double().t() @ weight.double()
    matmul._npu_matmul_add_fp32(x, weight, c)
    assert_rounds_to(c, exact)


WRONG_CALLS = {
    "gamma of another length": (lambda: norm.npu_rms_norm(random((2, 8)), random((4,))), "npu_rms_norm: gamma"),
    "gamma of a narrower dtype": (
        lambda: norm.npu_rms_norm(random((2, 8)), random((8,), torch.bfloat16)), "npu_rms_norm: gamma"),
    "integers": (lambda: norm.npu_rms_norm(torch.ones(2, 8, dtype=torch.int32), random((8,))), "npu_rms_norm: x"),
    "addends of different shape": (
        lambda: norm.npu_add_rms_norm(random((2, 8)), random((1, 8)), random((8,))), "npu_add_rms_norm: x2"),
    "odd swiglu": (lambda: norm.npu_swiglu(random((2, 7))), "npu_swiglu: dim"),
    "rotary mode": (
        lambda: rotary.npu_rotary_mul(random((1, 1, 1, 4)), random((1, 1, 1, 4)), random((1, 1, 1, 4)), "quarter"),
        "npu_rotary_mul: rotary_mode"),
    "layout that A2 lacks": (
        lambda: rotary.npu_apply_rotary_pos_emb(*(random((1, 2, 1, 64)),) * 4, layout="BNSD"),
        "npu_apply_rotary_pos_emb: layout"),
    "rows that are not positions": (
        lambda: rotary._npu_rotary_embedding(torch.tensor([0]), random((2, 8)), random((1, 8)), 8, random((4, 8)), True),
        "_npu_rotary_embedding: query"),
    "a view that cannot be written in place": (
        lambda: rotary._npu_rotary_embedding(
            torch.tensor([0, 1]), random((2, 16))[:, ::2], random((2, 8)), 8, random((4, 8)), True),
        "_npu_rotary_embedding: query"),
    "float16 accumulator": (
        lambda: matmul._npu_matmul_add_fp32(*(random((2, 2), torch.float16),) * 3), "_npu_matmul_add_fp32: C"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_refused_by_operator_and_name(name: str) -> None:
    call, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()
