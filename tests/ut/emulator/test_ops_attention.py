"""Attention, in all layouts and masks that are served, against its definition written as loops in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.emulator.ops.attention import attend
from vllm_ascend_hsx.emulator.ops.fused_attention import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_out,
    npu_fused_infer_attention_score_v2,
)
from vllm_ascend_hsx.emulator.ops.paged_attention import _npu_paged_attention

CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
SCALE = 0.3


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def may_see(mode: int, query: int, key: int, queries: int, keys: int, before: int, after: int) -> bool:
    """The definition of each sparse mode for one pair, in words of distance."""
    if mode == 0:
        return True
    if mode == 2:
        return key <= query
    distance = key - (query + keys - queries)  # 0 for the last query and the last key
    return distance <= 0 if mode == 3 else -before <= distance <= after


def attention_of_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: Callable[[int, int], bool], sink: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k) v for one sequence, one query and one head at a time; a query that sees nothing gives zeros.

    A sink is a key of its own in each head, whose score is given and whose value is zero.
    """
    queries, heads, _ = query.shape
    keys, kv_heads, width = value.shape
    out = torch.zeros(queries, heads, width, dtype=torch.float64)
    for i in range(queries):
        for head in range(heads):
            source = head // (heads // kv_heads)
            scores = {j: SCALE * float(query[i, head].double() @ key[j, source].double()) for j in range(keys) if sees(i, j)}
            if not scores:
                continue
            top = max(scores.values())
            weights = {j: math.exp(score - top) for j, score in scores.items()}
            total = sum(weights.values()) + (0.0 if sink is None else math.exp(float(sink[head]) - top))
            for j, weight in weights.items():
                out[i, head] += weight / total * value[j, source].double()
    return out


