"""Test norms, SwiGLU, rotary embeddings and the fused product against float64 definitions."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from emulated import TOLERANCE, close, random, scenarios

from ascend_npu_emulator.ops import matmul, norm, rotary

# Results are also rounded before the multiplication by gamma.
close_twice = partial(close, roundings=2)


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / rms(x) * gamma and the reciprocals 1 / rms(x) [..., 1], in float64."""
    y, rstds = x.double().clone(), []
    for row in y.view(-1, x.shape[-1]):
        rstds.append(
            1.0 / math.sqrt(sum(value * value for value in row.tolist()) / len(row) + epsilon)
        )
        row.mul_(rstds[-1]).mul_(gamma.double())
    return y, torch.tensor(rstds, dtype=torch.float64).view(*x.shape[:-1], 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 32), (1, 7), (2, 3, 16)])
def test_rms_norm_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gamma = random(*shape, dtype=dtype), 1 + 0.1 * random(shape[-1], seed=1, dtype=dtype)
    for actual, exact in zip(
        norm.npu_rms_norm(x, gamma, 1e-6), rms_norm(x, gamma, 1e-6), strict=True
    ):
        close_twice(actual, exact)
    assert norm.npu_rms_norm(x, gamma, 1e-6)[1].dtype == torch.float32


def test_rms_norm_over_two_dimensions_returns_one_reciprocal_per_row() -> None:
    x, gamma = random(3, 2, 4), random(2, 4, seed=1)
    y, rstd = norm.npu_rms_norm(x, gamma, 1e-5)
    exact, exact_rstd = rms_norm(x.view(3, 8), gamma.view(8), 1e-5)
    close(y, exact.view(3, 2, 4))
    close(rstd, exact_rstd.view(3, 1, 1))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_normalises_and_returns_the_rounded_sum(dtype: torch.dtype) -> None:
    x1, x2, gamma = (
        random(6, 24, dtype=dtype),
        8 * random(6, 24, seed=1, dtype=dtype),
        random(24, seed=2, dtype=dtype),
    )
    y, rstd, total = norm.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    assert torch.equal(total, (x1.double() + x2.double()).to(dtype))
    for actual, exact in zip((y, rstd), rms_norm(total, gamma, 1e-6), strict=True):
        close_twice(actual, exact)


@pytest.mark.parametrize("with_bias", [False, True])
def test_add_rms_norm_bias_adds_beta_only_to_y(with_bias: bool) -> None:
    x1, x2, gamma = random(4, 12), random(4, 12, seed=1), random(12, seed=2)
    beta = random(12, seed=3) if with_bias else None
    y, _, total = norm.npu_add_rms_norm_bias(x1, x2, gamma, beta, 1e-6)
    close(y, rms_norm(total, gamma, 1e-6)[0] + (0 if beta is None else beta.double()))
    assert torch.equal(total, x1 + x2)


def test_gemma_rms_norm_multiplies_by_one_plus_gamma() -> None:
    x, gamma = random(4, 12), random(12, seed=1)
    close(norm.npu_gemma_rms_norm(x, gamma, 1e-6)[0], rms_norm(x, 1 + gamma.double(), 1e-6)[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), [((3, 8), -1), ((2, 6, 4), 1), ((5, 2), -1)])
def test_swiglu_is_silu_of_the_first_half_times_the_second(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype)
    first, second = x.double().chunk(2, dim)
    close_twice(norm.npu_swiglu(x, dim), first / (1 + (-first).exp()) * second)


def rotated_row(
    head: list[float], cos: list[float], sin: list[float], neighbours: bool
) -> list[float]:
    """Rotate one head. Pair i is (i, i + R/2) or (2i, 2i + 1). Elements past R stay."""
    half, out = len(cos), list(head)
    for i in range(half):
        low, high = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        out[low] = head[low] * cos[i] - head[high] * sin[i]
        out[high] = head[high] * cos[i] + head[low] * sin[i]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_rotates_the_first_elements_of_each_head_in_place(
    neox: bool, rotary_dim: int, dtype: torch.dtype
) -> None:
    positions, cache = torch.tensor([4, 0, 2]), random(6, rotary_dim, seed=5, dtype=dtype)
    tensors, expected = (random(3, 2 * 8, dtype=dtype), random(3, 8, seed=1, dtype=dtype)), []
    for tensor in tensors:
        heads = tensor.double().view(3, -1, 8).tolist()
        turns = [[part.tolist() for part in cache[p].double().chunk(2)] for p in positions]
        rows = [
            [rotated_row(head, *turn, not neox) for head in row]
            for row, turn in zip(heads, turns, strict=True)
        ]
        expected.append(torch.tensor(rows, dtype=torch.float64).view(tensor.shape))
    rotary._npu_rotary_embedding(positions, *tensors, 8, cache, neox)
    for actual, exact in zip(tensors, expected, strict=True):
        close_twice(actual, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("section", [[16, 24, 24], [0, 0, 0], None])
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_mrope_rotates_each_part_of_a_head_by_time_height_or_width(
    mode: str, section: list[int] | None, dtype: torch.dtype
) -> None:
    head, rotary_dim = 136, 128
    places = torch.tensor([[4, 0, 2], [1, 5, 3], [0, 2, 5]])
    cache = random(6, rotary_dim, seed=5, dtype=dtype)
    query, key = random(3, 2 * head, dtype=dtype), random(3, head, seed=1, dtype=dtype)
    before = query.clone(), key.clone()
    axes = [0] * 16 + [1] * 24 + [2] * 24 if section and any(section) else [0] * 64
    positions = places if section and any(section) else places[0]
    results = rotary.npu_mrope(
        positions, query, key, cache, head, mrope_section=section, rotary_mode=mode
    )
    for result, tensor, unchanged in zip(results, (query, key), before, strict=True):
        rows = []
        for token in range(3):
            cos = [float(cache[places[axis, token], angle]) for angle, axis in enumerate(axes)]
            sin = [float(cache[places[axis, token], 64 + angle]) for angle, axis in enumerate(axes)]
            rows.append(
                [
                    rotated_row(part, cos, sin, mode == "interleave")
                    for part in tensor[token].double().view(-1, head).tolist()
                ]
            )
        close_twice(result, torch.tensor(rows, dtype=torch.float64).view(tensor.shape))
        assert torch.equal(tensor, unchanged)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_is_r1_times_x_plus_r2_times_rotated_x(mode: str) -> None:
    x, r1, r2 = random(2, 3, 4, 6), random(1, 3, 1, 6, seed=1), random(1, 3, 1, 6, seed=2)
    exact = torch.empty(2, 3, 4, 6, dtype=torch.float64)
    for b, s, n, d in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).tolist():
        partner, sign = (
            ((d + 3) % 6, -1 if d < 3 else 1)
            if mode == "half"
            else (d ^ 1, -1 if d % 2 == 0 else 1)
        )
        exact[b, s, n, d] = (
            r1[0, s, 0, d].double() * x[b, s, n, d]
            + r2[0, s, 0, d].double() * sign * x[b, s, n, partner]
        )
    close(rotary.npu_rotary_mul(x, r1, r2, mode), exact)


