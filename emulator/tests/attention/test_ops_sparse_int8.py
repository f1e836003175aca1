"""Test sparse attention kernels over int8 caches against definitions, one key at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_definition import Lengths, page, running_totals, seen_by
from emulated import close, int32, random, scenarios
from wrong_calls import blocks_of, more_heads, widened, wrong

from ascend_npu_emulator.ops.attention.sparse_int8 import (
    npu_kv_quant_sparse_flash_attention,
    npu_lightning_indexer_quant,
)
from ascend_npu_emulator.ops.poison import POISON

INDEX, LATENT, ROPE, TILE, BYTES = 128, 512, 64, 128, 656
SCALE = 0.07
HALVES = [torch.bfloat16, torch.float16]
BATCHES: list[Lengths] = [
    [(20, 20)],
    [(1, 9), (1, 40), (1, 3)],
    [(3, 20), (17, 17), (0, 4), (2, 30)],
    [(4, 2), (1, 0)],
]


def int8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        -127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return (random(*shape, seed=seed).abs() / 100 + 0.001).half()


def paged(parts: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy rows into shuffled blocks with `page`, and set unused rows to 77."""
    (cache,), table = page([part.double() for part in parts])
    return cache.nan_to_num(nan=77.0).to(dtype), table


class Indexed:
    """A batch of (queries, keys) sequences with int8 queries and keys of an indexer."""

    def __init__(self, lengths: Lengths, heads: int = 3) -> None:
        self.lengths, total = lengths, sum(queries for queries, _ in lengths)
        self.query, self.weights, self.query_scales = (
            int8(total, heads, INDEX),
            random(total, heads, seed=1).half(),
            scales(total, heads),
        )
        self.keys = [int8(keys, 1, INDEX, seed=10 + i) for i, (_, keys) in enumerate(lengths)]
        self.key_scales = [scales(keys, 1, seed=30 + i) for i, (_, keys) in enumerate(lengths)]
        self.cache, self.table = paged(self.keys, torch.int8)
        self.scale_cache, _ = paged(self.key_scales, torch.float16)

    def score(self, row: int, sequence: int, key: int) -> float:
        """Return the score of a key, rounded at the same steps as in the kernel."""
        total = 0.0
        for head in range(self.query.shape[1]):
            product = sum(
                q * k
                for q, k in zip(
                    self.query[row, head].tolist(),
                    self.keys[sequence][key, 0].tolist(),
                    strict=True,
                )
            )
            rounded = torch.tensor(max(product, 0) / 1024, dtype=torch.float64).half().double()
            share = (
                (self.weights[row, head].double() * self.query_scales[row, head].double())
                .half()
                .double()
            )
            total += (rounded * share).item()
        return total * self.key_scales[sequence][key, 0].item()

    def exact(self, mode: int, count: int) -> list[list[int]]:
        """Return the selected keys of each query, best first."""
        chosen = []
        for row, (sequence, seen) in enumerate(seen_by(self.lengths, mode)):
            found = {key: self.score(row, sequence, key) for key in seen}
            chosen.append(sorted(seen, key=lambda key: -found[key])[:count])
        return chosen

    def call(self, **changes: Any) -> torch.Tensor:
        options = {
            "query": self.query,
            "key": self.cache,
            "weights": self.weights,
            "query_dequant_scale": self.query_scales,
            "key_dequant_scale": self.scale_cache,
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "block_table": self.table,
            "actual_seq_lengths_query": int32(*running_totals(self.lengths, 0)),
            "sparse_count": 7,
            "actual_seq_lengths_key": int32(*[keys for _, keys in self.lengths]),
        }
        return npu_lightning_indexer_quant(
            **options
            | {
                name: change(options[name]) if callable(change) else change
                for name, change in changes.items()
            }
        )


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_each_query_selects_the_keys_with_the_highest_scores(lengths: Lengths, mode: int) -> None:
    batch = Indexed(lengths)
    indices = batch.call(sparse_mode=mode)
    assert (indices.dtype, indices.shape) == (torch.int32, (len(batch.query), 1, 7))
    expected = batch.exact(mode, 7)
    assert indices[:, 0].tolist() == [row + [-1] * (7 - len(row)) for row in expected]


