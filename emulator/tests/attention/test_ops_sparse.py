"""Test the sparse attention kernels against definitions, one query and one key at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_definition import Lengths, page, running_totals, seen_by
from emulated import close, int32, random, scenarios
from wrong_calls import blocks_of, more_heads, widened, wrong

from ascend_npu_emulator.ops.attention.cache import (
    npu_scatter_nd_update_,
    npu_scatter_nd_update_sk,
)
from ascend_npu_emulator.ops.attention.sparse import (
    npu_lightning_indexer,
    npu_sparse_flash_attention,
)
from ascend_npu_emulator.ops.matmul import batch_matmul_transpose
from ascend_npu_emulator.ops.poison import POISON

LATENT, ROPE, INDEX = 512, 64, 128
SCALE = 0.07
HALVES = [torch.bfloat16, torch.float16]


def half(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=dtype)


class Indexed:
    """A batch of (queries, keys) sequences with queries, keys and weights of an indexer."""

    def __init__(
        self, lengths: Lengths, heads: int = 3, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.lengths, total = lengths, sum(queries for queries, _ in lengths)
        self.query, self.weights = (
            half(total, heads, INDEX, dtype=dtype),
            half(total, heads, seed=1, dtype=dtype),
        )
        self.keys = [
            half(keys, 1, INDEX, seed=10 + i, dtype=dtype) for i, (_, keys) in enumerate(lengths)
        ]
        (self.cache,), self.table = page(self.keys)

    def exact(self, mode: int, count: int) -> list[list[int]]:
        """Return the selected keys of each query, best first."""
        chosen = []
        for row, (sequence, seen) in enumerate(seen_by(self.lengths, mode)):
            scores = {}
            for key in seen:
                products = self.query[row].double() @ self.keys[sequence][key, 0].double()
                scores[key] = sum(
                    w * max(p, 0.0)
                    for w, p in zip(self.weights[row].tolist(), products.tolist(), strict=True)
                )
            chosen.append(sorted(seen, key=lambda key: -scores[key])[:count])
        return chosen

    def call(self, **changes: Any) -> Any:
        options = {
            "query": self.query,
            "key": self.cache,
            "weights": self.weights,
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "actual_seq_lengths_query": int32(*running_totals(self.lengths, 0)),
            "block_table": self.table,
            "actual_seq_lengths_key": int32(*[keys for _, keys in self.lengths]),
            "sparse_count": 7,
        }
        return npu_lightning_indexer(
            **options
            | {
                name: change(options[name]) if callable(change) else change
                for name, change in changes.items()
            }
        )


BATCHES: list[Lengths] = [
    [(20, 20)],
    [(1, 9), (1, 40), (1, 3)],
    [(3, 20), (17, 17), (0, 4), (2, 30)],
    [(4, 2), (1, 0)],
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_each_query_selects_the_keys_with_the_highest_scores(
    lengths: Lengths, mode: int, dtype: torch.dtype
) -> None:
    batch = Indexed(lengths, dtype=dtype)
    indices, values = batch.call(sparse_mode=mode)
    assert (indices.dtype, indices.shape, values.numel()) == (
        torch.int32,
        (len(batch.query), 1, 7),
        0,
    )
    expected = batch.exact(mode, 7)
    assert indices[:, 0].tolist() == [row + [-1] * (7 - len(row)) for row in expected]
    assert (
        any(
            len(row) < len(seen)
            for row, (_, seen) in zip(expected, seen_by(lengths, mode), strict=True)
        )
        or lengths == BATCHES[-1]
    )


def test_indexer_accepts_negative_float32_weights() -> None:
    batch = Indexed([(9, 30)])
    batch.weights = -random(9, 3, seed=5).abs() + 0.3
    assert batch.call()[0][:, 0].tolist() == batch.exact(3, 7)


def test_equal_scores_are_ordered_by_key() -> None:
    batch = Indexed([(1, 20)])
    assert batch.call(weights=torch.zeros_like)[0].flatten().tolist() == list(range(7))


def test_rows_after_the_last_sequence_have_invalid_indices() -> None:
    batch = Indexed([(2, 20), (3, 5)])
    indices, _ = batch.call(actual_seq_lengths_query=int32(2, 4))
    assert (indices[4] > 1 << 30).all()
    assert (indices[:4] < 20).all()


class Sparse:
    """A batch of (queries, keys) sequences with cached latents and selected keys per query."""

    def __init__(
        self, lengths: Lengths, heads: int = 2, dtype: torch.dtype = torch.bfloat16, count: int = 6
    ) -> None:
        self.lengths, self.heads, total = lengths, heads, sum(queries for queries, _ in lengths)
        self.query, self.query_rope = (
            half(total, heads, width, seed=i, dtype=dtype) for i, width in enumerate((LATENT, ROPE))
        )
        self.latents = [
            half(keys, 1, LATENT, seed=10 + i, dtype=dtype) for i, (_, keys) in enumerate(lengths)
        ]
        self.ropes = [
            half(keys, 1, ROPE, seed=50 + i, dtype=dtype) for i, (_, keys) in enumerate(lengths)
        ]
        (self.latent_cache, self.rope_cache), self.table = page(self.latents, self.ropes)
        generator = torch.Generator().manual_seed(4)
        rows = [
            torch.randperm(len(seen), generator=generator)[:count].tolist()
            for _, seen in seen_by(lengths, 3)
        ]
        self.indices = torch.tensor(
            [row + [-1] * (count - len(row)) for row in rows], dtype=torch.int32
        ).unsqueeze(1)

    def exact(self, mode: int = 3) -> torch.Tensor:
        """Return the exact output [T, heads, 512]."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, (sequence, seen) in enumerate(seen_by(self.lengths, mode)):
            chosen = []
            for key in self.indices[row, 0, : len(seen)].tolist():
                if key < 0:
                    break
                chosen += [key] if key < len(seen) else []
            if not chosen:
                continue
            latents, ropes = (
                part[sequence][chosen, 0].double() for part in (self.latents, self.ropes)
            )
            for head in range(self.heads):
                scores = (
                    latents @ self.query[row, head].double()
                    + ropes @ self.query_rope[row, head].double()
                )
                out[row, head] = torch.softmax(SCALE * scores, 0) @ latents
        return out

    def call(self, **changes: Any) -> Any:
        options = {
            "query": self.query,
            "key": self.latent_cache,
            "value": self.latent_cache,
            "sparse_indices": self.indices,
            "scale_value": SCALE,
            "query_rope": self.query_rope,
            "key_rope": self.rope_cache,
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "block_table": self.table,
            "sparse_mode": 3,
            "attention_mode": 2,
            "actual_seq_lengths_query": int32(*running_totals(self.lengths, 0)),
            "actual_seq_lengths_kv": int32(*[keys for _, keys in self.lengths]),
        }
        return npu_sparse_flash_attention(
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


def test_all_keys_are_candidates_without_a_mask() -> None:
    batch = Sparse([(3, 20)])
    batch.indices = torch.tensor([[19, 3], [4, 19], [0, 18]], dtype=torch.int32).unsqueeze(1)
    close(batch.call(sparse_mode=0)[0], batch.exact(0))


@scenarios("chosen", {
    "an invisible key": [19, 3, 17, -1],
    "keys after a negative index": [3, -1, 4, 5],
    "a duplicate key": [3, 9, 3, 1],
    "no key": [-1, -1, -1, -1],
    "only invisible keys": [18, 19, -1, -1],
})  # fmt: skip
def test_attention_stops_at_a_negative_index_and_skips_invisible_keys(chosen: list[int]) -> None:
    batch = Sparse([(4, 20)])  # the first query sees 17 keys
    batch.indices = torch.tensor([chosen] * 4, dtype=torch.int32).unsqueeze(1)
    close(batch.call()[0], batch.exact())


def test_number_of_visible_keys_limits_the_indices_read() -> None:
    batch = Sparse([(4, 4)])
    batch.indices = int32(0, 1, 0, 0).expand(
        4, 1, 4
    )  # the first query reads one entry, the second two
    close(batch.call()[0], batch.exact())


def test_rows_after_the_last_sequence_are_undefined() -> None:
    batch = Sparse([(2, 20), (3, 5)])
    out, *_ = batch.call(actual_seq_lengths_query=int32(2, 4))
    assert (out[4] == POISON).all()
    assert (out[:4] != POISON).all()


@pytest.mark.parametrize("operator", [npu_scatter_nd_update_, npu_scatter_nd_update_sk])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_scattered_to_their_indices(
    operator: Callable[..., Any], dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    var, updates = torch.zeros(9, 4, dtype=dtype), torch.arange(1, 21).view(5, 4).to(dtype)
    operator(var, torch.tensor([[7], [-1], [0], [3], [3]], dtype=index_dtype), updates)
    assert torch.equal(var[7], updates[0])
    assert torch.equal(var[0], updates[2])
    assert var[3].unique().tolist() == [
        127 if dtype == torch.int8 else POISON
    ]  # two updates write this row
    assert not var[[1, 2, 4, 5, 6, 8]].any()


def test_rows_with_gaps_are_scattered_in_place() -> None:
    whole = torch.zeros(6, 10)
    npu_scatter_nd_update_sk(whole[:, :4], torch.tensor([[2]]), torch.ones(1, 4))
    assert whole.sum() == whole[2, :4].sum() == 4


@pytest.mark.parametrize("dtype", HALVES)
def test_batch_matmul_transpose_equals_its_definition(dtype: torch.dtype) -> None:
    x, weight = half(5, 3, 64, dtype=dtype), half(3, 64, 32, seed=1, dtype=dtype)
    out = torch.empty(5, 3, 32, dtype=dtype)
    batch_matmul_transpose(x, weight, out)
    exact = torch.stack([x[:, b].double() @ weight[b].double() for b in range(3)], 1)
    close(out, exact, roundings=2)


# ---- refused calls ----


index = wrong(Indexed([(1, 20), (2, 9)]).call)
sparse = wrong(Sparse([(1, 20), (2, 9)]).call)
scatter = wrong(
    npu_scatter_nd_update_, input=half(9, 4), indices=torch.tensor([[1], [2]]), updates=half(2, 4)
)
scatter_sk = wrong(
    npu_scatter_nd_update_sk, var=half(9, 4), indices=torch.tensor([[1], [2]]), update=half(2, 4)
)
product = wrong(
    batch_matmul_transpose,
    tensor_a=half(5, 3, 64),
    tensor_b=half(3, 64, 32),
    tensor_c=half(5, 3, 32),
)
INDEXER, SPARSE = "npu_lightning_indexer: ", "npu_sparse_flash_attention: "
SCATTER, PRODUCT = "npu_scatter_nd_update_", "batch_matmul_transpose: "
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown layout": ({"layout_query": "NTD"}, "layout_query: 'NTD' is not one of"),
    "another mask": ({"sparse_mode": 4}, "sparse_mode: 4 is not one of"),
    "a window before": ({"pre_tokens": 100}, "pre_tokens: 100 must be"),
    "a window after": ({"next_tokens": 0}, "next_tokens: 0 must be"),
    "no running totals": (
        {"actual_seq_lengths_query": None},
        "actual_seq_lengths_query: must be given",
    ),
    "running totals in int64": (
        {"actual_seq_lengths_query": torch.tensor([1, 3])},
        "actual_seq_lengths_query: dtype torch.int64",
    ),
    "decreasing running totals": (
        {"actual_seq_lengths_query": int32(2, 1)},
        r"actual_seq_lengths_query: running totals \[2, 1\] decrease",
    ),
    "running totals past the rows": (
        {"actual_seq_lengths_query": int32(1, 4)},
        "actual_seq_lengths_query: the last running total 4",
    ),
    "a table of another batch": (
        {"block_table": torch.zeros(3, 2, dtype=torch.int32)},
        "block_table: 3 sequences",
    ),
    "a table in int64": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
        "block_table: dtype torch.int64",
    ),
    "no table": ({"block_table": None}, "block_table: must be given"),
    "a table without blocks": (
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
        "block_table: shape",
    ),
    "queries in float32": ({"query": torch.Tensor.float}, "query: dtype torch.float32"),
    "keys of another dtype": ({"key": torch.Tensor.half}, "key: dtype torch.float16"),
    "keys of another width": ({"key": widened}, "key: shape"),
    "65 heads": (
        {"query": more_heads(65), "weights": more_heads(65), "query_rope": more_heads(65)},
        "query: 65 heads",
    ),
    "no queries": ({"query": lambda q: q[:0], "weights": lambda w: w[:0]}, "query: shape"),
}
BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    **{f"indexer: {name}": (index(**{k: v for k, v in changes.items() if k != "query_rope"}), INDEXER + message)
       for name, (changes, message) in BOTH.items()},
    **{f"attention: {name}": (sparse(**{k: v for k, v in changes.items() if k != "weights"}), SPARSE + message)
       for name, (changes, message) in BOTH.items()},
    "more keys than the table has": (index(actual_seq_lengths_key=int32(20, 99)), INDEXER + "block_table: sequence 1 has 99 keys"),
    "a block that does not exist": (index(actual_seq_lengths_key=int32(20, 20)), INDEXER + "block_table: sequence 1 uses blocks"),
    "key lengths of one sequence": (index(actual_seq_lengths_key=int32(20)), INDEXER + "actual_seq_lengths_key: 1 sequences"),
    "negative lengths": (sparse(actual_seq_lengths_kv=int32(20, -1)), SPARSE + "actual_seq_lengths_kv: -1 of sequence 1"),
    "another layout of keys": (sparse(layout_kv="BSND"), SPARSE + "layout_kv: 'BSND' is neither"),
    "another layout of the indexer's keys": (index(layout_key="BSND"), INDEXER + "layout_key: 'BSND' is neither"),
    "no key to select": (index(sparse_count=0), INDEXER + "sparse_count: 0 must be"),
    "2049 keys": (index(sparse_count=2049), INDEXER + "sparse_count: 2049 must be"),
    "9216 keys": (index(sparse_count=9216), INDEXER + "sparse_count: 9216 must be"),
    "weights of another dtype": (index(weights=torch.Tensor.half), INDEXER + "weights: dtype torch.float16"),
    "weights of other heads": (index(weights=widened), INDEXER + "weights: shape"),
    "queries of 256": (index(query=widened, key=widened), INDEXER + "query: head size 256"),
    "small blocks of the indexer": (index(key=blocks_of(8)), INDEXER + "key: block size 8 "),
    "large blocks of the indexer": (index(key=blocks_of(1040)), INDEXER + "key: block size 1040"),
    "small blocks": (sparse(key=blocks_of(8), value=blocks_of(8), key_rope=blocks_of(8)), SPARSE + "key: block size 8 "),
    "100 heads": (sparse(query=more_heads(100), query_rope=more_heads(100)), SPARSE + "query: 100 heads"),
    "a rope of another width": (sparse(query_rope=widened), SPARSE + "query_rope: shape"),
    "values of another shape": (sparse(value=widened), SPARSE + "value: shape"),
    "ropes of other blocks": (sparse(key_rope=lambda cache: cache[:1]), SPARSE + "key_rope: shape"),
    "one of the two ropes": (sparse(key_rope=None), SPARSE + "query_rope, key_rope: must be given together"),
    "attention without latents": (sparse(attention_mode=0), SPARSE + "attention_mode: 0 must be 2"),
    "blocks of three tokens": (sparse(sparse_block_size=3), SPARSE + "sparse_block_size: 3 must be"),
    "blocks of 256 tokens": (sparse(sparse_block_size=256), SPARSE + "sparse_block_size: 256 must be"),
    "indices in int64": (sparse(sparse_indices=torch.Tensor.long), SPARSE + "sparse_indices: dtype torch.int64"),
    "indices of other rows": (sparse(sparse_indices=lambda i: i[:2]), SPARSE + "sparse_indices: shape"),
    "indices per head": (sparse(sparse_indices=lambda i: i.expand(-1, 2, -1)), SPARSE + "sparse_indices: shape"),
    "an index past the end": (scatter(indices=torch.tensor([[1], [9]])), SCATTER + r": indices: \[9\] lie past the 9 rows of input"),
    "indices in float": (scatter(indices=torch.tensor([[1.0], [2.0]])), SCATTER + ": indices: dtype"),
    "updates of another dtype": (scatter(updates=random(2, 4)), SCATTER + ": updates: dtype torch.float32"),
    "updates of another width": (scatter(updates=half(2, 5)), SCATTER + ": updates: shape"),
    "rows in float64": (scatter(input=half(9, 4).double(), updates=half(2, 4).double()), SCATTER + ": input: dtype"),
    "transposed rows": (scatter_sk(var=half(4, 9).t()), SCATTER + "sk: var: rows with stride 9"),
    "one more dimension": (scatter_sk(var=half(9, 4, 1)), SCATTER + "sk: var: shape"),
    "a product in float32": (product(tensor_a=random(5, 3, 64)), PRODUCT + "tensor_a: dtype torch.float32"),
    "a product of two dtypes": (product(tensor_b=half(3, 64, 32).half()), PRODUCT + "tensor_b: dtype torch.float16"),
    "a product that is not contiguous": (product(tensor_a=half(3, 5, 64).transpose(0, 1)), PRODUCT + "tensor_a: strides"),
    "a product of 1025 rows": (product(tensor_a=half(1025, 3, 64), tensor_c=half(1025, 3, 32)), PRODUCT + "tensor_a: 1025 rows"),
    "factors that do not fit": (product(tensor_b=half(2, 64, 32)), PRODUCT + "tensor_b: shape"),
    "a result that does not fit": (product(tensor_c=half(3, 5, 32)), PRODUCT + "tensor_c: shape"),
    "an unknown format": (product(format_mode="FZ"), PRODUCT + "format_mode: 'FZ' is not one of"),
}  # fmt: skip
NO_REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    "queries in BSND": (index(layout_query="BSND"), INDEXER + "layout_query='BSND'"),
    "keys in TND": (sparse(layout_kv="TND"), SPARSE + "layout_kv='TND'"),
    "the scores": (index(return_value=True), INDEXER + "return_value=True"),
    "the sums": (sparse(return_softmax_lse=True), SPARSE + "return_softmax_lse=True"),
    "blocks of two tokens": (sparse(sparse_block_size=2), SPARSE + "sparse_block_size=2"),
    "no rope": (sparse(query_rope=None, key_rope=None), SPARSE + "query_rope=None"),
    "indices into two dimensions": (
        scatter(indices=torch.tensor([[1, 0], [2, 0]])),
        SCATTER + ": indices=a tensor",
    ),
    "weights in NZ": (product(format_mode="NZ"), PRODUCT + "format_mode='NZ'"),
    "scales per token": (
        product(quant_mode="per_token_symm"),
        PRODUCT + "quant_mode='per_token_symm'",
    ),
}


@scenarios("call, message", BAD_VALUES)
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@scenarios("call, message", NO_REFERENCE)
def test_unsupported_option_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize("make", [index, sparse, scatter, scatter_sk, product])
def test_base_calls_are_valid(
    make: Callable[[], Callable[[], object]],
) -> None:
    make()()


@pytest.mark.parametrize("count", [1, 2048, 3072, 8192])
def test_largest_sparse_counts_are_accepted(count: int) -> None:
    assert Indexed([(1, 20)]).call(sparse_count=count)[0].shape == (1, 1, count)


def test_128_heads_are_accepted() -> None:
    batch = Sparse([(1, 20)], heads=128)
    close(batch.call()[0], batch.exact())
