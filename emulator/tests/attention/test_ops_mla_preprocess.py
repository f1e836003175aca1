"""Test the MLAPO kernel row by row against a definition in Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import close, int32, random, scenarios

from ascend_npu_emulator.ops.attention.mla_preprocess import mla_preprocess
from ascend_npu_emulator.ops.poison import POISON

HIDDEN, QUERY, HEADS, NOPE, LATENT, ROPE, BLOCK = 64, 32, 3, 48, 512, 64, 16
SLOTS = (3, 40, -1, 17)
ROWS = len(SLOTS)
EPSILON = 1e-6


def half(*shape: int, seed: int) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=torch.bfloat16)


def int8(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return int8 [N, K] as [1, K / 32, N, 32], the layout of vllm-ascend."""
    out = torch.empty(1, weight.shape[1] // 32, weight.shape[0], 32, dtype=torch.int8)
    for part in range(out.shape[1]):
        out[0, part] = weight[:, 32 * part : 32 * part + 32]
    return out


class Layer:
    """Arguments of the kernel for ROWS rows, and the exact results."""

    def __init__(self) -> None:
        self.down, self.up = (
            int8(LATENT + ROPE + QUERY, HIDDEN, seed=1),
            int8(HEADS * (NOPE + ROPE), QUERY, seed=2),
        )
        angle = random(ROWS, 1, 1, ROPE // 2, seed=3)
        turns = [torch.cat((part, part), -1).bfloat16() for part in (angle.cos(), angle.sin())]
        self.latents, self.ropes = (
            torch.zeros(4, BLOCK, 1, width).bfloat16() for width in (LATENT, ROPE)
        )
        outs = [
            torch.empty(ROWS, *shape).bfloat16()
            for shape in ((HEADS, LATENT), (HEADS, ROPE), (QUERY,))
        ]
        self.given: dict[str, Any] = {
            "hiddenState": half(ROWS, HIDDEN, seed=4), "wdqkv": packed(self.down), "descale0": random(len(self.down), seed=5).abs() / 5000,
            "gamma1": 1 + half(QUERY, seed=6) / 4, "beta1": half(QUERY, seed=7), "wuq": packed(self.up),
            "descale1": random(len(self.up), seed=8).abs() / 5000, "gamma2": 1 + half(LATENT, seed=9) / 4, "cos": turns[0], "sin": turns[1],
            "wuk": half(HEADS, NOPE, LATENT, seed=10), "kv_cache": self.latents, "kv_cache_rope": self.ropes, "slotmapping": int32(*SLOTS),
            "quant_scale0": torch.tensor([0.031]).bfloat16(), "quant_offset0": torch.tensor([5], dtype=torch.int8),
            "bias0": (int8(len(self.down), seed=11).int() * 90), "quant_scale1": torch.tensor([0.043]).bfloat16(),
            "quant_offset1": torch.tensor([-9], dtype=torch.int8), "bias1": (int8(len(self.up), seed=12).int() * 70),
            "ctkv_scale": torch.ones(1).bfloat16(), "q_nope_scale": torch.ones(1).bfloat16(), "cache_mode": "krope_ctkv",
            "quant_mode": "per_tensor_quant_asymm", "enable_inner_out": True, "q_out0": outs[0], "kv_cache_out0": self.latents,
            "q_out1": outs[1], "kv_cache_out1": self.ropes, "inner_out": outs[2],
        }  # fmt: skip

    def call(self, **changes: Any) -> Any:
        return mla_preprocess(
            **self.given
            | {
                name: change(self.given[name]) if callable(change) else change
                for name, change in changes.items()
            }
        )

    def quantised(self, row: list[float], index: int) -> list[int]:
        scale, offset = (
            self.given[f"quant_scale{index}"].item(),
            self.given[f"quant_offset{index}"].item(),
        )
        halves = [torch.tensor(value / scale + offset).half().item() for value in row]
        return [max(-128, min(127, round(value))) for value in halves]

    def product(self, row: list[int], weight: torch.Tensor, index: int) -> torch.Tensor:
        """Return the scaled product, bfloat16 [N]."""
        scale, bias = self.given[f"descale{index}"].tolist(), self.given[f"bias{index}"].tolist()
        sums = [
            sum(a * b for a, b in zip(row, column, strict=True)) + bias[n]
            for n, column in enumerate(weight.tolist())
        ]
        return torch.tensor([value * scale[n] for n, value in enumerate(sums)]).bfloat16()

    def turned(self, values: torch.Tensor, row: int) -> torch.Tensor:
        """Rotate the pairs of elements i and i + 32 as complex numbers."""
        cos, sin = (self.given[name][row, 0, 0, : ROPE // 2].double() for name in ("cos", "sin"))
        made = torch.complex(
            values.double()[: ROPE // 2], values.double()[ROPE // 2 :]
        ) * torch.complex(cos, sin)
        return torch.cat((made.real, made.imag))

    def exact(self, row: int) -> dict[str, torch.Tensor]:
        """Return the results of a row in float64."""
        down = self.product(
            self.quantised(self.given["hiddenState"][row].tolist(), 0), self.down, 0
        )
        latent, rope, query = down[:LATENT], down[LATENT : LATENT + ROPE], down[LATENT + ROPE :]
        normed = self.normed(query, "gamma1") + self.given["beta1"].double()
        heads = self.product(self.quantised(normed.tolist(), 1), self.up, 1).view(
            HEADS, NOPE + ROPE
        )
        return {
            "latent": self.normed(latent, "gamma2"), "rope": self.turned(rope, row), "inner_out": normed,
            "q_out0": torch.stack([heads[h, :NOPE].double() @ self.given["wuk"][h].double() for h in range(HEADS)]),
            "q_out1": torch.stack([self.turned(heads[h, NOPE:], row) for h in range(HEADS)]),
        }  # fmt: skip

    def normed(self, values: torch.Tensor, gamma: str) -> torch.Tensor:
        rms = math.sqrt(sum(value * value for value in values.tolist()) / len(values) + EPSILON)
        return values.double() / rms * self.given[gamma].double()


def test_queries_and_cached_rows_equal_the_definition() -> None:
    layer = Layer()
    results = layer.call()
    for result, name in zip(
        results, ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out"), strict=True
    ):
        assert result is layer.given[name]
    for row, slot in enumerate(SLOTS):
        exact = layer.exact(row)
        for name in ("q_out0", "q_out1", "inner_out"):
            close(layer.given[name][row], exact[name], roundings=2)
        if slot >= 0:
            close(layer.latents.view(-1, LATENT)[slot], exact["latent"], roundings=2)
            close(layer.ropes.view(-1, ROPE)[slot], exact["rope"], roundings=2)
    written = layer.latents.view(-1, LATENT).any(-1).nonzero().flatten().tolist()
    assert written == sorted(slot for slot in SLOTS if slot >= 0)


def test_quantisation_rounds_to_float16_first() -> None:
    """101.492 is 101.5 in float16 and rounds to 102."""
    layer = Layer()
    layer.given["quant_scale0"], layer.given["quant_offset0"] = (
        torch.ones(1).bfloat16(),
        torch.tensor([100], dtype=torch.int8),
    )
    layer.down.zero_()
    layer.down[LATENT, 0] = layer.down[LATENT + 1, 1] = 1  # two elements of the rope
    layer.given |= {"wdqkv": packed(layer.down), "bias0": torch.zeros(len(layer.down), dtype=torch.int32),
                    "descale0": torch.ones(len(layer.down))}  # fmt: skip
    layer.given["cos"], layer.given["sin"] = (
        torch.ones(ROWS, 1, 1, ROPE).bfloat16(),
        torch.zeros(ROWS, 1, 1, ROPE).bfloat16(),
    )
    layer.given["hiddenState"][0, 0], layer.given["hiddenState"][0, 1] = 0.498046875, 1.4921875
    layer.call()
    assert layer.ropes.view(-1, ROPE)[SLOTS[0], :2].tolist() == [100.0, 102.0]


def test_duplicate_slot_holds_neither_row() -> None:
    layer = Layer()
    layer.call(slotmapping=int32(5, 5, 2, -1))
    for cache in (layer.latents, layer.ropes):
        rows = cache.view(4 * BLOCK, -1)
        assert (rows[5] == POISON).all()
        assert (rows[2] != POISON).all()


# ---- refused calls ----


def wrong(**changes: Any) -> Callable[[], object]:
    return lambda: Layer().call(**changes)


OP = "mla_preprocess: "
BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown cache mode": (wrong(cache_mode="kv"), OP + "cache_mode: 'kv' is not one of"),
    "an unknown quantisation mode": (wrong(quant_mode="per_row"), OP + "quant_mode: 'per_row' is not one of"),
    "1025 rows": (wrong(hiddenState=lambda x: x[:1].expand(1025, -1)), OP + "hiddenState: 1025 rows must be"),
    "no rows": (wrong(hiddenState=lambda x: x[:0]), OP + "hiddenState: 0 rows must be"),
    "rows of 40 elements": (wrong(hiddenState=lambda x: x[:, :40].contiguous()), OP + "hiddenState: 40 elements must be a multiple"),
    "rows with gaps": (wrong(hiddenState=lambda x: x.repeat(1, 2)[:, :HIDDEN]), OP + "hiddenState: strides"),
    "a weight in another layout": (wrong(wdqkv=lambda w: w.flatten(0, 1)), OP + "wdqkv: shape"),
    "a weight of floats": (wrong(wuq=torch.Tensor.bfloat16), OP + "wuq: dtype torch.bfloat16"),
    "no bias": (wrong(bias0=None), OP + "bias0: must be given"),
    "a bias of floats": (wrong(bias1=torch.Tensor.float), OP + "bias1: dtype torch.float32"),
    "a scale in bfloat16": (wrong(descale0=torch.Tensor.bfloat16), OP + "descale0: dtype torch.bfloat16"),
    "a scale of other columns": (wrong(descale1=lambda s: s[:-1].contiguous()), OP + "descale1: shape"),
    "no beta": (wrong(beta1=None), OP + "beta1: must be given"),
    "a norm in float32": (wrong(gamma2=torch.Tensor.float), OP + "gamma2: dtype torch.float32"),
    "a scale of rows in float32": (wrong(quant_scale0=torch.Tensor.float), OP + "quant_scale0: dtype torch.float32"),
    "an offset in bfloat16": (wrong(quant_offset1=torch.Tensor.bfloat16), OP + "quant_offset1: dtype torch.bfloat16"),
    "slots in int64": (wrong(slotmapping=torch.Tensor.long), OP + "slotmapping: dtype torch.int64"),
    "slots of other rows": (wrong(slotmapping=int32(1, 2)), OP + "slotmapping: shape"),
    "a slot past the end": (wrong(slotmapping=int32(0, 1, 2, 64)), OP + r"slotmapping: \[64\] lie outside"),
    "angles of other rows": (wrong(cos=lambda c: c[:1]), OP + "cos: shape"),
    "two angles for each row": (wrong(cos=lambda c: c.repeat(1, 2, 1, 1), sin=lambda s: s.repeat(1, 2, 1, 1)), OP + "cos: shape"),
    "latents of 256": (wrong(wuk=lambda w: w[..., :256].contiguous()), OP + "wuk: shape"),
    "a cache in int8": (wrong(kv_cache=lambda c: c.to(torch.int8)), OP + "kv_cache: dtype torch.int8"),
    "ropes of other blocks": (wrong(kv_cache_rope=lambda c: c[:2]), OP + "kv_cache_rope: shape"),
    "a written cache in int8": (wrong(kv_cache_out0=lambda c: c.to(torch.int8)), OP + "kv_cache_out0: dtype torch.int8"),
    "written ropes of other blocks": (wrong(kv_cache_out1=lambda c: c[:2]), OP + "kv_cache_out1: shape"),
    "queries of other heads": (wrong(q_out0=lambda q: q[:, :2].contiguous()), OP + "q_out0: shape"),
    "a latent query in float32": (wrong(inner_out=torch.Tensor.float), OP + "inner_out: dtype torch.float32"),
}  # fmt: skip
NO_REFERENCE: dict[str, Callable[[], object]] = {
    "a cache in parts of 32 bytes": wrong(cache_mode="nzcache"),
    "scales per token": wrong(quant_mode="per_token_quant_symm"),
    "without the latent query": wrong(enable_inner_out=False),
    "float16": wrong(hiddenState=torch.Tensor.half),
    "no angles": wrong(cos=None, sin=None),
}


@scenarios("call, message", BAD_VALUES)
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@scenarios("call", NO_REFERENCE)
def test_unsupported_option_is_named(call: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError, match=OP):
        call()