def one_key_after_another(keys: int, heads: int, first: int) -> Indexed:
    """Return a query. The product with key i is 127 * first + i in each head. Key scales are 1."""
    batch = Indexed([(1, keys)], heads)
    batch.query.zero_()
    batch.query[..., 0], batch.query[..., 1] = first, 1
    batch.keys[0].zero_()
    batch.keys[0][:, 0, 0], batch.keys[0][:, 0, 1] = 127, torch.arange(keys)
    batch.cache, _ = paged(batch.keys, torch.int8)
    batch.scale_cache.fill_(1.0)
    return batch


def test_products_are_divided_by_1024_then_rounded_to_float16() -> None:
    """Products from 8128 to 8147 round to multiples of 4. Equal scores are ordered by key."""
    batch = one_key_after_another(20, 1, first=64)
    chosen = batch.call(
        weights=torch.ones_like, query_dequant_scale=torch.ones_like, sparse_count=20
    )
    assert chosen.flatten().tolist() == [
        19,
        *range(14, 19),
        11,
        12,
        13,
        *range(6, 11),
        3,
        4,
        5,
        0,
        1,
        2,
    ]


def test_weight_times_query_scale_is_rounded_to_float16() -> None:
    """The rounded shares of two heads add up to 0. Without rounding, the sum is 2^-20."""
    batch, above = one_key_after_another(20, 2, first=0), 1 + 2.0**-10
    shares = {
        "weights": torch.tensor([[above, -1 - 2.0**-9]]).half(),
        "query_dequant_scale": torch.tensor([[above, 1.0]]).half(),
    }
    assert batch.call(**shares).flatten().tolist() == list(range(7))


def test_query_and_key_scales_change_the_selection() -> None:
    batch = Indexed([(3, 40)])
    right = batch.call()
    assert not torch.equal(right, batch.call(key_dequant_scale=torch.ones_like))
    assert not torch.equal(right, batch.call(query_dequant_scale=torch.ones_like))


def test_rows_after_the_last_sequence_have_invalid_indices() -> None:
    batch = Indexed([(2, 20), (3, 5)])
    indices = batch.call(actual_seq_lengths_query=int32(2, 4))
    assert (indices[4] > 1 << 30).all()
    assert (indices[:4] < 20).all()


