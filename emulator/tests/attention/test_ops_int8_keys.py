"""Test writes to the int8 KV cache and attention over int8 keys against definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import close, int32, random, scenarios
from operator_cases import int8

from ascend_npu_emulator.ops.attention.cache import npu_scatter_pa_kv_cache
from ascend_npu_emulator.ops.attention.fused import npu_fused_infer_attention_score

BLOCKS, KV_HEADS, WIDTH, SIZE = 5, 2, 64, 32
LENGTHS = [40, 9, 0]
TABLE = [[3, 1], [4, 0], [0, 0]]


def storing(**changes: Any) -> dict[str, Any]:
    rows = {"key": int8(4, KV_HEADS, WIDTH, seed=1), "value": int8(4, KV_HEADS, WIDTH, seed=2)}
    caches = {
        f"{name}_cache": torch.full((BLOCKS, KV_HEADS, WIDTH // 32, SIZE, 32), 7, dtype=torch.int8)
        for name in rows
    }
    return {**rows, **caches, "slot_mapping": int32(70, -1, 0, 159), **changes}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_rows_are_stored_in_parts_of_32_bytes(dtype: torch.dtype) -> None:
    part = 32 // dtype.itemsize
    given = storing(
        **{
            name: int8(4, KV_HEADS, WIDTH, seed=seed).to(dtype)
            for name, seed in (("key", 1), ("value", 2))
        }
    )
    for name in ("key", "value"):
        given[f"{name}_cache"] = torch.full(
            (BLOCKS, KV_HEADS, WIDTH // part, SIZE, part), 7, dtype=dtype
        )
    npu_scatter_pa_kv_cache(**given)
    for name in ("key", "value"):
        expected = torch.full((BLOCKS, KV_HEADS, WIDTH // part, SIZE, part), 7, dtype=dtype)
        for row, slot in enumerate(given["slot_mapping"].tolist()):
            for head in range(KV_HEADS if slot >= 0 else 0):
                for element in range(WIDTH):
                    place = slot // SIZE, head, element // part, slot % SIZE, element % part
                    expected[place] = given[name][row, head, element]
        assert torch.equal(given[f"{name}_cache"], expected)


def attending(heads: int = 4, **changes: Any) -> dict[str, Any]:
    cache = (BLOCKS, KV_HEADS, WIDTH // 32, SIZE, 32)
    return {
        "query": random(3, heads, 1, WIDTH, dtype=torch.bfloat16), "key": int8(*cache, seed=1), "value": int8(*cache, seed=2),
        "key_antiquant_scale": (random(KV_HEADS, 1, WIDTH, seed=3).abs() / 50).bfloat16(),
        "value_antiquant_scale": (random(KV_HEADS, 1, WIDTH, seed=4).abs() / 50).bfloat16(),
        "block_table": torch.tensor(TABLE, dtype=torch.int32), "actual_seq_lengths_kv": LENGTHS, "num_heads": heads,
        "num_key_value_heads": KV_HEADS, "scale": 0.2, "input_layout": "BNSD", "block_size": SIZE, "inner_precise": 1, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("heads", [2, 4])
def test_int8_keys_and_values_are_scaled_before_attention(heads: int) -> None:
    given = attending(heads)
    out, _ = npu_fused_infer_attention_score(**given)
    assert out.shape == given["query"].shape
    for sequence, length in enumerate(LENGTHS):
        for head in range(heads):
            of = head // (heads // KV_HEADS)
            rows: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
            for position in range(length):
                block, row = TABLE[sequence][position // SIZE], position % SIZE
                for name, found in rows.items():
                    scale = given[f"{name}_antiquant_scale"][of, 0].double()
                    found.append(
                        torch.cat([part[row] for part in given[name][block, of]]).double() * scale
                    )
            if not length:
                assert torch.equal(out[sequence, head], torch.zeros(1, WIDTH, dtype=torch.bfloat16))
                continue
            keys, values = torch.stack(rows["key"]), torch.stack(rows["value"])
            weights = (keys @ given["query"][sequence, head, 0].double() * 0.2).softmax(0)
            close(out[sequence, head, 0], weights @ values, roundings=2)


def store(**changes: Any) -> None:
    npu_scatter_pa_kv_cache(**storing(**changes))


def attend(**changes: Any) -> None:
    npu_fused_infer_attention_score(**attending(**changes))


NEVER = NotImplementedError
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a slot past the end": (lambda: store(slot_mapping=int32(0, 1, 2, 160)), ValueError, "slot_mapping: .160."),
    "parts of another size": (
        lambda: store(key_cache=torch.zeros(5, 2, 4, 32, 16, dtype=torch.int8)), ValueError, "key_cache: shape"),
    "a cache of another dtype": (
        lambda: store(value_cache=torch.zeros(5, 2, 2, 32, 32)), ValueError, "value: dtype"),
    "a head size that is no multiple of 32": (lambda: store(key=int8(4, 2, 40)), ValueError, "key: head size 40"),
    "fewer slots than rows": (lambda: store(slot_mapping=int32(0)), ValueError, "key: 4 rows for 1 slots"),
    "another layout": (lambda: attend(input_layout="TND"), NEVER, "input_layout"),
    "several queries": (
        lambda: attend(query=random(3, 4, 2, WIDTH, dtype=torch.bfloat16)), NEVER, "query"),
    "no table": (lambda: attend(block_table=None), NEVER, "block_table"),
    "keys of bfloat16": (
        lambda: attend(key=random(5, 2, 2, 32, 32, dtype=torch.bfloat16)), ValueError, "key: dtype"),
    "one scale": (lambda: attend(value_antiquant_scale=None), ValueError, "value_antiquant_scale"),
    "a scale per head": (
        lambda: attend(key_antiquant_scale=random(2, 1, 1, dtype=torch.bfloat16)),
        ValueError, "key_antiquant_scale: shape"),
    "a scale of another dtype": (
        lambda: attend(key_antiquant_scale=random(2, 1, WIDTH)), ValueError, "key_antiquant_scale: dtype"),
    "another quantisation": (lambda: attend(antiquant_mode=1), NEVER, "antiquant_mode=1"),
    "a block past the end": (
        lambda: attend(block_table=int32(5, 0, 0, 0, 0, 0).view(3, 2)), ValueError, "uses blocks .5."),
    "blocks of 16": (lambda: attend(block_size=16), ValueError, "block_size: 16"),
}  # fmt: skip


@scenarios("call, error, message", REFUSED)
def test_error_names_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