@pytest.mark.parametrize(("layout", "lead"), [("BSND", (2, 3)), ("TND", (5,))])
def test_apply_rotary_pos_emb_rotates_query_and_key_in_place(
    layout: str, lead: tuple[int, ...]
) -> None:
    query, key, angles = (
        random(*lead, 4, 64),
        random(*lead, 2, 64, seed=1),
        random(*lead, 1, 32, seed=2),
    )
    c, s = angles.double().cos(), angles.double().sin()
    halves = [tensor.double().chunk(2, -1) for tensor in (query, key)]
    expected = [torch.cat((low * c - high * s, high * c + low * s), -1) for low, high in halves]
    out = rotary.npu_apply_rotary_pos_emb(
        query, key, torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1), layout
    )
    assert out[0] is query and out[1] is key
    for actual, exact in zip(out, expected, strict=True):
        close(actual, exact, roundings=5)


def test_matmul_add_adds_transposed_x_times_weight() -> None:
    x, weight, c = (
        random(2, 4, dtype=torch.float16),
        random(2, 3, seed=1, dtype=torch.float16),
        random(4, 3, seed=2),
    )
    exact = c.double() + x.double().t() @ weight.double()
    matmul._npu_matmul_add_fp32(x, weight, c)
    close(c, exact)


POSITIONS, HALF = torch.tensor([0, 1]), torch.float16
WRONG_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "gamma of another length": (
        lambda: norm.npu_rms_norm(random(2, 8), random(4)),
        "npu_rms_norm: gamma",
    ),
    "gamma of a narrower dtype": (
        lambda: norm.npu_rms_norm(random(2, 8), random(8, dtype=torch.bfloat16)),
        "npu_rms_norm: gamma",
    ),
    "integers": (
        lambda: norm.npu_rms_norm(torch.ones(2, 8, dtype=torch.int32), random(8)),
        "npu_rms_norm: x",
    ),
    "addends of different shape": (
        lambda: norm.npu_add_rms_norm(random(2, 8), random(1, 8), random(8)),
        "npu_add_rms_norm: x2",
    ),
    "odd swiglu": (lambda: norm.npu_swiglu(random(2, 7)), "npu_swiglu: dim"),
    "rotary mode": (
        lambda: rotary.npu_rotary_mul(*(random(1, 1, 1, 4),) * 3, "quarter"),
        "npu_rotary_mul: rotary_mode",
    ),
    "sections that hardware lacks": (
        lambda: rotary.npu_mrope(
            torch.zeros(3, 2).long(),
            *(random(2, 32),) * 2,
            random(4, 32),
            32,
            mrope_section=[4, 6, 6],
        ),
        "npu_mrope: mrope_section",
    ),
    "sections with one position per token": (
        lambda: rotary.npu_mrope(
            POSITIONS, *(random(2, 128),) * 2, random(4, 128), 128, mrope_section=[16, 24, 24]
        ),
        "npu_mrope: positions",
    ),
    "layout that A2 lacks": (
        lambda: rotary.npu_apply_rotary_pos_emb(*(random(1, 2, 1, 64),) * 4, layout="BNSD"),
        "npu_apply_rotary_pos_emb: layout",
    ),
    "fewer positions than rows": (
        lambda: rotary._npu_rotary_embedding(
            POSITIONS[:1], random(2, 8), random(1, 8), 8, random(4, 8), True
        ),
        "_npu_rotary_embedding: query",
    ),
    "a view that cannot be written in place": (
        lambda: rotary._npu_rotary_embedding(
            POSITIONS, random(2, 16)[:, ::2], random(2, 8), 8, random(4, 8), True
        ),
        "_npu_rotary_embedding: query",
    ),
    "float16 accumulator": (
        lambda: matmul._npu_matmul_add_fp32(*(random(2, 2, dtype=HALF),) * 3),
        "_npu_matmul_add_fp32: C",
    ),
}


@scenarios("call, message", WRONG_CALLS)
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
