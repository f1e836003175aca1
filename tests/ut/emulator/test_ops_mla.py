"""The kernels of latent attention (MLA) against their definitions, written for one row, one pair or one head in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_ascend_hsx.emulator.ops import mla
from vllm_ascend_hsx.emulator.ops.fused_attention import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_fused_infer_attention_score_v2_out,
)
from vllm_ascend_hsx.emulator.ops.poison import POISON

CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
HALVES = [torch.bfloat16, torch.float16]
LATENT, ROPE, WIDTH = 512, 64, 128
BLOCK = 16
SCALE = 0.07
NAN = float("nan")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """``actual`` is ``exact`` (float64), but for one rounding to its dtype and the order of sums in float32."""
    absolute, relative = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2**-12, 2**-8), torch.float16: (2**-12, 2**-10)}[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, atol=absolute, rtol=relative)


def angles(*shape: int, dtype: torch.dtype, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., 64] of 32 angles each, which stand there twice."""
    turns = 3 * torch.randn((*shape, ROPE // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat((turns.cos(), turns.cos()), -1).to(dtype), torch.cat((turns.sin(), turns.sin()), -1).to(dtype)


def rotated(row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One row [64] as 32 complex numbers, each times cos + i sin: the real parts, then the imaginary ones."""
    numbers = torch.view_as_complex(row.double().view(-1, 2).contiguous())
    turned = numbers * torch.complex(cos.double()[: ROPE // 2], sin.double()[: ROPE // 2])
    return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [1, 3])
def test_interleave_rope_turns_neighbours_and_parts_them(length: int, dtype: torch.dtype) -> None:
    x, (cos, sin) = random(5, 4, length, ROPE, dtype=dtype), angles(5, 1, length, dtype=dtype)
    exact = torch.empty(x.shape, dtype=torch.float64)
    for b, n, s in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:3])).tolist():
        exact[b, n, s] = rotated(x[b, n, s], cos[b, 0, s], sin[b, 0, s])
    close(mla.npu_interleave_rope(x, cos, sin), exact)


def test_one_angle_serves_all_positions_of_a_batch() -> None:
    x, (cos, sin) = random(2, 4, 3, ROPE), angles(2, 1, 1, dtype=torch.bfloat16)
    everywhere = [part.expand(2, 1, 3, ROPE) for part in (cos, sin)]
    assert torch.equal(mla.npu_interleave_rope(x, cos, sin), mla.npu_interleave_rope(x, *everywhere))


class Cache:
    """A paged cache of rotated keys and latents, NaN where nobody has written, and a call that fills it."""

    def __init__(self, slots: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        rows = len(slots)
        self.arguments: dict[str, Any] = {
            "kv": 3 * random(rows, 1, 1, LATENT + ROPE, dtype=dtype),
            "gamma": 1 + random(LATENT, seed=1, dtype=dtype),
            **dict(zip(("cos", "sin"), angles(rows, 1, 1, dtype=dtype), strict=True)),
            "index": torch.tensor(slots),
            "k_cache": torch.full((4, BLOCK, 1, ROPE), NAN, dtype=dtype),
            "ckv_cache": torch.full((4, BLOCK, 1, LATENT), NAN, dtype=dtype),
        }

    def fill(self, **changes: Any) -> tuple[torch.Tensor, ...]:
        options = {"epsilon": 1e-6, "cache_mode": "PA", **changes}
        return mla.npu_kv_rmsnorm_rope_cache(**{**self.arguments, **options})

    def expected(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rotated [64], normed [512]) of a row of kv, in float64."""
        kv = self.arguments["kv"][row, 0, 0].double()
        latent = kv[:LATENT]
        rms = math.sqrt(sum(value * value for value in latent.tolist()) / LATENT + 1e-6)
        cos, sin = (self.arguments[name][row, 0, 0] for name in ("cos", "sin"))
        return rotated(kv[LATENT:], cos, sin), latent / rms * self.arguments["gamma"].double()


@pytest.mark.parametrize("dtype", HALVES)
def test_each_row_is_normed_rotated_and_put_into_its_slot(dtype: torch.dtype) -> None:
    slots = [40, 3, -1, 4, 63]
    cache = Cache(slots, dtype)
    k_cache, ckv_cache, rotated_rows, normed_rows = cache.fill(is_output_kv=True)
    assert k_cache is cache.arguments["k_cache"]
    assert ckv_cache is cache.arguments["ckv_cache"]
    caches, given_back = (k_cache.view(64, -1), ckv_cache.view(64, -1)), (rotated_rows, normed_rows)
    for row, slot in enumerate(slots):
        for flat, rows, exact in zip(caches, given_back, cache.expected(row), strict=True):
            close(rows[row, 0, 0], exact)
            if slot >= 0:
                close(flat[slot], exact)
    untouched = [slot for slot in range(64) if slot not in slots]
    assert all(flat[untouched].isnan().all() for flat in caches)


def test_rows_are_given_back_only_if_asked_for() -> None:
    assert [rows.numel() for rows in Cache([1, 2]).fill()[2:]] == [0, 0]


def test_a_slot_that_two_rows_want_holds_neither() -> None:
    k_cache, ckv_cache, _, _ = Cache([5, 9, 5, -1, -1]).fill()
    assert (k_cache.view(64, -1)[5] == POISON).all()
    assert (ckv_cache.view(64, -1)[5] == POISON).all()
    assert ckv_cache.view(64, -1)[9].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_products_of_all_batches_stand_side_by_side(swapped: bool, dtype: torch.dtype) -> None:
    x, weight = random(3, 5, 128, dtype=dtype), random(3, 128, 256, seed=1, dtype=dtype)
    exact = torch.stack([x[b].double() @ weight[b].double() for b in range(3)], 1)
    given = x.transpose(0, 1).contiguous() if swapped else x
    actual = mla.npu_transpose_batchmatmul(given, weight, perm_x1=[1, 0, 2] if swapped else None, perm_y=[1, 0, 2])
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 2**-8)


class Paged:
    """Sequences of (queries, keys) against latents in shuffled blocks; NaN where no sequence owns the cache."""

    def __init__(self, lengths: list[tuple[int, int]], heads: int = 2) -> None:
        self.lengths, self.heads = lengths, heads
        total = sum(queries for queries, _ in lengths)
        self.query, self.query_rope = random(total, heads, LATENT), random(total, heads, ROPE, seed=1)
        self.latents = [random(keys, LATENT, seed=10 + i) for i, (_, keys) in enumerate(lengths)]
        self.ropes = [random(keys, ROPE, seed=50 + i) for i, (_, keys) in enumerate(lengths)]
        self.ends = torch.tensor([queries for queries, _ in lengths]).cumsum(0).tolist()
        widest = max(-(-keys // BLOCK) for _, keys in lengths)
        blocks = len(lengths) * widest + 2
        free = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.latent_cache = torch.full((blocks, 1, BLOCK, LATENT), NAN, dtype=torch.bfloat16)
        self.rope_cache = torch.full((blocks, 1, BLOCK, ROPE), NAN, dtype=torch.bfloat16)
        # A row of the table past the sequence's blocks is garbage that must not be followed.
        self.table = torch.full((len(lengths), widest), 10_000, dtype=torch.int32)
        for i, (_, keys) in enumerate(lengths):
            for j in range(keys):
                if j % BLOCK == 0:
                    self.table[i, j // BLOCK] = free.pop()
                self.latent_cache[self.table[i, j // BLOCK], 0, j % BLOCK] = self.latents[i][j]
                self.rope_cache[self.table[i, j // BLOCK], 0, j % BLOCK] = self.ropes[i][j]

    def expected(self, causal: bool) -> torch.Tensor:
        """[T, heads, 512]: each query against all latents, of which a causal one sees those up to its own place."""
        rows, at = [], 0
        for (queries, keys), latents, ropes in zip(self.lengths, self.latents, self.ropes, strict=True):
            for i in range(queries):
                seen = keys - queries + i + 1 if causal else keys
                for head in range(self.heads):
                    scores = latents[:seen].double() @ self.query[at + i, head].double()
                    scores += ropes[:seen].double() @ self.query_rope[at + i, head].double()
                    rows.append(torch.softmax(SCALE * scores, 0) @ latents[:seen].double())
            at += queries
        return torch.stack(rows).view(-1, self.heads, LATENT)

    def call(self, operator: Callable[..., Any] = npu_fused_infer_attention_score_v2, **changes: Any) -> Any:
        options = {
            "query": self.query,
            "key": self.latent_cache,
            "value": self.latent_cache,
            "query_rope": self.query_rope,
            "key_rope": self.rope_cache,
            "num_query_heads": self.heads,
            "num_key_value_heads": 1,
            "input_layout": "TND_NTD",
            "atten_mask": CAUSAL_MASK,
            "sparse_mode": 3,
            "softmax_scale": SCALE,
            "block_table": self.table,
            "block_size": BLOCK,
            "actual_seq_qlen": self.ends,
            "actual_seq_kvlen": [keys for _, keys in self.lengths],
        }
        for name, change in changes.items():
            options[name] = change(options[name]) if callable(change) else change
        return operator(options.pop("query"), options.pop("key"), options.pop("value"), **options)


@pytest.mark.parametrize("lengths", [[(1, 9), (1, 16), (1, 33)], [(2, 20), (1, 1), (2, 2)]], ids=["one query each", "up to two queries"])
def test_queries_attend_to_cached_latents_head_by_head(lengths: list[tuple[int, int]]) -> None:
    batch = Paged(lengths)
    out, _ = batch.call()
    close(out, batch.expected(causal=True).transpose(0, 1))
    assert torch.equal(batch.call(input_layout="TND")[0], out.transpose(0, 1))


@pytest.mark.parametrize("each", [1, 2])
def test_decodes_of_equal_length_come_in_a_layout_of_their_own(each: int) -> None:
    batch = Paged([(each, 9), (each, 16), (each, 33)])
    out, _ = batch.call(
        query=lambda q: q.view(3, each, 2, LATENT).transpose(1, 2), query_rope=lambda q: q.view(3, each, 2, ROPE).transpose(1, 2),
        input_layout="BNSD_NBSD", sparse_mode=0, atten_mask=None, actual_seq_qlen=None,
    )
    assert out.shape == (2, 3, each, LATENT)
    close(out.flatten(1, 2), batch.expected(causal=False).transpose(0, 1))


def test_a_cache_without_a_dimension_for_its_one_head_is_the_same() -> None:
    batch = Paged([(2, 20)])
    flat = {name: (lambda cache: cache.squeeze(1)) for name in ("key", "value", "key_rope")}
    assert torch.equal(batch.call(**flat)[0], batch.call()[0])


def test_the_out_form_fills_what_it_is_given() -> None:
    batch = Paged([(2, 20), (1, 5)])
    out = [torch.empty(2, 3, LATENT, dtype=torch.bfloat16), torch.empty(3)]
    batch.call(npu_fused_infer_attention_score_v2_out, workspace=None, out=out)
    assert torch.equal(out[0], batch.call()[0])


class Expanded:
    """Sequences of (queries, keys) laid end to end, each head with keys and values of its own."""

    def __init__(self, lengths: list[tuple[int, int]], heads: int = 2) -> None:
        self.lengths, self.heads = lengths, heads
        queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
        self.query, self.query_rope = random(queries, heads, WIDTH), random(queries, heads, ROPE, seed=1)
        self.key, self.key_rope = random(keys, heads, WIDTH, seed=2), random(keys, heads, ROPE, seed=3)
        self.value = random(keys, heads, WIDTH, seed=4)

    def expected(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, heads, 128], log of the sum of exp of scores [T, heads]); a query without keys has zeros and +inf."""
        rows, sums, first, at = [], [], 0, 0
        for queries, keys in self.lengths:
            for i in range(queries):
                end = at + (keys - queries + i + 1 if causal else keys)
                for head in range(self.heads):
                    scores = self.key[at:end, head].double() @ self.query[first + i, head].double()
                    scores += self.key_rope[at:end, head].double() @ self.query_rope[first + i, head].double()
                    weights = (SCALE * scores).exp()
                    values = self.value[at:end, head].double()
                    rows.append((weights[:, None] * values).sum(0) / weights.sum() if end > at else torch.zeros(WIDTH).double())
                    sums.append(weights.sum().log() if end > at else torch.tensor(math.inf).double())
            first, at = first + queries, at + keys
        return torch.stack(rows).view(-1, self.heads, WIDTH), torch.stack(sums).view(-1, self.heads)

    def call(self, causal: bool, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = (torch.tensor([pair[i] for pair in self.lengths]).cumsum(0).tolist() for i in (0, 1))
        options = {
            "query_rope": self.query_rope, "key_rope": self.key_rope, "num_heads": self.heads, "num_key_value_heads": self.heads,
            "input_layout": "TND", "atten_mask": CAUSAL_MASK if causal else None, "sparse_mode": 3 if causal else 0, "scale": SCALE,
            "actual_seq_lengths": queries, "actual_seq_lengths_kv": keys, "softmax_lse_flag": True, "antiquant_mode": 0,
        }
        return npu_fused_infer_attention_score(self.query, self.key, self.value, **{**options, **changes})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[(7, 7)], [(5, 5), (1, 1), (17, 17)], [(3, 20), (2, 9)], [(0, 4), (2, 2)]], ids=str)
def test_heads_with_keys_of_their_own_are_attended_in_two_parts(lengths: list[tuple[int, int]], causal: bool) -> None:
    batch = Expanded(lengths)
    out, lse = batch.call(causal)
    exact, exact_lse = batch.expected(causal)
    close(out, exact)
    close(lse.squeeze(-1), exact_lse)


def test_a_sequence_without_earlier_keys_gives_zeros_and_plus_infinity() -> None:
    batch = Expanded([(2, 3), (4, 0)])
    out, lse = batch.call(causal=False)
    exact, exact_lse = batch.expected(causal=False)
    close(out, exact)
    close(lse.squeeze(-1), exact_lse)
    assert lse[2:].isposinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_attention_are_merged_into_the_whole(dtype: torch.dtype) -> None:
    # Three parts of 5 keys each; row 0 sees no key of part 0, row 3 sees part 2 alone.
    scores, values = 4 * random(4, 3, 5, dtype=torch.float64), random(3, 5, 8, seed=1, dtype=torch.float64)
    unseen = {(0, 0), (3, 0), (3, 1)}
    outs, sums = [], []
    for part in range(3):
        blind = torch.tensor([(row, part) in unseen for row in range(4)])
        sums.append(scores[:, part].exp().sum(-1).log().masked_fill(blind, math.inf).float())
        outs.append((torch.softmax(scores[:, part], -1) @ values[part]).masked_fill(blind[:, None], 0.0).to(dtype))
    exact = []
    for row in range(4):
        seen = [part for part in range(3) if (row, part) not in unseen]
        weights = torch.cat([scores[row, part] for part in seen]).exp()
        exact.append(weights @ torch.cat([values[part] for part in seen]) / weights.sum())
    merged, empty = mla.npu_attention_update(tuple(sums), tuple(outs), 0)
    assert merged.dtype == dtype
    assert empty.numel() == 0
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(merged.double(), torch.stack(exact), atol=tolerance, rtol=tolerance)


class Pages:
    """A cache of three blocks of four rows, two heads wide; element values say which row they are."""

    def __init__(self) -> None:
        rows = torch.arange(12.0).view(3, 4, 1, 1)
        self.keys, self.values = rows.expand(3, 4, 2, 8).bfloat16().contiguous(), -rows.expand(3, 4, 2, 6).bfloat16().contiguous()
        self.table = torch.tensor([[2, 0], [1, 10_000]], dtype=torch.int32)

    def load(self, lengths: list[int], starts: list[int] | None = None, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"seq_starts": None if starts is None else torch.tensor(starts, dtype=torch.int32), **changes}
        operator = mla.npu_paged_cache_load_out if "key" in changes else mla.npu_paged_cache_load
        return operator(self.keys, self.values, self.table, torch.tensor(lengths, dtype=torch.int32), **options)


@pytest.mark.parametrize(
    ("lengths", "starts", "rows"),
    [
        ([6, 3], None, [8, 9, 10, 11, 0, 1, 4, 5, 6]),
        ([2, 4], [4, 0], [0, 1, 4, 5, 6, 7]),
        ([0, 2], [4, 0], [4, 5]),
        ([3, 0], [0, 8], [8, 9, 10]),
        ([0, 0], None, []),
    ],
)
def test_rows_of_sequences_are_loaded_end_to_end(lengths: list[int], starts: list[int] | None, rows: list[int]) -> None:
    keys, values = Pages().load(lengths, starts)
    assert keys.shape == (len(rows), 2, 8)
    assert values.shape == (len(rows), 2, 6)
    assert keys[:, 1, 7].tolist() == rows
    assert values[:, 0, 0].tolist() == [-row for row in rows]


def test_rows_are_loaded_into_given_tensors() -> None:
    key, value = torch.empty(3, 2, 8, dtype=torch.bfloat16), torch.empty(3, 2, 6, dtype=torch.bfloat16)
    returned = Pages().load([1, 2], key=key, value=value)
    assert returned[0] is key
    assert returned[1] is value
    assert key[:, 0, 0].tolist() == [8, 4, 5]
    assert value[:, 0, 0].tolist() == [-8, -4, -5]


def bad_rope(**changes: Any) -> Callable[[], object]:
    arguments = {"x": random(2, 4, 1, ROPE), **dict(zip(("cos", "sin"), angles(2, 1, 1, dtype=torch.bfloat16), strict=True)), **changes}
    return lambda: mla.npu_interleave_rope(**arguments)


def bad_cache(**changes: Any) -> Callable[[], object]:
    return lambda: Cache([1, 2]).fill(**changes)


def bad_product(**changes: Any) -> Callable[[], object]:
    arguments = {"input": random(2, 3, 128), "weight": random(2, 128, 128), "perm_y": [1, 0, 2], **changes}
    return lambda: mla.npu_transpose_batchmatmul(**arguments)


def bad_merge(**changes: Any) -> Callable[[], object]:
    arguments = {"lse": [torch.zeros(3)] * 2, "local_out": [torch.zeros(3, 8)] * 2, "update_type": 0, **changes}
    return lambda: mla.npu_attention_update(**arguments)


def bad_load(lengths: list[int], **changes: Any) -> Callable[[], object]:
    return lambda: Pages().load(lengths, **changes)


def bad_latent(**changes: Any) -> Callable[[], object]:
    return lambda: Paged([(1, 20), (2, 9)]).call(**changes)


def bad_expanded(**changes: Any) -> Callable[[], object]:
    return lambda: Expanded([(2, 4)]).call(True, **changes)


def single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


ATTENTION = "npu_fused_infer_attention_score"
WRONG_CALLS = {
    "rope in float32": (bad_rope(x=torch.zeros(2, 4, 1, ROPE)), "npu_interleave_rope: x: dtype torch.float32"),
    "rope of another width": (bad_rope(x=random(2, 4, 1, 32)), "npu_interleave_rope: x: last dimension"),
    "an angle per head": (bad_rope(cos=random(2, 4, 1, ROPE)), "npu_interleave_rope: cos: shape"),
    "angles of another batch": (bad_rope(sin=random(1, 1, 1, ROPE)), "npu_interleave_rope: sin: shape"),
    "a slot past the end": (bad_cache(index=torch.tensor([1, 64])), r"npu_kv_rmsnorm_rope_cache: index: \[64\] lie outside"),
    "a slot before -1": (bad_cache(index=torch.tensor([-2, 0])), r"npu_kv_rmsnorm_rope_cache: index: \[-2\] lie outside"),
    "int32 slots": (bad_cache(index=torch.tensor([1, 2], dtype=torch.int32)), "npu_kv_rmsnorm_rope_cache: index: dtype torch.int32"),
    "too few slots": (bad_cache(index=torch.tensor([1])), "npu_kv_rmsnorm_rope_cache: index: shape"),
    "a latent of another size": (bad_cache(gamma=random(256)), "npu_kv_rmsnorm_rope_cache: gamma: shape"),
    "caches that are swapped": (
        bad_cache(k_cache=torch.zeros(4, BLOCK, 1, LATENT, dtype=torch.bfloat16)), "npu_kv_rmsnorm_rope_cache: k_cache: shape"),
    "a cache of another dtype": (
        bad_cache(k_cache=torch.zeros(4, BLOCK, 1, ROPE, dtype=torch.float16)), "npu_kv_rmsnorm_rope_cache: k_cache: dtype"),
    "an unknown cache mode": (bad_cache(cache_mode="PN"), "npu_kv_rmsnorm_rope_cache: cache_mode: 'PN' is not one of"),
    "an output that is not turned": (bad_product(perm_y=None), r"npu_transpose_batchmatmul: perm_y: \(0, 1, 2\) must be"),
    "a weight that is turned": (bad_product(perm_x2=[0, 2, 1]), "npu_transpose_batchmatmul: perm_x2"),
    "an input that is turned inside out": (bad_product(perm_x1=[2, 1, 0]), "npu_transpose_batchmatmul: perm_x1"),
    "a product that is no multiple of 128": (
        bad_product(weight=random(2, 128, 100)), "npu_transpose_batchmatmul: weight: .* multiples of 128"),
    "factors that do not fit": (bad_product(weight=random(3, 128, 128)), "npu_transpose_batchmatmul: weight: .* does not fit"),
    "lse in bfloat16": (bad_merge(lse=[torch.zeros(3).bfloat16()] * 2), "npu_attention_update: lse: dtype"),
    "a part without its lse": (bad_merge(lse=[torch.zeros(3)]), "npu_attention_update: local_out: 2 outputs for 1"),
    "seventeen parts": (bad_merge(lse=[torch.zeros(3)] * 17), "npu_attention_update: lse: 17 parts"),
    "parts with columns that are no multiple of 8": (
        bad_merge(local_out=[torch.zeros(3, 12)] * 2), "npu_attention_update: local_out: 12 columns"),
    "a start inside a block": (
        bad_load([1, 1], starts=[2, 0]), r"npu_paged_cache_load: seq_starts: \[2, 0\] must be multiples of 4"),
    "more rows than blocks": (bad_load([9, 0]), "npu_paged_cache_load: block_table: sequence 0 has 9 keys"),
    "a block that does not exist": (bad_load([0, 5]), r"npu_paged_cache_load: block_table: sequence 1 names blocks \[10000\]"),
    "too few lengths": (bad_load([1]), "npu_paged_cache_load: context_lens: 1 numbers for 2"),
    "a target of another dtype": (
        bad_load([1, 1], key=torch.empty(2, 2, 8), value=torch.empty(2, 2, 6)), "npu_paged_cache_load: key: torch.float32"),
    "latents in float32": (bad_latent(query=single), f"{ATTENTION}_v2: query: dtype torch.float32"),
    "one of the two ropes": (bad_latent(key_rope=None), f"{ATTENTION}_v2: query_rope, key_rope: must be given together"),
    "a rope of another width": (bad_latent(query_rope=lambda q: q[..., :32]), f"{ATTENTION}_v2: query_rope: shape"),
    "heads of another width": (bad_latent(query=lambda q: q[..., :256]), f"{ATTENTION}_v2: query: a head has 256 elements"),
    "three heads": (bad_latent(
        query=lambda q: q[:, :1].expand(-1, 3, -1), query_rope=lambda q: q[:, :1].expand(-1, 3, -1), num_query_heads=3
    ), f"{ATTENTION}_v2: num_heads: 3 is not one of"),
    "two heads of latents": (bad_latent(num_key_value_heads=2), f"{ATTENTION}_v2: num_key_value_heads: 2 must be 1"),
    "latents without a table": (bad_latent(block_table=None), f"{ATTENTION}_v2: block_table: must be given"),
    "too few latents": (bad_latent(actual_seq_kvlen=[20]), f"{ATTENTION}_v2: actual_seq_lengths_kv: 1 lengths for 2"),
    "queries that are not counted": (bad_latent(actual_seq_qlen=[1, 2]), f"{ATTENTION}_v2: actual_seq_lengths: the last running total"),
    "a sum in a layout that turns": (bad_latent(return_softmax_lse=True), f"{ATTENTION}_v2: softmax_lse_flag: cannot be set"),
    "no mask": (bad_latent(atten_mask=None), f"{ATTENTION}_v2: atten_mask: sparse_mode=3 needs"),
    "a block size that is not the cache's": (bad_latent(block_size=32), f"{ATTENTION}_v2: key: shape"),
    "values of another width": (bad_expanded(num_key_value_heads=1), f"{ATTENTION}: key: shape"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_refused_by_operator_and_name(name: str) -> None:
    call, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


UNSUPPORTED = {
    "caches in NZ": (bad_cache(cache_mode="PA_NZ"), "npu_kv_rmsnorm_rope_cache: cache_mode='PA_NZ'"),
    "caches that are not paged": (bad_cache(cache_mode="Norm"), "npu_kv_rmsnorm_rope_cache: cache_mode='Norm'"),
    "quantised latents": (bad_cache(c_kv_scale=torch.ones(LATENT)), "npu_kv_rmsnorm_rope_cache: c_kv_scale"),
    "a product with a scale": (bad_product(scale=torch.ones(1)), "npu_transpose_batchmatmul: scale"),
    "a product in groups": (bad_product(batch_split_factor=2), "npu_transpose_batchmatmul: batch_split_factor=2"),
    "the merged sum": (bad_merge(update_type=1), "npu_attention_update: update_type=1"),
    "lengths as running totals": (bad_load([1, 1], cumsum=True), "npu_paged_cache_load: cumsum=True"),
    "latents in another layout": (bad_latent(input_layout="BSND_NBSD"), f"{ATTENTION}_v2: input_layout .*'BSND_NBSD'"),
    "latents in NZ": (bad_latent(
        key=lambda k: k.view(-1, 1, LATENT // 16, BLOCK, 16), key_rope=lambda k: k[:, :, None].expand(-1, 1, LATENT // 16, BLOCK, ROPE)
    ), f"{ATTENTION}_v2: key .in the layout NZ"),
    "a sink": (bad_latent(learnable_sink=torch.zeros(2)), f"{ATTENTION}_v2: learnable_sink"),
    "quantised queries": (bad_latent(query_quant_mode=3), f"{ATTENTION}_v2: query_quant_mode=3"),
    "pages of expanded keys": (bad_expanded(block_table=torch.zeros(1, 1, dtype=torch.int32)), f"{ATTENTION}: block_table"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_option_without_a_reference_is_named(name: str) -> None:
    call, message = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize("call", [bad_rope(), bad_cache(), bad_product(), bad_merge(), bad_load([1, 1]), bad_latent(), bad_expanded()])
def test_the_calls_that_the_wrong_ones_start_from_are_right(call: Callable[[], object]) -> None:
    call()
