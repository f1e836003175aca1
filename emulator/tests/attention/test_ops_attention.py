"""Test attention in all supported layouts and masks against a float64 definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_definition import BLOCK, CAUSAL_MASK, Lengths, attention, page, running_totals
from emulated import close, int32, random, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_npu_emulator.ops.attention import fused_call
from ascend_npu_emulator.ops.attention.definition import attend
from ascend_npu_emulator.ops.attention.fused import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_out,
    npu_fused_infer_attention_score_v2,
)
from ascend_npu_emulator.ops.attention.paged import _npu_paged_attention

SCALE = 0.3
# Option names of the second version.
V2 = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}


class Batch:
    """A batch of (queries, keys) sequences, in packed and in paged tensors."""

    def __init__(
        self,
        lengths: Lengths,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        self.query = random(sum(queries for queries, _ in lengths), heads, width, dtype=dtype)
        self.keys, self.values = (
            [
                random(n, kv_heads, width, seed=seed + i, dtype=dtype)
                for i, (_, n) in enumerate(lengths)
            ]
            for seed in (10, 50)
        )
        self.caches, self.table = page(self.keys, self.values)
        # One sink score per head. Scores range from very small to larger than the key scores.
        self.sink = torch.linspace(-4.0, 4.0, heads).to(dtype)

    def exact(self, mode: int, **options: Any) -> torch.Tensor:
        return attention(self.lengths, self.query, self.keys, self.values, SCALE, mode, **options)[
            0
        ]

    def options(self, mode: int, paged: bool = True, heads_first: bool = False) -> dict[str, Any]:
        """Return all arguments, named as in the first version."""
        if paged:
            key, value = (
                cache.transpose(1, 2).contiguous() if heads_first else cache.flatten(2)
                for cache in self.caches
            )
            places = {
                "block_table": self.table,
                "block_size": BLOCK,
                "actual_seq_lengths_kv": [n for _, n in self.lengths],
            }
        else:
            key, value = torch.cat(self.keys), torch.cat(self.values)
            places = {"actual_seq_lengths_kv": running_totals(self.lengths, 1)}
        return {
            "query": self.query,
            "key": key,
            "value": value,
            **places,
            "actual_seq_lengths": running_totals(self.lengths, 0),
            "num_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "input_layout": "TND",
            "scale": SCALE,
            "sparse_mode": mode,
            "atten_mask": None if mode == 0 else CAUSAL_MASK,
        }

    def call(
        self, mode: int, paged: bool = True, heads_first: bool = False, **changes: Any
    ) -> torch.Tensor:
        return npu_fused_infer_attention_score(
            **changed(self.options(mode, paged, heads_first), changes)
        )[0]

    def call_v2(self, mode: int, paged: bool = True, **changes: Any) -> torch.Tensor:
        options = changed(self.options(mode, paged), changes)
        return npu_fused_infer_attention_score_v2(
            **{V2.get(name, name): value for name, value in options.items()}
        )[0]


def changed(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return options | {
        name: change(options[name]) if callable(change) else change
        for name, change in changes.items()
    }


BATCHES: dict[str, Lengths] = {
    "one prompt": [(7, 7)],
    "prompts of several lengths": [(1, 1), (5, 5), (17, 17)],
    "decodes": [(1, 9), (1, 16), (1, 33)],
    "a prompt chunk and a decode": [(1, 20), (6, 38)],
    "a cached prefix": [(3, 35)],
    "a sequence without queries": [(2, 4), (0, 5), (3, 3)],
    "padding of sequence parallelism: one extra row with key length 1": [
        (1, 9),
        (4, 4),
        (1, 1),
    ],
    "queries but no keys": [(2, 0), (2, 2)],
    "more queries than keys": [(5, 3)],
}


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "end to end"])
@scenarios("lengths", BATCHES)
def test_attention_equals_its_definition(lengths: Lengths, paged: bool, mode: int) -> None:
    batch = Batch(lengths)
    close(batch.call(mode, paged), batch.exact(mode))


@pytest.mark.parametrize("window", [(3, 0), (0, 0), (16, 0), (2, 1)])
def test_window_bounds_the_keys_before_and_after_a_query(window: tuple[int, int]) -> None:
    batch = Batch([(1, 9), (6, 20), (12, 12)])
    close(batch.call(4, pre_tokens=window[0], next_tokens=window[1]), batch.exact(4, window=window))


def test_causal_mode_ignores_pre_and_next_tokens() -> None:
    batch = Batch([(5, 12)])
    close(batch.call(3, pre_tokens=1, next_tokens=1), batch.exact(3))


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("mode", [0, 3, 4])
@scenarios("lengths", BATCHES)
def test_sink_adds_to_the_softmax_sum_without_a_value(
    lengths: Lengths, mode: int, paged: bool
) -> None:
    batch = Batch(lengths)
    actual = batch.call_v2(mode, paged, learnable_sink=batch.sink, pre_tokens=4, next_tokens=0)
    close(actual, batch.exact(mode, window=(4, 0), sink=batch.sink))


def test_sink_of_minus_infinity_has_no_effect() -> None:
    batch = Batch([(4, 40), (7, 7)])
    assert torch.equal(
        batch.call_v2(3, learnable_sink=torch.full((4,), float("-inf"))), batch.call(3)
    )


@pytest.mark.parametrize("with_sink", [False, True])
def test_bfloat16_results_are_rounded_once(with_sink: bool) -> None:
    batch = Batch([(4, 40), (30, 30)], dtype=torch.bfloat16)
    sink = batch.sink if with_sink else None
    close(batch.call_v2(3, learnable_sink=sink), batch.exact(3, sink=sink))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=4),
    mode=st.sampled_from([0, 2, 3]),
    heads_first=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 1), (6, 3)]),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_equals_attention_per_sequence(
    lengths: Lengths, mode: int, heads_first: bool, heads: tuple[int, int]
) -> None:
    batch = Batch(lengths, *heads, width=4)
    close(batch.call(mode, heads_first=heads_first), batch.exact(mode))


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("scores", [1, 100, 1000])
@scenarios("lengths", BATCHES)
def test_limit_of_scores_bounds_memory_and_keeps_the_results(
    monkeypatch: pytest.MonkeyPatch, lengths: Lengths, scores: int, mode: int
) -> None:
    taken: list[int] = []

    def measured(
        query: torch.Tensor, key: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(query.shape[0] * query.shape[1] * key.shape[0])
        assert query.shape[0] == 1 or taken[-1] <= scores
        return attend(query, key, *others)

    monkeypatch.setattr(fused_call, "SCORES_AT_ONCE", scores)
    monkeypatch.setattr(fused_call, "attend", measured)
    batch = Batch(lengths)
    window = {"pre_tokens": 4, "next_tokens": 0} if mode == 4 else {}
    close(
        batch.call(mode, **window), batch.exact(mode, **({"window": (4, 0)} if mode == 4 else {}))
    )
    assert taken


def test_log_sum_exp_uses_scaled_scores() -> None:
    query, key, value = random(2, 4, 8), random(5, 2, 8, seed=1), random(5, 2, 8, seed=2)
    close(
        attend(query, key, value, SCALE, None)[1],
        attention([(2, 5)], query, [key], [value], SCALE)[1],
    )


def test_second_version_and_out_form_equal_the_first_version() -> None:
    batch = Batch([(1, 20), (6, 38)])
    expected = batch.call(3)
    assert torch.equal(batch.call_v2(3), expected)
    out = [torch.empty_like(batch.query), torch.empty(7, 4, 1)]
    npu_fused_infer_attention_score_out(
        **batch.options(3), softmax_lse_flag=True, workspace=None, out=out
    )
    assert torch.equal(out[0], expected)
    assert torch.isfinite(out[1]).all()


def decode(batch: Batch, lengths: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(batch.query)
    _npu_paged_attention(batch.query, *batch.caches, 2, 4, SCALE, batch.table, lengths, out)
    return out


def test_atb_paged_attention_equals_its_definition() -> None:
    batch = Batch([(1, 9), (1, 16), (1, 33)])
    close(decode(batch, int32(9, 16, 33)), batch.exact(0))


def wrong(**changes: Any) -> Callable[[], object]:
    """Return a valid call with `changes` applied."""
    return lambda: Batch([(1, 9), (4, 20)]).call(3, **changes)


def wrong_sink(sink: torch.Tensor, **batch: Any) -> Callable[[], object]:
    return lambda: Batch([(1, 9), (4, 20)], **batch).call_v2(3, learnable_sink=sink)


def test_base_calls_are_valid() -> None:
    wrong()()
    wrong_sink(torch.zeros(4))()
    decode(Batch([(1, 9)]), int32(9))


OP, V2_SINK = (
    "npu_fused_infer_attention_score: ",
    "npu_fused_infer_attention_score_v2: learnable_sink: ",
)
BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "running totals that do not end at the rows (561002 on hardware)": (
        wrong(actual_seq_lengths=[1, 4]),
        OP + "actual_seq_lengths: the last running total 4 must equal the 5 rows",
    ),
    "decreasing running totals": (
        wrong(actual_seq_lengths=[3, 1, 5]),
        OP + "actual_seq_lengths: running totals .* decrease at index 1",
    ),
    "no running totals": (wrong(actual_seq_lengths=None), OP + "actual_seq_lengths: must be given"),
    "too few key lengths": (
        wrong(actual_seq_lengths_kv=[9]),
        OP + "actual_seq_lengths_kv: 1 lengths for 2 sequences",
    ),
    "too few table rows": (
        wrong(block_table=lambda t: t[:1]),
        OP + "block_table: 1 rows for 2 sequences",
    ),
    "int64 table": (wrong(block_table=torch.Tensor.long), OP + "block_table: dtype torch.int64"),
    "a block that does not exist": (
        wrong(block_table=lambda t: t + 100),
        OP + "block_table: sequence 0 uses blocks",
    ),
    "block -1": (
        wrong(block_table=lambda t: torch.full_like(t, -1)),
        OP + r"block_table: sequence 0 uses blocks \[-1",
    ),
    "more keys than blocks": (
        wrong(actual_seq_lengths_kv=[9, 33]),
        OP + "block_table: sequence 1 has 33 keys, more than",
    ),
    "a block size that differs from the cache": (
        wrong(block_size=32),
        OP + "block_size: 32 must be 16, the block size",
    ),
    "a block size that hardware lacks": (
        wrong(block_size=20),
        OP + "block_size: 20 must be a multiple of 16",
    ),
    "no mask for the causal mode": (wrong(atten_mask=None), OP + "atten_mask: sparse_mode=3 needs"),
    "a mask of another size": (
        wrong(atten_mask=CAUSAL_MASK[:128, :128]),
        OP + r"atten_mask: shape \(128, 128\)",
    ),
    "a mask that is not causal": (
        wrong(atten_mask=torch.zeros_like),
        OP + "atten_mask: sparse_mode=3 needs ones above",
    ),
    "a mask of floats": (wrong(atten_mask=torch.Tensor.float), OP + "atten_mask: dtype"),
    "heads that do not divide": (
        wrong(num_key_value_heads=3),
        OP + "num_key_value_heads: 3 must divide",
    ),
    "integer query": (wrong(query=torch.Tensor.char), OP + "query: dtype torch.int8"),
    "keys of another dtype": (wrong(key=torch.Tensor.bfloat16), OP + "key: dtype"),
    "query that is not contiguous": (
        wrong(query=lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)),
        OP + "query: strides",
    ),
    "one sink for all heads": (
        wrong_sink(torch.zeros(1)),
        V2_SINK + r"shape \(1,\) must be \(4,\)",
    ),
    "one sink per key head": (wrong_sink(torch.zeros(2)), V2_SINK + r"shape \(2,\) must be \(4,\)"),
    "a float16 sink": (
        wrong_sink(torch.zeros(4).half()),
        V2_SINK + "dtype torch.float16 is not supported",
    ),
    "a float32 sink beside bfloat16": (
        wrong_sink(torch.zeros(4), dtype=torch.bfloat16),
        V2_SINK + "dtype torch.float32 must be torch.bfloat16",
    ),
    "a sink and heads wider than 128": (
        wrong_sink(torch.zeros(4), width=144),
        V2_SINK + "head size 144 of value must be",
    ),
    "int64 lengths of decode attention": (
        lambda: decode(Batch([(1, 9)]), torch.tensor([9])),
        "_npu_paged_attention: context_lens: dtype torch.int64",
    ),
}
NO_REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    "another layout": (wrong(input_layout="BNSD"), OP + "input_layout"),
    "another sparse mode": (wrong(sparse_mode=1), OP + "sparse_mode"),
    "a position encoding": (wrong(pse_shift=torch.zeros(1)), OP + "pse_shift"),
    "quantised keys": (wrong(antiquant_mode=1), OP + "antiquant_mode"),
    "a mask without its mode": (wrong(sparse_mode=0), OP + r"atten_mask \(with sparse_mode=0\)"),
    "the log-sum-exp beside a sink": (
        lambda: Batch([(4, 20)]).call_v2(3, learnable_sink=torch.zeros(4), return_softmax_lse=True),
        r"npu_fused_infer_attention_score_v2: return_softmax_lse \(with learnable_sink\)",
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
