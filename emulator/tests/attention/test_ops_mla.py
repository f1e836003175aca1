"""Test the MLA kernels against float64 definitions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_definition import BLOCK, CAUSAL_MASK, Lengths, attention, page, running_totals
from emulated import TOLERANCE, close, int32, random, scenarios
from wrong_calls import wrong

from ascend_npu_emulator.ops.attention import mla
from ascend_npu_emulator.ops.attention.fused import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_fused_infer_attention_score_v2_out,
)
from ascend_npu_emulator.ops.poison import POISON

HALVES = [torch.bfloat16, torch.float16]
LATENT, ROPE, WIDTH = 512, 64, 128
SCALE = 0.07


def half(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=dtype)


# ---- rotation, cache, product, loading ----


def angles(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return cos and sin [..., 64] of 32 angles. Each value appears twice."""
    turns = 3 * random(*shape, ROPE // 2, seed=7)
    return {
        name: torch.cat((part, part), -1).to(dtype)
        for name, part in (("cos", turns.cos()), ("sin", turns.sin()))
    }


def rotated(row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply 32 complex numbers [64] by cos + i sin. The result has the real parts first."""
    numbers = torch.view_as_complex(row.double().view(-1, 2).contiguous())
    turned = numbers * torch.complex(cos.double()[: ROPE // 2], sin.double()[: ROPE // 2])
    return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [1, 3])
def test_interleave_rope_rotates_neighbours_and_returns_real_parts_first(
    length: int, dtype: torch.dtype
) -> None:
    x, turn = half(5, 4, length, ROPE, dtype=dtype), angles(5, 1, length, dtype=dtype)
    exact = torch.empty(x.shape, dtype=torch.float64)
    for b, n, s in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:3])).tolist():
        exact[b, n, s] = rotated(x[b, n, s], turn["cos"][b, 0, s], turn["sin"][b, 0, s])
    close(mla.npu_interleave_rope(x, **turn), exact)


def test_single_angle_is_used_for_all_positions() -> None:
    x, turn = half(2, 4, 3, ROPE), angles(2, 1, 1)
    everywhere = {name: part.expand(2, 1, 3, ROPE) for name, part in turn.items()}
    assert torch.equal(mla.npu_interleave_rope(x, **turn), mla.npu_interleave_rope(x, **everywhere))


def cache_arguments(slots: list[int], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return arguments that write rotated keys and latents into paged caches of NaN."""
    rows = len(slots)
    caches = {
        name: torch.full((4, BLOCK, 1, width), math.nan, dtype=dtype)
        for name, width in (("k_cache", ROPE), ("ckv_cache", LATENT))
    }
    kv, gamma = (
        3 * half(rows, 1, 1, LATENT + ROPE, dtype=dtype),
        1 + half(LATENT, seed=1, dtype=dtype),
    )
    return {
        "kv": kv,
        "gamma": gamma,
        **angles(rows, 1, 1, dtype=dtype),
        "index": torch.tensor(slots),
        **caches,
        "cache_mode": "PA",
    }


@pytest.mark.parametrize("dtype", HALVES)
def test_each_row_is_normed_rotated_and_stored(dtype: torch.dtype) -> None:
    slots = [40, 3, -1, 4, 63]
    given = cache_arguments(slots, dtype)
    *caches, rotated_rows, normed_rows = mla.npu_kv_rmsnorm_rope_cache(
        **given, epsilon=1e-6, is_output_kv=True
    )
    assert caches[0] is given["k_cache"] and caches[1] is given["ckv_cache"]
    flat = [cache.view(64, -1) for cache in caches]
    for row, slot in enumerate(slots):
        kv = given["kv"][row, 0, 0].double()
        rms = math.sqrt(sum(value * value for value in kv[:LATENT].tolist()) / LATENT + 1e-6)
        key = rotated(kv[LATENT:], given["cos"][row, 0, 0], given["sin"][row, 0, 0])
        for cache, rows, exact in zip(
            flat,
            (rotated_rows, normed_rows),
            (key, kv[:LATENT] / rms * given["gamma"].double()),
            strict=True,
        ):
            close(rows[row, 0, 0], exact)
            if slot >= 0:
                close(cache[slot], exact)
    untouched = [slot for slot in range(64) if slot not in slots]
    assert all(cache[untouched].isnan().all() for cache in flat)


def test_duplicate_slot_holds_neither_row_and_no_rows_are_returned_by_default() -> None:
    given = cache_arguments([5, 9, 5, -1, -1])
    assert [rows.numel() for rows in mla.npu_kv_rmsnorm_rope_cache(**given)[2:]] == [0, 0]
    keys, latents = given["k_cache"].view(64, -1), given["ckv_cache"].view(64, -1)
    assert (keys[5] == POISON).all() and (latents[5] == POISON).all()
    assert latents[9].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_transpose_batchmatmul_equals_its_definition(swapped: bool, dtype: torch.dtype) -> None:
    x, weight = random(3, 5, 128, dtype=dtype), random(3, 128, 256, seed=1, dtype=dtype)
    exact = torch.stack([x[b].double() @ weight[b].double() for b in range(3)], 1)
    given = x.transpose(0, 1).contiguous() if swapped else x
    actual = mla.npu_transpose_batchmatmul(
        given, weight, perm_x1=[1, 0, 2] if swapped else None, perm_y=[1, 0, 2]
    )
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=TOLERANCE[dtype][1])


def load(
    lengths: list[int], starts: list[int] | None = None, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load from three blocks of four rows. Each element is the number of the row."""
    rows, table = (
        torch.arange(12.0).view(3, 4, 1, 1),
        torch.tensor([[2, 0], [1, 10_000]], dtype=torch.int32),
    )
    keys, values = (
        rows.expand(3, 4, 2, 8).bfloat16().contiguous(),
        -rows.expand(3, 4, 2, 6).bfloat16().contiguous(),
    )
    operator = mla.npu_paged_cache_load_out if "key" in changes else mla.npu_paged_cache_load
    return operator(
        keys,
        values,
        table,
        int32(*lengths),
        seq_starts=None if starts is None else int32(*starts),
        **changes,
    )


LOADED = [
    ([6, 3], None, [8, 9, 10, 11, 0, 1, 4, 5, 6]),
    ([2, 4], [4, 0], [0, 1, 4, 5, 6, 7]),
    ([0, 2], [4, 0], [4, 5]),
    ([3, 0], [0, 8], [8, 9, 10]),
    ([0, 0], None, []),
]


@pytest.mark.parametrize("given", [False, True], ids=["new tensors", "given tensors"])
@pytest.mark.parametrize(("lengths", "starts", "rows"), LOADED)
def test_rows_of_all_sequences_are_loaded_contiguously(
    lengths: list[int], starts: list[int] | None, rows: list[int], given: bool
) -> None:
    targets = (
        {
            name: torch.empty(len(rows), 2, width, dtype=torch.bfloat16)
            for name, width in (("key", 8), ("value", 6))
        }
        if given
        else {}
    )
    keys, values = load(lengths, starts, **targets)
    if given:
        assert keys is targets["key"] and values is targets["value"]
    assert (keys.shape, values.shape) == ((len(rows), 2, 8), (len(rows), 2, 6))
    assert keys[:, 1, 7].tolist() == rows
    assert values[:, 0, 0].tolist() == [-row for row in rows]


# ---- attention ----


class Cached:
    """A batch of (queries, keys) sequences. All heads use cached latents as keys and values."""

    def __init__(self, lengths: Lengths, heads: int = 2) -> None:
        self.lengths, self.heads, total = lengths, heads, sum(queries for queries, _ in lengths)
        self.query, self.query_rope = half(total, heads, LATENT), half(total, heads, ROPE, seed=1)
        self.latents = [half(keys, 1, LATENT, seed=10 + i) for i, (_, keys) in enumerate(lengths)]
        self.ropes = [half(keys, 1, ROPE, seed=50 + i) for i, (_, keys) in enumerate(lengths)]
        (latents, ropes), self.table = page(self.latents, self.ropes)
        self.latent_cache, self.rope_cache = (
            latents.transpose(1, 2).contiguous(),
            ropes.transpose(1, 2).contiguous(),
        )

    def exact(self, mode: int) -> torch.Tensor:
        """Return the exact output [heads, T, 512]."""
        keys = [torch.cat(pair, -1) for pair in zip(self.latents, self.ropes, strict=True)]
        query = torch.cat((self.query, self.query_rope), -1)
        return attention(self.lengths, query, keys, self.latents, SCALE, mode)[0].transpose(0, 1)

    def call(
        self, operator: Callable[..., Any] = npu_fused_infer_attention_score_v2, **changes: Any
    ) -> Any:
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
            "actual_seq_qlen": running_totals(self.lengths, 0),
            "actual_seq_kvlen": [keys for _, keys in self.lengths],
        }
        options |= {
            name: change(options[name]) if callable(change) else change
            for name, change in changes.items()
        }
        return operator(**options)


@pytest.mark.parametrize(
    "lengths",
    [[(1, 9), (1, 16), (1, 33)], [(2, 20), (1, 1), (2, 2)]],
    ids=["one query each", "up to two queries"],
)
def test_each_head_attends_to_the_shared_latents(lengths: Lengths) -> None:
    batch = Cached(lengths)
    out, _ = batch.call()
    close(out, batch.exact(3))
    assert torch.equal(batch.call(input_layout="TND")[0], out.transpose(0, 1))


@pytest.mark.parametrize("each", [1, 2])
def test_bnsd_nbsd_layout_supports_decodes_of_equal_length(each: int) -> None:
    batch = Cached([(each, 9), (each, 16), (each, 33)])
    out, _ = batch.call(
        query=lambda q: q.view(3, each, 2, LATENT).transpose(1, 2),
        query_rope=lambda q: q.view(3, each, 2, ROPE).transpose(1, 2),
        input_layout="BNSD_NBSD",
        sparse_mode=0,
        atten_mask=None,
        actual_seq_qlen=None,
    )
    assert out.shape == (2, 3, each, LATENT)
    close(out.flatten(1, 2), batch.exact(0))


def test_cache_may_omit_the_head_dimension() -> None:
    batch = Cached([(2, 20)])
    flat = {name: (lambda cache: cache.squeeze(1)) for name in ("key", "value", "key_rope")}
    assert torch.equal(batch.call(**flat)[0], batch.call()[0])


def test_out_form_writes_the_given_output() -> None:
    batch = Cached([(2, 20), (1, 5)])
    out = [torch.empty(2, 3, LATENT, dtype=torch.bfloat16), torch.empty(3)]
    batch.call(npu_fused_infer_attention_score_v2_out, workspace=None, out=out)
    assert torch.equal(out[0], batch.call()[0])


class Expanded:
    """A packed batch of (queries, keys) sequences. Each head has separate keys and values."""

    def __init__(self, lengths: Lengths, heads: int = 2) -> None:
        self.lengths, self.heads, (queries, keys) = (
            lengths,
            heads,
            (sum(pair[i] for pair in lengths) for i in (0, 1)),
        )
        self.query, self.query_rope = (
            half(queries, heads, WIDTH),
            half(queries, heads, ROPE, seed=1),
        )
        self.key, self.key_rope = half(keys, heads, WIDTH, seed=2), half(keys, heads, ROPE, seed=3)
        self.value = half(keys, heads, WIDTH, seed=4)

    def exact(self, mode: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (
            torch.cat((self.query, self.query_rope), -1),
            torch.cat((self.key, self.key_rope), -1),
        )
        counts = [keys for _, keys in self.lengths]
        return attention(
            self.lengths, query, key.split(counts), self.value.split(counts), SCALE, mode
        )

    def call(self, mode: int, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = {
            "query_rope": self.query_rope,
            "key_rope": self.key_rope,
            "num_heads": self.heads,
            "num_key_value_heads": self.heads,
            "input_layout": "TND",
            "atten_mask": CAUSAL_MASK if mode else None,
            "sparse_mode": mode,
            "scale": SCALE,
            "actual_seq_lengths": running_totals(self.lengths, 0),
            "actual_seq_lengths_kv": running_totals(self.lengths, 1),
            "softmax_lse_flag": True,
            "antiquant_mode": 0,
        }
        return npu_fused_infer_attention_score(
            self.query, self.key, self.value, **options | changes
        )


EXPANDED = [
    ([(7, 7)], 3),
    ([(5, 5), (1, 1), (17, 17)], 3),
    ([(3, 20), (2, 9)], 3),
    ([(0, 4), (2, 2)], 3),
]
EXPANDED += [(lengths, 0) for lengths, _ in EXPANDED] + [
    ([(2, 3), (4, 0)], 0)
]  # the last batch has queries without keys


@pytest.mark.parametrize(("lengths", "mode"), EXPANDED, ids=str)
def test_attention_with_separate_keys_per_head_equals_its_definition(
    lengths: Lengths, mode: int
) -> None:
    batch = Expanded(lengths)
    (out, lse), (exact, exact_lse) = batch.call(mode), batch.exact(mode)
    close(out, exact)
    close(lse.squeeze(-1), exact_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_attentions_merge_into_full_attention(dtype: torch.dtype) -> None:
    # Three parts of 5 keys each. Row 0 sees no key of part 0, row 3 sees only part 2.
    scores, values = (
        4 * random(4, 3, 5, dtype=torch.float64),
        random(3, 5, 8, seed=1, dtype=torch.float64),
    )
    unseen = {(0, 0), (3, 0), (3, 1)}
    outs, sums = [], []
    for part in range(3):
        blind = torch.tensor([(row, part) in unseen for row in range(4)])
        sums.append(scores[:, part].exp().sum(-1).log().masked_fill(blind, math.inf).float())
        outs.append(
            (torch.softmax(scores[:, part], -1) @ values[part])
            .masked_fill(blind[:, None], 0.0)
            .to(dtype)
        )
    exact = []
    for row in range(4):
        seen = [part for part in range(3) if (row, part) not in unseen]
        weights = torch.cat([scores[row, part] for part in seen]).exp()
        exact.append(weights @ torch.cat([values[part] for part in seen]) / weights.sum())
    merged, empty = mla.npu_attention_update(tuple(sums), tuple(outs), 0)
    assert (merged.dtype, empty.numel()) == (dtype, 0)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(merged.double(), torch.stack(exact), atol=tolerance, rtol=tolerance)


# ---- refused calls ----


def thrice(query: torch.Tensor) -> torch.Tensor:
    return query[:, :1].expand(-1, 3, -1)


rope = wrong(mla.npu_interleave_rope, x=half(2, 4, 1, ROPE), **angles(2, 1, 1))
cache = wrong(mla.npu_kv_rmsnorm_rope_cache, **cache_arguments([1, 2]))
product = wrong(
    mla.npu_transpose_batchmatmul, input=half(2, 3, 128), weight=half(2, 128, 128), perm_y=[1, 0, 2]
)
merge = wrong(
    mla.npu_attention_update,
    lse=[torch.zeros(3)] * 2,
    local_out=[torch.zeros(3, 8)] * 2,
    update_type=0,
)
loaded = wrong(load, lengths=[1, 1])
latent = wrong(Cached([(1, 20), (2, 9)]).call)
expanded = wrong(Expanded([(2, 4)]).call, mode=3)
SCORE, SCORE_V2 = "npu_fused_infer_attention_score: ", "npu_fused_infer_attention_score_v2: "
STORE, PRODUCT = "npu_kv_rmsnorm_rope_cache: ", "npu_transpose_batchmatmul: "
BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "rope in float32": (
        rope(x=torch.zeros(2, 4, 1, ROPE)),
        "npu_interleave_rope: x: dtype torch.float32",
    ),
    "rope of another width": (rope(x=half(2, 4, 1, 32)), "npu_interleave_rope: x: last dimension"),
    "an angle per head": (rope(cos=half(2, 4, 1, ROPE)), "npu_interleave_rope: cos: shape"),
    "angles of another batch": (rope(sin=half(1, 1, 1, ROPE)), "npu_interleave_rope: sin: shape"),
    "a slot past the end": (
        cache(index=torch.tensor([1, 64])),
        STORE + r"index: \[64\] lie outside",
    ),
    "a slot before -1": (cache(index=torch.tensor([-2, 0])), STORE + r"index: \[-2\] lie outside"),
    "int32 slots": (cache(index=int32(1, 2)), STORE + "index: dtype torch.int32"),
    "too few slots": (cache(index=torch.tensor([1])), STORE + "index: shape"),
    "a latent of another size": (cache(gamma=half(256)), STORE + "gamma: shape"),
    "swapped caches": (cache(k_cache=half(4, BLOCK, 1, LATENT)), STORE + "k_cache: shape"),
    "a cache of another dtype": (
        cache(k_cache=half(4, BLOCK, 1, ROPE, dtype=torch.float16)),
        STORE + "k_cache: dtype",
    ),
    "an unknown cache mode": (cache(cache_mode="PN"), STORE + "cache_mode: 'PN' is not one of"),
    "an output that is not transposed": (
        product(perm_y=None),
        PRODUCT + r"perm_y: \(0, 1, 2\) must be",
    ),
    "a transposed weight": (product(perm_x2=[0, 2, 1]), PRODUCT + "perm_x2"),
    "an input with reversed dimensions": (product(perm_x1=[2, 1, 0]), PRODUCT + "perm_x1"),
    "a product that is no multiple of 128": (
        product(weight=half(2, 128, 100)),
        PRODUCT + "weight: .* multiples of 128",
    ),
    "factors that do not fit": (
        product(weight=half(3, 128, 128)),
        PRODUCT + "weight: .* does not fit",
    ),
    "lse in bfloat16": (
        merge(lse=[torch.zeros(3).bfloat16()] * 2),
        "npu_attention_update: lse: dtype",
    ),
    "a part without its lse": (
        merge(lse=[torch.zeros(3)]),
        "npu_attention_update: local_out: 2 outputs for 1",
    ),
    "seventeen parts": (merge(lse=[torch.zeros(3)] * 17), "npu_attention_update: lse: 17 parts"),
    "columns that are no multiple of 8": (
        merge(local_out=[torch.zeros(3, 12)] * 2),
        "npu_attention_update: local_out: 12 columns",
    ),
    "a start inside a block": (
        loaded(starts=[2, 0]),
        r"npu_paged_cache_load: seq_starts: \[2, 0\] must be multiples of 4",
    ),
    "more rows than blocks": (
        loaded(lengths=[9, 0]),
        "npu_paged_cache_load: block_table: sequence 0 has 9 keys",
    ),
    "a block that does not exist": (
        loaded(lengths=[0, 5]),
        r"npu_paged_cache_load: block_table: sequence 1 uses blocks \[10000\]",
    ),
    "too few lengths": (loaded(lengths=[1]), "npu_paged_cache_load: context_lens: 1 numbers for 2"),
    "a target of another dtype": (
        loaded(key=torch.ones(2, 2, 8), value=torch.ones(2, 2, 6)),
        "npu_paged_cache_load: key: torch.float32",
    ),
    "latents in float32": (
        latent(query=torch.Tensor.float),
        SCORE_V2 + "query: dtype torch.float32",
    ),
    "one of the two ropes": (
        latent(key_rope=None),
        SCORE_V2 + "query_rope, key_rope: must be given together",
    ),
    "a query rope of another width": (
        latent(query_rope=lambda q: q[..., :32]),
        SCORE_V2 + "query_rope: shape",
    ),
    "heads of another width": (
        latent(query=lambda q: q[..., :256]),
        SCORE_V2 + "query: head size 256 must be",
    ),
    "three heads": (
        latent(query=thrice, query_rope=thrice, num_query_heads=3),
        SCORE_V2 + "num_heads: 3 is not one of",
    ),
    "two heads of latents": (
        latent(num_key_value_heads=2),
        SCORE_V2 + "num_key_value_heads: 2 must be 1",
    ),
    "latents without a table": (latent(block_table=None), SCORE_V2 + "block_table: must be given"),
    "too few latents": (
        latent(actual_seq_kvlen=[20]),
        SCORE_V2 + "actual_seq_lengths_kv: 1 lengths for 2",
    ),
    "queries that are not counted": (
        latent(actual_seq_qlen=[1, 2]),
        SCORE_V2 + "actual_seq_lengths: the last running total",
    ),
    "a log-sum-exp in a transposed layout": (
        latent(return_softmax_lse=True),
        SCORE_V2 + "softmax_lse_flag: cannot be set",
    ),
    "no mask": (latent(atten_mask=None), SCORE_V2 + "atten_mask: sparse_mode=3 needs"),
    "a block size that differs from the cache": (latent(block_size=32), SCORE_V2 + "key: shape"),
    "values of another width": (expanded(num_key_value_heads=1), SCORE + "key: shape"),
}
NZ = {
    "key": lambda k: k.view(-1, 1, LATENT // 16, BLOCK, 16),
    "key_rope": lambda k: k[:, :, None].expand(-1, 1, LATENT // 16, BLOCK, ROPE),
}
NO_REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    "caches in NZ": (cache(cache_mode="PA_NZ"), STORE + "cache_mode='PA_NZ'"),
    "caches that are not paged": (cache(cache_mode="Norm"), STORE + "cache_mode='Norm'"),
    "quantised latents": (cache(c_kv_scale=torch.ones(LATENT)), STORE + "c_kv_scale"),
    "a product with a scale": (product(scale=torch.ones(1)), PRODUCT + "scale"),
    "a product in groups": (product(batch_split_factor=2), PRODUCT + "batch_split_factor=2"),
    "the merged sum": (merge(update_type=1), "npu_attention_update: update_type=1"),
    "lengths as running totals": (loaded(cumsum=True), "npu_paged_cache_load: cumsum=True"),
    "latents in another layout": (
        latent(input_layout="BSND_NBSD"),
        SCORE_V2 + "input_layout .*'BSND_NBSD'",
    ),
    "latents in NZ": (latent(**NZ), SCORE_V2 + "key .in the layout NZ"),
    "a sink": (latent(learnable_sink=torch.zeros(2)), SCORE_V2 + "learnable_sink"),
    "quantised queries": (latent(query_quant_mode=3), SCORE_V2 + "query_quant_mode=3"),
    "pages of expanded keys": (
        expanded(block_table=torch.zeros(1, 1, dtype=torch.int32)),
        SCORE + "block_table",
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


@pytest.mark.parametrize("make", [rope, cache, product, merge, loaded, latent, expanded])
def test_base_calls_are_valid(
    make: Callable[[], Callable[[], object]],
) -> None:
    make()()
