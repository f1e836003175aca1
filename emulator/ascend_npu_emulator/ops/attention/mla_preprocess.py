"""The reference for MLAPO: all steps of a W8A8 layer before sparse attention, in one operator.

The definition is vllm-ascend's kernel, csrc/mla_preprocess of 0.23.0.post1. Line numbers without a
file refer to op_kernel/mla_preprocess_mix_bf16_qdown.hpp. The kernel of 0.30.0rc2 computes the
same.
"""

from typing import NamedTuple

import torch

from ascend_npu_emulator.ops.attention.cache import FRACTAL_BYTES
from ascend_npu_emulator.ops.checks import check, check_blocks, unsupported
from ascend_npu_emulator.ops.poison import poisoned
from ascend_npu_emulator.ops.quantization.linear import int8_product

_OP = "mla_preprocess"
_ROWS_AT_MOST = 1024  # op_host/mla_preprocess.h:728
_LATENT, _ROPE = (
    512,
    64,
)  # other sizes "may produce accuracy issues" (mla_preprocess_torch_adpt.h of 0.30.0rc2)
_EPSILON = 1e-6  # of both norms, independent of the model (lines 572 and 2415)
_CACHE_MODES = ("krope_ctkv", "int8_nzcache", "nzcache")
_QUANT_MODES = (
    "per_tensor_quant_asymm",
    "per_token_quant_symm",
    "per_token_quant_asymm",
    "no_quant",
)
_SUPPORTED = ("krope_ctkv", "per_tensor_quant_asymm", True)


class _Product(NamedTuple):
    """A W8A8 layer: int8 weight [1, K / 32, N, 32], int32 bias [N], and scale, float32 [N]."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None

    def check(self, inner: int, outer: int, index: int) -> None:
        """Check the shapes for [rows, ``inner``] to [rows, ``outer``]."""
        _check(
            self.name, self.weight, torch.int8, (1, inner // FRACTAL_BYTES, outer, FRACTAL_BYTES)
        )
        _check(f"bias{index}", self.bias, torch.int32, (outer,))
        _check(f"descale{index}", self.scale, torch.float32, (outer,))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return bfloat16 [rows, N]: exact sums plus bias, scaled in float32 (lines 2247, 2298)."""
        assert self.bias is not None and self.scale is not None
        matrix = self.weight[0].permute(0, 2, 1).flatten(0, 1)  # [K, N]
        return ((int8_product(rows, matrix) + self.bias).float() * self.scale).to(torch.bfloat16)


class _Scale(NamedTuple):
    """One scale, bfloat16 [1], and one offset, int8 [1], for all elements."""

    scale: torch.Tensor | None
    offset: torch.Tensor | None

    def __call__(self, exact: torch.Tensor) -> torch.Tensor:
        """Return int8: float32 times the scale, rounded to float16, then to whole numbers.

        (Lines 436, 484 and 486, kernel/kernel_utils.h:63 and 75.)
        """
        assert self.scale is not None and self.offset is not None
        halves = (exact * (1 / self.scale.float()) + self.offset.float()).half().float()
        return halves.nan_to_num(nan=0.0).clamp(-128, 127).round().to(torch.int8)