class Sparse:
    """A batch of (queries, keys) sequences with cached int8 latents and selected keys per query."""

    def __init__(
        self, lengths: Lengths, heads: int = 2, dtype: torch.dtype = torch.bfloat16, count: int = 6
    ) -> None:
        self.lengths, self.dtype, total = lengths, dtype, sum(queries for queries, _ in lengths)
        self.query = random(total, heads, LATENT + ROPE, dtype=dtype)
        self.latents = [int8(keys, LATENT, seed=10 + i) for i, (_, keys) in enumerate(lengths)]
        self.ropes = [
            random(keys, ROPE, seed=50 + i, dtype=dtype) for i, (_, keys) in enumerate(lengths)
        ]
        self.scales = [
            random(keys, LATENT // TILE, seed=70 + i).abs() / 50
            for i, (_, keys) in enumerate(lengths)
        ]
        packed = [
            torch.cat(
                (latent, rope.contiguous().view(torch.int8), scale.view(torch.int8)), -1
            ).unsqueeze(1)
            for latent, rope, scale in zip(self.latents, self.ropes, self.scales, strict=True)
        ]
        self.cache, self.table = paged(packed, torch.int8)
        generator = torch.Generator().manual_seed(4)
        rows = [
            torch.randperm(len(seen), generator=generator)[:count].tolist()
            for _, seen in seen_by(lengths, 3)
        ]
        self.indices = torch.tensor(
            [row + [-1] * (count - len(row)) for row in rows], dtype=torch.int32
        ).unsqueeze(1)

    def key(self, sequence: int, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latent [512] and the rope [64] of a key, in float64."""
        latent = torch.empty(LATENT, dtype=torch.float64)
        for element in range(LATENT):
            exact = (
                self.latents[sequence][key, element].float()
                * self.scales[sequence][key, element // TILE]
            )
            latent[element] = exact.to(self.dtype).double()
        return latent, self.ropes[sequence][key].double()

    def exact(self, mode: int = 3) -> torch.Tensor:
        """Return the exact output [T, heads, 512]."""
        out = torch.zeros(*self.query.shape[:2], LATENT, dtype=torch.float64)
        for row, (sequence, seen) in enumerate(seen_by(self.lengths, mode)):
            chosen = []
            for key in self.indices[row, 0, : len(seen)].tolist():
                if key < 0:
                    break
                chosen += [key] if key < len(seen) else []
            if not chosen:
                continue
            latents, ropes = (
                torch.stack(part)
                for part in zip(*(self.key(sequence, key) for key in chosen), strict=True)
            )
            for head in range(self.query.shape[1]):
                query = self.query[row, head].double()
                scores = latents @ query[:LATENT] + ropes @ query[LATENT:]
                out[row, head] = torch.softmax(SCALE * scores, 0) @ latents
        return out

    def call(self, **changes: Any) -> Any:
        options = {
            "query": self.query,
            "key": self.cache,
            "value": self.cache,
            "sparse_indices": self.indices,
            "scale_value": SCALE,
            "key_quant_mode": 2,
            "value_quant_mode": 2,
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "block_table": self.table,
            "actual_seq_lengths_query": int32(*running_totals(self.lengths, 0)),
            "actual_seq_lengths_kv": int32(*[keys for _, keys in self.lengths]),
        }
        return npu_kv_quant_sparse_flash_attention(
            **options
            | {
                name: change(options[name]) if callable(change) else change
                for name, change in changes.items()
            }
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_queries_attend_to_selected_keys_only(lengths: Lengths, dtype: torch.dtype) -> None:
    batch = Sparse(lengths, dtype=dtype)
    out, *sums = batch.call()
    close(out, batch.exact())
    assert [(each.numel(), each.dtype) for each in sums] == [(0, torch.float32)] * 2


@scenarios("chosen", {
    "an invisible key": [19, 3, 17, -1],
    "keys after a negative index": [3, -1, 4, 5],
    "a duplicate key": [3, 9, 3, 1],
    "no key": [-1, -1, -1, -1],
})  # fmt: skip
def test_attention_stops_at_a_negative_index_and_skips_invisible_keys(chosen: list[int]) -> None:
    batch = Sparse([(4, 20)])  # the first query sees 17 keys
    batch.indices = torch.tensor([chosen] * 4, dtype=torch.int32).unsqueeze(1)
    close(batch.call()[0], batch.exact())


def test_rows_after_the_last_sequence_are_undefined() -> None:
    batch = Sparse([(2, 20), (3, 5)])
    out, *_ = batch.call(actual_seq_lengths_query=int32(2, 4))
    assert (out[4] == POISON).all()
    assert (out[:4] != POISON).all()


# ---- refused calls ----


index = wrong(Indexed([(1, 20), (2, 9)]).call)
sparse = wrong(Sparse([(1, 20), (2, 9)]).call)
INDEXER, SPARSE = "npu_lightning_indexer_quant: ", "npu_kv_quant_sparse_flash_attention: "
BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "queries of floats": (index(query=torch.Tensor.bfloat16), INDEXER + "query: dtype torch.bfloat16"),
    "keys of floats": (index(key=torch.Tensor.bfloat16), INDEXER + "key: dtype torch.bfloat16"),
    "weights in bfloat16": (index(weights=torch.Tensor.bfloat16), INDEXER + "weights: dtype torch.bfloat16"),
    "weights of other heads": (index(weights=widened), INDEXER + "weights: shape"),
    "scales of queries in float32": (index(query_dequant_scale=torch.Tensor.float), INDEXER + "query_dequant_scale: dtype torch.float32"),
    "scales of other queries": (index(query_dequant_scale=lambda s: s[:1]), INDEXER + "query_dequant_scale: shape"),
    "scales of keys in float32": (index(key_dequant_scale=torch.Tensor.float), INDEXER + "key_dequant_scale: dtype torch.float32"),
    "scales of keys with one more dimension": (index(key_dequant_scale=lambda s: s.unsqueeze(-1)), INDEXER + "key_dequant_scale: shape"),
    "shares past float16": (index(weights=lambda w: torch.full_like(w, 6e4), query_dequant_scale=lambda s: torch.full_like(s, 2)),
                            INDEXER + "weights: products .* must be finite"),
    "queries of 256": (index(query=widened, key=widened), INDEXER + "query: head size 256"),
    "keys of another width": (index(key=widened), INDEXER + "key: shape"),
    "65 heads": (index(query=more_heads(65), weights=more_heads(65), query_dequant_scale=more_heads(65)), INDEXER + "query: 65 heads"),
    "blocks of 8 keys": (index(key=blocks_of(8), key_dequant_scale=blocks_of(8)), INDEXER + "key: block size 8 "),
    "2049 keys": (index(sparse_count=2049), INDEXER + "sparse_count: 2049 must be"),
    "3072 keys": (index(sparse_count=3072), INDEXER + "sparse_count: 3072 must be"),
    "another mode of queries": (index(query_quant_mode=1), INDEXER + "query_quant_mode: 1 must be 0"),
    "another mode of keys": (index(key_quant_mode=2), INDEXER + "key_quant_mode: 2 must be 0"),
    "another mask": (index(sparse_mode=4), INDEXER + "sparse_mode: 4 is not one of"),
    "no table": (index(block_table=None), INDEXER + "block_table: must be given"),
    "queries in float32": (sparse(query=torch.Tensor.float), SPARSE + "query: dtype torch.float32"),
    "queries without a rope": (sparse(query=lambda q: q[..., :512]), SPARSE + "query: head size 512"),
    "3 heads": (sparse(query=more_heads(3)), SPARSE + "query: 3 heads"),
    "cached halves": (sparse(key=torch.Tensor.bfloat16), SPARSE + "key: dtype torch.bfloat16"),
    "keys without scales": (sparse(key=lambda k: k[..., :640].contiguous(), value=lambda v: v[..., :640].contiguous()),
                            SPARSE + "key: shape"),
    "values of another shape": (sparse(value=widened), SPARSE + "value: shape"),
    "blocks of 1040 keys": (sparse(key=blocks_of(1040), value=blocks_of(1040)), SPARSE + "key: block size 1040"),
    "indices in int64": (sparse(sparse_indices=torch.Tensor.long), SPARSE + "sparse_indices: dtype torch.int64"),
    "indices of other rows": (sparse(sparse_indices=lambda i: i[:2]), SPARSE + "sparse_indices: shape"),
    "separate scales": (sparse(key_dequant_scale=torch.ones(1)), SPARSE + "key_dequant_scale: must not be given"),
    "the default mode of keys": (sparse(key_quant_mode=1), SPARSE + "key_quant_mode: 1 must be 2"),
    "the default mode of values": (sparse(value_quant_mode=1), SPARSE + "value_quant_mode: 1 must be 2"),
    "attention without latents": (sparse(attention_mode=0), SPARSE + "attention_mode: 0 must be 2"),
    "scales in another tensor": (sparse(quant_scale_repo_mode=0), SPARSE + "quant_scale_repo_mode: 0 must be 1"),
    "tiles of 64": (sparse(tile_size=64), SPARSE + "tile_size: 64 must be 128"),
    "a rope of 32": (sparse(rope_head_dim=32), SPARSE + "rope_head_dim: 32 must be 64"),
    "blocks of 32 tokens": (sparse(sparse_block_size=32), SPARSE + "sparse_block_size: 32 is not one of"),
    "a window": (sparse(pre_tokens=100), SPARSE + "pre_tokens: 100 must be"),
}  # fmt: skip
NO_REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    "queries in BSND": (index(layout_query="BSND"), INDEXER + "layout_query='BSND'"),
    "the sums": (sparse(return_softmax_lse=True), SPARSE + "return_softmax_lse=True"),
    "blocks of two tokens": (sparse(sparse_block_size=2), SPARSE + "sparse_block_size=2"),
}


@scenarios("call, message", BAD_VALUES)
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@scenarios("call, message", NO_REFERENCE)
def test_unsupported_option_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize("make", [index, sparse])
def test_base_calls_are_valid(
    make: Callable[[], Callable[[], object]],
) -> None:
    make()()


def test_128_heads_are_accepted() -> None:
    batch = Sparse([(1, 20)], heads=128)
    close(batch.call()[0], batch.exact())
