"""Test paged cache writes, format casts and the sampling filter against definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from depth import depth
from emulated import int32, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_npu_emulator.ops import checks, sampling
from ascend_npu_emulator.ops.attention import cache

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    cache.npu_scatter_pa_kv_cache(key, value, keys, values, slots, cache_mode="Norm")


def caches(blocks: int = 3, block_size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((blocks, block_size, 2, 3), -7.0), torch.full(
        (blocks, block_size, 2, 5), -8.0
    )


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count * 6.0).view(count, 2, 3), torch.arange(count * 10.0).view(count, 2, 5)


@given(
    slots=st.lists(st.integers(0, 11), max_size=12, unique=True),
    writer=st.sampled_from([cache._npu_reshape_and_cache, scatter]),
)
@settings(max_examples=40, deadline=None)
def test_each_row_is_stored_in_its_slot_and_other_slots_keep_their_values(
    slots: list[int], writer: Writer
) -> None:
    (keys, values), (key, value) = caches(), rows(len(slots))
    writer(key, value, keys, values, int32(*slots))
    for slot in range(12):
        block, place = slot // 4, slot % 4
        if slot in slots:
            assert torch.equal(keys[block, place], key[slots.index(slot)])
            assert torch.equal(values[block, place], value[slots.index(slot)])
        else:
            assert (keys[block, place] == -7).all()
            assert (values[block, place] == -8).all()


@pytest.mark.parametrize("writer", [cache._npu_reshape_and_cache, scatter])
def test_negative_slot_is_skipped_and_does_not_wrap_to_the_last_block(writer: Writer) -> None:
    (keys, values), (key, value) = caches(), rows(3)
    writer(key, value, keys, values, int32(-1, 5, -1))
    assert torch.equal(keys[1, 1], key[1])
    assert (keys == -7).sum() == keys.numel() - 6
    assert (values[2] == -8).all()


def test_vllm_ascend_0_30_allows_gaps_between_cache_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, key = torch.zeros(3, 2, 4, 2, 3), rows(2)[0]
    value = key + 20
    monkeypatch.setattr(checks, "is_at_least", lambda release: False)
    with pytest.raises(ValueError, match=r"key_cache: strides \(48, 6, 3, 1\) must be contiguous"):
        scatter(key, value, both[:, 0], both[:, 1], int32(11, 2))
    monkeypatch.setattr(checks, "is_at_least", lambda release: release == "0.30")
    scatter(key, value, both[:, 0], both[:, 1], int32(11, 2))
    assert torch.equal(both[2, :, 3], torch.stack([key[0], value[0]]))
    assert torch.equal(both[0, :, 2], torch.stack([key[1], value[1]]))
    assert both.count_nonzero() == key.count_nonzero() + value.count_nonzero()
    with pytest.raises(ValueError, match="must be contiguous"):
        scatter(key, value, both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2), int32(1, 2))


def test_format_cast_copies_all_elements() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    cast = cache.npu_format_cast(weight, 29)
    assert torch.equal(cast, weight)
    assert cast.stride() == weight.stride()
    weight.zero_()
    assert cast.sum() == 15


def test_prefetch_leaves_the_weight_unchanged() -> None:
    weight = torch.arange(4.0)
    assert cache.npu_prefetch(weight, None, 100) is None
    assert weight.tolist() == [0, 1, 2, 3]


def store(count: int, slots: torch.Tensor) -> Callable[[], object]:
    return lambda: cache._npu_reshape_and_cache(*rows(count), *caches(), slots)


def sample(**limits: torch.Tensor) -> Callable[[], object]:
    return lambda: sampling.npu_top_k_top_p(torch.ones(1, 4), **limits)


BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "int64 slots": (store(1, torch.tensor([0])), "slot_indices: dtype torch.int64"),
    "a slot past the end": (store(2, int32(0, 12)), r"slot_indices: \[12\] lie past"),
    "rows without a slot": (store(2, int32(0)), "key: 2 rows for 1 slots"),
    "rows of another dtype": (
        lambda: cache._npu_reshape_and_cache(
            *(row.bfloat16() for row in rows(1)), *caches(), int32(0)
        ),
        "key: dtype",
    ),
    "rows of another head size": (
        lambda: cache._npu_reshape_and_cache(rows(1)[1], rows(1)[1], *caches(), int32(0)),
        "key: shape",
    ),
    "rows that are not contiguous": (
        lambda: scatter(rows(2)[0][:, ::2], rows(2)[1], *caches(), int32(1, 2)),
        "key: strides",
    ),
    "prefetch of nothing": (lambda: cache.npu_prefetch(torch.ones(2), None, 0), "max_size"),
    "prefetch past the end": (lambda: cache.npu_prefetch(torch.ones(2), None, 8, 9), "offset"),
    "neither k nor p": (sample(), "p: p and k must not both be None"),
    "int64 k": (sample(k=torch.tensor([1])), "k: dtype"),
    "k past the vocabulary": (sample(k=int32(5)), r"k: \[5\] must lie in 1..4"),
    "p in another dtype": (sample(p=torch.tensor([0.5]).half()), "p: dtype"),
}
NO_REFERENCE: dict[str, tuple[Callable[[], object], str]] = {
    "another memory format": (lambda: cache.npu_format_cast(torch.ones(2), 4), "acl_format=4"),
}


@scenarios("call, message", BAD_VALUES)
def test_error_names_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@scenarios("call, message", NO_REFERENCE)
def test_unsupported_option_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call()


def survivors(row: list[float], k: int | None, p: float | None) -> set[int]:
    """Return the indices of one row that the nine documented steps keep."""
    order = sorted(range(len(row)), key=lambda i: row[i])
    alive = set(order)
    if k is not None:
        smallest = row[order[len(row) - k]]
        alive = {i for i in order if row[i] >= smallest}
    if p is not None:
        top = max(row)
        total = sum(math.exp(row[i] - top) for i in alive)
        below = 0.0
        for i in order[:-1]:
            below += math.exp(row[i] - top) / total if i in alive else 0.0
            if below <= 1 - p:
                alive.discard(i)
    return alive


@given(
    logits=st.lists(st.integers(-20, 20), min_size=1, max_size=12),
    k=st.one_of(st.none(), st.integers(1, 12)),
    p=st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.83, 0.999])),
)
@settings(max_examples=depth(100), deadline=None)
def test_top_k_and_top_p_equal_their_definition(
    logits: list[int], k: int | None, p: float | None
) -> None:
    k = min(k or 1, len(logits)) if k or p is None else None
    row = [value / 4 for value in logits]
    out = sampling.npu_top_k_top_p(
        torch.tensor([row]),
        None if p is None else torch.tensor([p]),
        None if k is None else int32(k),
    )
    kept = survivors(row, k, p)
    assert [i for i, value in enumerate(out[0].tolist()) if value != -math.inf] == sorted(kept)
    assert all(out[0, i] == row[i] for i in kept)


def test_each_row_has_its_own_k_and_p() -> None:
    out = sampling.npu_top_k_top_p(
        torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3), torch.tensor([1.0, 0.5, 0.9]), int32(4, 4, 1)
    )
    assert (out > -math.inf).sum(1).tolist() == [4, 1, 1]