@dataclass
class Batch:
    """Sequences of (queries, keys), and their tensors in the paged form with shuffled blocks."""

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        total = sum(queries for queries, _ in self.lengths)
        self.query = random(total, self.heads, self.width, dtype=self.dtype)
        self.keys = [random(n, self.kv_heads, self.width, seed=10 + i, dtype=self.dtype) for i, (_, n) in enumerate(self.lengths)]
        self.values = [random(n, self.kv_heads, self.width, seed=50 + i, dtype=self.dtype) for i, (_, n) in enumerate(self.lengths)]
        self.ends = torch.tensor([queries for queries, _ in self.lengths]).cumsum(0).tolist()
        self._page()

    def _page(self) -> None:
        widest = max(-(-n // self.block_size) for _, n in self.lengths) or 1
        blocks = len(self.lengths) * widest + 3
        free = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        # What no sequence owns is NaN: a reference that looks there, even with weight 0, gives NaN.
        self.key_cache = torch.full((blocks, self.block_size, self.kv_heads, self.width), float("nan"), dtype=self.dtype)
        self.value_cache = self.key_cache.clone()
        # A row of the table past the sequence's blocks is garbage that must not be followed.
        self.table = torch.full((len(self.lengths), widest), 10_000, dtype=torch.int32)
        for i, (_, n) in enumerate(self.lengths):
            for j in range(n):
                if j % self.block_size == 0:
                    self.table[i, j // self.block_size] = free.pop()
                self.key_cache[self.table[i, j // self.block_size], j % self.block_size] = self.keys[i][j]
                self.value_cache[self.table[i, j // self.block_size], j % self.block_size] = self.values[i][j]

    def expected(self, mode: int, before: int = 0, after: int = 0, sink: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.zeros(self.query.shape, dtype=torch.float64)
        for i, (queries, keys) in enumerate(self.lengths):
            first = self.ends[i] - queries
            rows[first : self.ends[i]] = attention_of_one(
                self.query[first : self.ends[i]], self.keys[i], self.values[i],
                lambda q, k, m=queries, n=keys: may_see(mode, q, k, m, n, before, after), sink,
            )
        return rows

    def options(self, mode: int, **more: Any) -> dict[str, Any]:
        return {
            "atten_mask": None if mode == 0 else CAUSAL_MASK,
            "actual_seq_lengths": self.ends,
            "num_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "input_layout": "TND",
            "scale": SCALE,
            "sparse_mode": mode,
            **more,
        }

    def paged(self, mode: int, layout: str = "rows", **more: Any) -> torch.Tensor:
        shape = {
            "rows": lambda cache: cache.view(*cache.shape[:2], -1),
            "heads": lambda cache: cache.transpose(1, 2).contiguous(),
        }[layout]
        options = self.options(
            mode, block_table=self.table, block_size=self.block_size, actual_seq_lengths_kv=[n for _, n in self.lengths], **more
        )
        return npu_fused_infer_attention_score(self.query, shape(self.key_cache), shape(self.value_cache), **options)[0]

    def end_to_end(self, mode: int, **more: Any) -> torch.Tensor:
        options = self.options(mode, actual_seq_lengths_kv=self.totals, **more)
        return npu_fused_infer_attention_score(self.query, torch.cat(self.keys), torch.cat(self.values), **options)[0]

    @property
    def totals(self) -> list[int]:
        """Running totals of the keys."""
        return torch.tensor([n for _, n in self.lengths]).cumsum(0).tolist()

    def with_sink(self, mode: int, sink: torch.Tensor, paged: bool = True, **more: Any) -> torch.Tensor:
        """The second version of the operator, which alone has sinks."""
        if paged:
            tensors = [cache.view(*cache.shape[:2], -1) for cache in (self.key_cache, self.value_cache)]
            more |= {"block_table": self.table, "block_size": self.block_size, "actual_seq_kvlen": [n for _, n in self.lengths]}
        else:
            tensors = [torch.cat(self.keys), torch.cat(self.values)]
            more |= {"actual_seq_kvlen": self.totals}
        options = {"atten_mask": None if mode == 0 else CAUSAL_MASK, "sparse_mode": mode, "input_layout": "TND", "softmax_scale": SCALE}
        return npu_fused_infer_attention_score_v2(
            self.query, *tensors, actual_seq_qlen=self.ends, num_query_heads=self.heads, num_key_value_heads=self.kv_heads,
            learnable_sink=sink, **{**options, **more},
        )[0]


def close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    absolute, relative = (2e-6, 1e-5) if actual.dtype == torch.float32 else (2**-9, 2**-7)
    torch.testing.assert_close(actual.double(), exact, atol=absolute, rtol=relative)


SCENARIOS = {
    "one prompt": [(7, 7)],
    "prompts of several lengths": [(1, 1), (5, 5), (17, 17)],
    "decodes": [(1, 9), (1, 16), (1, 33)],
    "a chunk of a prompt beside a decode": [(1, 20), (6, 38)],
    "a cached prefix": [(3, 35)],
    "a sequence without queries": [(2, 4), (0, 5), (3, 3)],
    "padding as sequence parallelism adds it: one row that belongs to nobody, key length 1": [(1, 9), (4, 4), (1, 1)],
    "queries but no keys": [(2, 0), (2, 2)],
    "more queries than keys": [(5, 3)],
}


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_paged_attention_equals_its_definition(scenario: str, mode: int) -> None:
    batch = Batch(SCENARIOS[scenario])
    close(batch.paged(mode), batch.expected(mode))


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_attention_over_keys_laid_end_to_end_equals_its_definition(scenario: str, mode: int) -> None:
    batch = Batch(SCENARIOS[scenario])
    close(batch.end_to_end(mode), batch.expected(mode))


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 0), (16, 0), (2, 1)])
def test_a_window_sees_so_many_keys_before_and_after(before: int, after: int) -> None:
    batch = Batch([(1, 9), (6, 20), (12, 12)])
    close(batch.paged(4, pre_tokens=before, next_tokens=after), batch.expected(4, before, after))


def heads_sinks(batch: Batch) -> torch.Tensor:
    """A sink per head, from next to nothing to more than the keys' scores."""
    return torch.linspace(-4.0, 4.0, batch.heads).to(batch.dtype)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_sink_takes_its_share_in_each_head_and_brings_no_value(scenario: str, mode: int, paged: bool) -> None:
    batch = Batch(SCENARIOS[scenario])
    sink = heads_sinks(batch)
    actual = batch.with_sink(mode, sink, paged, pre_tokens=4, next_tokens=0)
    close(actual, batch.expected(mode, 4, 0, sink=sink))


def test_a_sink_in_bfloat16_differs_from_the_definition_by_its_own_rounding_only() -> None:
    batch = Batch([(4, 40), (30, 30)], dtype=torch.bfloat16)
    sink = heads_sinks(batch)
    close(batch.with_sink(3, sink), batch.expected(3, sink=sink))


def test_a_sink_that_nothing_flows_into_changes_nothing() -> None:
    batch = Batch([(4, 40), (7, 7)])
    assert torch.equal(batch.with_sink(3, torch.full((4,), float("-inf"))), batch.paged(3))


def test_pre_and_next_tokens_count_in_the_window_mode_alone() -> None:
    batch = Batch([(5, 12)])
    close(batch.paged(3, pre_tokens=1, next_tokens=1), batch.expected(3))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=4),
    mode=st.sampled_from([0, 2, 3]),
    layout=st.sampled_from(["rows", "heads"]),
    heads=st.sampled_from([(4, 4), (4, 1), (6, 3)]),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_is_attended_sequence_by_sequence(
    lengths: list[tuple[int, int]], mode: int, layout: str, heads: tuple[int, int]
) -> None:
    batch = Batch(lengths, heads=heads[0], kv_heads=heads[1], width=4)
    close(batch.paged(mode, layout), batch.expected(mode))


def test_bfloat16_differs_from_the_definition_by_its_own_rounding_only() -> None:
    batch = Batch([(4, 40), (30, 30)], dtype=torch.bfloat16)
    close(batch.paged(3), batch.expected(3))


def test_log_sum_exp_is_that_of_the_scaled_scores() -> None:
    query, key, value = random(2, 4, 8), random(5, 2, 8, seed=1), random(5, 2, 8, seed=2)
    _, lse = attend(query, key, value, SCALE, None)
    for i in range(2):
        for head in range(4):
            scores = [SCALE * float(query[i, head].double() @ key[j, head // 2].double()) for j in range(5)]
            assert lse[i, head].item() == pytest.approx(math.log(sum(math.exp(s) for s in scores)), rel=1e-5)


def test_the_second_version_and_the_out_form_give_the_same() -> None:
    batch = Batch([(1, 20), (6, 38)])
    cache = [c.view(*c.shape[:2], -1) for c in (batch.key_cache, batch.value_cache)]
    shared = {"block_table": batch.table, "block_size": 16, "atten_mask": CAUSAL_MASK, "sparse_mode": 3, "input_layout": "TND"}
    expected = batch.paged(3)
    second, _ = npu_fused_infer_attention_score_v2(
        batch.query, *cache, actual_seq_qlen=batch.ends, actual_seq_kvlen=[20, 38], num_query_heads=4,
        num_key_value_heads=2, softmax_scale=SCALE, **shared,
    )
    assert torch.equal(second, expected)
    out = [torch.empty_like(batch.query), torch.empty(7, 4, 1)]
    npu_fused_infer_attention_score_out(
        batch.query, *cache, actual_seq_lengths=batch.ends, actual_seq_lengths_kv=[20, 38], num_heads=4,
        num_key_value_heads=2, scale=SCALE, softmax_lse_flag=True, workspace=None, out=out, **shared,
    )
    assert torch.equal(out[0], expected)
    assert torch.isfinite(out[1]).all()


def test_decode_attention_of_the_atb_library_equals_its_definition() -> None:
    batch = Batch([(1, 9), (1, 16), (1, 33)])
    out = torch.empty_like(batch.query)
    _npu_paged_attention(
        batch.query, batch.key_cache, batch.value_cache, 2, 4, SCALE, batch.table, torch.tensor([9, 16, 33], dtype=torch.int32), out
    )
    close(out, batch.expected(0))


def wrong(**changes: Any) -> Callable[[], object]:
    """A call that is right but for ``changes``."""

    def call() -> object:
        batch = Batch([(1, 9), (4, 20)])
        tensors = {"query": batch.query, "key": batch.key_cache.view(7, 16, 16), "value": batch.value_cache.view(7, 16, 16)}
        options = batch.options(3, block_table=batch.table, block_size=16, actual_seq_lengths_kv=[9, 20])
        for name, change in changes.items():
            target = tensors if name in tensors else options
            target[name] = change(target[name]) if callable(change) else change
        return npu_fused_infer_attention_score(**tensors, **options)

    return call


def test_the_call_that_the_wrong_ones_start_from_is_right() -> None:
    wrong()()


WRONG_CALLS = {
    "running totals that do not end at the rows (561002 on hardware)": (
        {"actual_seq_lengths": [1, 4]}, "actual_seq_lengths: the last running total 4 must equal the 5 rows"),
    "running totals that fall": ({"actual_seq_lengths": [3, 1, 5]}, "actual_seq_lengths: running totals .* fall at index 1"),
    "no running totals": ({"actual_seq_lengths": None}, "actual_seq_lengths: must be given"),
    "too few key lengths": ({"actual_seq_lengths_kv": [9]}, "actual_seq_lengths_kv: 1 lengths for 2 sequences"),
    "too few table rows": ({"block_table": lambda t: t[:1]}, "block_table: 1 rows for 2 sequences"),
    "int64 table": ({"block_table": lambda t: t.long()}, "block_table: dtype torch.int64"),
    "a block that does not exist": ({"block_table": lambda t: t + 100}, "block_table: sequence 0 names blocks"),
    "block -1": ({"block_table": lambda t: torch.full_like(t, -1)}, r"block_table: sequence 0 names blocks \[-1"),
    "more keys than blocks": ({"actual_seq_lengths_kv": [9, 33]}, "block_table: sequence 1 has 33 keys, more than"),
    "a block size that is not the cache's": ({"block_size": 32}, "block_size: 32 is not the block size 16"),
    "a block size that hardware lacks": ({"block_size": 20}, "block_size: 20 must be a multiple of 16"),
    "no mask for the causal mode": ({"atten_mask": None}, "atten_mask: sparse_mode=3 needs"),
    "a mask of another size": ({"atten_mask": CAUSAL_MASK[:128, :128]}, r"atten_mask: shape \(128, 128\)"),
    "a mask that is not causal": (
        {"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)}, "atten_mask: sparse_mode=3 needs ones above"),
    "a mask of floats": ({"atten_mask": CAUSAL_MASK.float()}, "atten_mask: dtype"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 must divide"),
    "integer query": ({"query": lambda q: q.to(torch.int8)}, "query: dtype torch.int8"),
    "keys of another dtype": ({"key": lambda k: k.bfloat16()}, "key: dtype"),
    "query that is not contiguous": ({"query": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)}, "query: strides"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_refused_by_operator_and_name(name: str) -> None:
    changes, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=f"npu_fused_infer_attention_score: {message}"):
        wrong(**changes)()


WRONG_SINKS = {
    "one for all heads": (torch.zeros(1), {}, r"shape \(1,\) must be \(4,\)"),
    "one per key head": (torch.zeros(2), {}, r"shape \(2,\) must be \(4,\)"),
    "float16": (torch.zeros(4, dtype=torch.float16), {}, "dtype torch.float16 is not supported"),
    "float32 beside bfloat16": (torch.zeros(4), {"dtype": torch.bfloat16}, "dtype torch.float32 must be torch.bfloat16"),
    "heads wider than 128": (torch.zeros(4), {"width": 144}, "a head of value has 144 elements"),
}


@pytest.mark.parametrize("name", WRONG_SINKS)
def test_a_wrong_sink_is_refused_by_operator_and_name(name: str) -> None:
    sink, batch, message = WRONG_SINKS[name]
    with pytest.raises(ValueError, match=f"npu_fused_infer_attention_score_v2: learnable_sink: {message}"):
        Batch([(1, 9), (4, 20)], **batch).with_sink(3, sink)


def test_the_log_sum_exp_beside_a_sink_has_no_reference() -> None:
    with pytest.raises(NotImplementedError, match=r"npu_fused_infer_attention_score_v2: return_softmax_lse \(with learnable_sink\)"):
        Batch([(4, 20)]).with_sink(3, torch.zeros(4), return_softmax_lse=True)


UNSUPPORTED = {
    "input_layout": {"input_layout": "BNSD"},
    "sparse_mode": {"sparse_mode": 1},
    "pse_shift": {"pse_shift": torch.zeros(1)},
    "antiquant_mode": {"antiquant_mode": 1},
    r"atten_mask \(with sparse_mode=0\)": {"sparse_mode": 0},
}


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_an_option_without_a_reference_is_named(option: str) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_fused_infer_attention_score: {option}"):
        wrong(**UNSUPPORTED[option])()


def test_context_lengths_of_decode_attention_belong_on_the_host_as_int32() -> None:
    batch = Batch([(1, 9)])
    with pytest.raises(ValueError, match="_npu_paged_attention: context_lens: dtype torch.int64"):
        _npu_paged_attention(
            batch.query, batch.key_cache, batch.value_cache, 2, 4, SCALE, batch.table, torch.tensor([9]), torch.empty_like(batch.query)
        )