def mla_preprocess(
    hiddenState: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor | None,
    gamma1: torch.Tensor,
    beta1: torch.Tensor | None,
    wuq: torch.Tensor,
    descale1: torch.Tensor | None,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor | None,
    quant_offset0: torch.Tensor | None,
    bias0: torch.Tensor | None,
    quant_scale1: torch.Tensor | None,
    quant_offset1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    ctkv_scale: torch.Tensor | None,
    q_nope_scale: torch.Tensor | None,
    cache_mode: str | None,
    quant_mode: str | None,
    enable_inner_out: bool | None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
    inner_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the queries of sparse attention, and each row's latent and rope into the caches.

    The rows are quantised and multiplied by ``wdqkv``. The first 512 elements of the product are
    normed with ``gamma2`` to the latent, the next 64 are the rope, and the rest is normed with
    ``gamma1`` and ``beta1`` to the latent query. The latent query is quantised before rounding and
    multiplied by ``wuq``. In each head of this product the last 64 elements are rotated, in pairs
    32 apart, and the first P are multiplied by ``wuk``. Supported: bfloat16, one scale for all
    rows, and caches with separate ropes.

    Args:
        hiddenState: bfloat16 [T, H], at most 1024 rows.
        wdqkv, bias0, descale0: see ``_Product``; [T, H] to [T, 512 + 64 + Q].
        wuq, bias1, descale1: [T, Q] to [T, heads * (P + 64)].
        gamma1, beta1: bfloat16 [Q].
        gamma2: bfloat16 [512].
        cos, sin: bfloat16 [T, ..., 64], one per row.
        wuk: bfloat16 [heads, P, 512].
        kv_cache_out0, kv_cache_out1: bfloat16 [blocks, block_size, 1, 512] and [..., 64], written.
        kv_cache, kv_cache_rope: same shapes, not read.
        slotmapping: int32 [T]. -1 is skipped. Other slots outside the cache raise; hardware would
            write out of bounds. A slot that occurs twice holds neither row.
        quant_scale0, quant_offset0, quant_scale1, quant_offset1: see ``_Scale``.
        q_out0, q_out1, inner_out: bfloat16 [T, heads, 512], [T, heads, 64] and [T, Q], written.

    Returns:
        The five written tensors.
    """
    check(
        cache_mode in _CACHE_MODES,
        _OP,
        "cache_mode",
        f"{cache_mode!r} is not one of {_CACHE_MODES}",
    )
    check(
        quant_mode in _QUANT_MODES,
        _OP,
        "quant_mode",
        f"{quant_mode!r} is not one of {_QUANT_MODES}",
    )
    if (cache_mode, quant_mode, enable_inner_out) != _SUPPORTED:
        raise unsupported(
            _OP,
            "cache_mode, quant_mode, enable_inner_out",
            (cache_mode, quant_mode, enable_inner_out),
        )
    if hiddenState.dtype != torch.bfloat16 or cos is None or sin is None:
        raise unsupported(_OP, "hiddenState, cos, sin", (hiddenState.dtype, cos, sin))
    check(
        hiddenState.dim() == 2 and wuk.dim() == 3,
        _OP,
        "hiddenState, wuk",
        "must have 2 and 3 dimensions",
    )
    (rows, hidden), (heads, nope, _), query = hiddenState.shape, wuk.shape, gamma1.shape[0]
    check(
        1 <= rows <= _ROWS_AT_MOST, _OP, "hiddenState", f"{rows} rows must be 1 to {_ROWS_AT_MOST}"
    )
    for name, size in (("hiddenState", hidden), ("gamma1", query)):
        check(
            size % FRACTAL_BYTES == 0,
            _OP,
            name,
            f"{size} elements must be a multiple of {FRACTAL_BYTES}",
        )
    down, up = _Product("wdqkv", wdqkv, bias0, descale0), _Product("wuq", wuq, bias1, descale1)
    down.check(hidden, _LATENT + _ROPE + query, 0)
    up.check(query, heads * (nope + _ROPE), 1)
    halves = {
        "hiddenState": (hiddenState, (rows, hidden)), "gamma1": (gamma1, (query,)), "beta1": (beta1, (query,)),
        "gamma2": (gamma2, (_LATENT,)), "wuk": (wuk, (heads, nope, _LATENT)), "cos": (cos, (rows, *cos.shape[1:-1], _ROPE)),
        "sin": (sin, (rows, *cos.shape[1:-1], _ROPE)), "quant_scale0": (quant_scale0, (1,)), "quant_scale1": (quant_scale1, (1,)),
        "q_out0": (q_out0, (rows, heads, _LATENT)), "q_out1": (q_out1, (rows, heads, _ROPE)), "inner_out": (inner_out, (rows, query)),
    }  # fmt: skip
    for name, (tensor, shape) in halves.items():
        _check(name, tensor, torch.bfloat16, shape)
    check(
        cos.numel() == rows * _ROPE,
        _OP,
        "cos",
        f"shape {tuple(cos.shape)} must have {rows} times {_ROPE} elements",
    )
    for name, offset in (("quant_offset0", quant_offset0), ("quant_offset1", quant_offset1)):
        _check(name, offset, torch.int8, (1,))
    _check("slotmapping", slotmapping, torch.int32, (rows,))
    _check_caches((kv_cache, kv_cache_rope, kv_cache_out0, kv_cache_out1))

    assert beta1 is not None
    turns = cos.view(rows, _ROPE), sin.view(rows, _ROPE)
    latent, rope, latent_query = down(
        _Scale(quant_scale0, quant_offset0)(hiddenState.float())
    ).split([_LATENT, _ROPE, query], -1)
    normed = _normed(latent_query, gamma1) + beta1.float()
    inner_out.copy_(normed)
    per_head = up(_Scale(quant_scale1, quant_offset1)(normed)).view(rows, heads, nope + _ROPE)
    q_out0.copy_(torch.einsum("thp,hpl->thl", per_head[..., :nope].float(), wuk.float()))
    q_out1.copy_(_rotated(per_head[..., nope:], *(turn.unsqueeze(1) for turn in turns)))
    _store(kv_cache_out0, slotmapping, _normed(latent, gamma2).to(torch.bfloat16))
    _store(kv_cache_out1, slotmapping, _rotated(rope, *turns).to(torch.bfloat16))
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out


def _check(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Check a tensor. The kernel takes addresses alone and checks nothing."""
    check(tensor is not None, _OP, name, "must be given")
    assert tensor is not None
    check(tensor.dtype == dtype, _OP, name, f"dtype {tensor.dtype} must be {dtype}")
    check(tuple(tensor.shape) == shape, _OP, name, f"shape {tuple(tensor.shape)} must be {shape}")
    check(tensor.is_contiguous(), _OP, name, f"strides {tensor.stride()} must be contiguous")


def _check_caches(caches: tuple[torch.Tensor, ...]) -> None:
    names, blocks = (
        ("kv_cache", "kv_cache_rope", "kv_cache_out0", "kv_cache_out1"),
        tuple(caches[0].shape[:2]),
    )
    for name, cache, width in zip(names, caches, 2 * (_LATENT, _ROPE), strict=True):
        check(
            cache.dtype == torch.bfloat16,
            _OP,
            name,
            f"dtype {cache.dtype} must be {torch.bfloat16}",
        )
        check(
            tuple(cache.shape) == (*blocks, 1, width),
            _OP,
            name,
            f"shape {tuple(cache.shape)} must be {(*blocks, 1, width)}",
        )
        check_blocks(_OP, name, cache)


def _normed(rows: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    exact = rows.float()
    return exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + _EPSILON) * gamma.float()


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rows in float32 with elements i and i + 32 rotated (lines 136 and 2670)."""
    exact = rows.float()
    first, second = exact.chunk(2, -1)
    return exact * cos.float() + torch.cat((-second, first), -1) * sin.float()


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    size = cache.shape[1]
    outside = slots[(slots < -1) | (slots >= cache.shape[0] * size)]
    check(
        outside.numel() == 0,
        _OP,
        "slotmapping",
        f"{outside.tolist()[:8]} lie outside the cache's {cache.shape[0] * size} slots",
    )
    kept = slots >= 0
    at = slots[kept].long()
    cache[at // size, at % size, 0] = rows[kept]
    places, written = at.unique(return_counts=True)
    twice = places[written > 1]
    cache[twice // size, twice % size, 0] = poisoned((twice.shape[0], cache.shape[-1]), rows)
