"""Prefix reuse: the index of sources, and the rows that a request copies."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import ROW_BYTES, make_request, make_scheduler, schedule

from vllm_ascend_hsx.connector.metadata import Prefix, RankState, WorkerReport
from vllm_ascend_hsx.connector.prefixes import PrefixIndex, Source

BLOCK = 4
TEXTS = st.lists(st.integers(0, 1), max_size=4)


def hashes(text: Any) -> list[Any]:
    """Return a hash for each block of a text. It covers all blocks up to this block."""
    return list(accumulate((each,) for each in text))


# The index


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=30))
def test_the_index_has_the_latest_request_of_each_prefix_within_its_bounds(
    published: list[tuple[list[int], bool]],
) -> None:
    """As in practice, each request has the rows that it copies from another request."""
    index, kept = PrefixIndex(max_files=3, max_bytes=10 * ROW_BYTES, row_bytes=ROW_BYTES), []
    released: list[int] = []
    for number, (text, uses) in enumerate(published):
        longest = max((_common(text, other) for _, other in kept), default=0)
        found = index.find(hashes(text))
        assert (found[1] if found else 0) == longest
        if found:
            holder = next(other for other_number, other in kept if other_number == found[0].number)
            assert _common(text, holder) == longest
            if uses:
                index.use(found[0])
                kept.sort(key=lambda each: each[0] == found[0].number)  # the latest
        index.publish(Source(number, 0, hashes(text), len(text)))
        kept.append((number, text))
        dropped = [kept.pop()] if not text else []
        while len(kept) > 3 or sum(len(other) for _, other in kept) > 10:
            dropped.append(kept.pop(0))
        released += index.take_released()
        assert released[len(released) - len(dropped) :] == [each for each, _ in dropped]
    index.clear()
    assert sorted(released + index.take_released()) == list(range(len(published)))
    assert index.find(hashes([0])) is index.find(hashes([1])) is None


def _common(one: list[int], two: list[int]) -> int:
    return next((n for n in range(min(len(one), len(two)), 0, -1) if one[:n] == two[:n]), 0)


def test_request_larger_than_the_limit_displaces_no_other() -> None:
    index = PrefixIndex(max_files=3, max_bytes=10, row_bytes=1)
    index.publish(Source(1, 0, hashes([0]), 10))
    index.publish(Source(2, 0, hashes([0, 0]), 11))
    assert index.take_released() == [2]
    assert index.find(hashes([0, 0])) == (index._kept[1], 1)


# The decision


class Engine:
    """The part of vLLM's scheduler that decides the first computed token of a request."""

    def __init__(self, **options: Any) -> None:
        index = PrefixIndex(
            **{"max_files": 8, "max_bytes": 1 << 20, "row_bytes": ROW_BYTES, **options}
        )
        self.scheduler = make_scheduler(ring_bytes=100_000, prefixes=index)
        self.now = 0.0
        assert self.scheduler._reuse is not None
        self.scheduler._reuse._clock = lambda: self.now
        self.started: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}

    def add(self, request_id: str, text: str, **changes: Any) -> Any:
        """Add a request with one block per letter, and one more token."""
        number = BLOCK * len(text) + 1
        changes = {
            "num_tokens": number,
            "block_hashes": hashes(text),
            "num_prompt_tokens": number,
            **changes,
        }
        request = self.requests[request_id] = make_request(request_id, **changes)
        request.num_tokens = number
        self.scheduler.on_new_request(request)
        return request

    def tries(self, request_id: str, cached: int = 99) -> int | None:
        """Return the number of the `cached` blocks that the request reads, or None if it waits."""
        request = self.requests[request_id]
        allowed = request.hsx_reusable_rows(request, BLOCK)
        computed = min(cached * BLOCK, allowed, len(request.block_hashes) * BLOCK)
        if self.scheduler.must_wait(request, computed):
            return None
        request.num_computed_tokens = computed
        return computed // BLOCK

    def start(self, request_id: str, cached: int = 99) -> Any:
        assert self.tries(request_id, cached) is not None
        metadata = schedule(self.scheduler, self.requests[request_id])
        self.released = metadata.released
        (self.started[request_id],) = metadata.started
        return self.started[request_id]

    def publish(self, request_id: str, error: str | None = None, *, kept: bool = True) -> None:
        number = self.started[request_id].number
        self.scheduler.on_worker_report(
            WorkerReport({request_id: error}, {}, frozenset([number] if kept else []))
        )

    def serve(self, request_id: str, text: str) -> Any:
        """Add, start and publish a request."""
        self.add(request_id, text)
        start = self.start(request_id)
        self.publish(request_id)
        return start

    def rank(self, rank: int, **state: Any) -> None:
        self.scheduler.on_worker_report(WorkerReport({}, {rank: RankState(**state)}))


def test_request_reuses_whole_blocks_of_a_published_request() -> None:
    engine = Engine()
    first = engine.serve("first", "abc")
    assert (first.prefix, first.keeps_source) == (None, True)
    engine.add("second", "abxy")
    second = engine.start("second")
    assert second.prefix == Prefix(first.number, 2 * BLOCK)
    assert second.owner == first.owner
    assert engine.scheduler.on_finished(engine.requests["second"])["reused_tokens"] == 2 * BLOCK
    stats = engine.scheduler.take_stats()
    assert stats is not None
    assert stats.counter("reused_tokens") == 2 * BLOCK


def test_request_with_an_adapter_neither_reuses_nor_provides_rows() -> None:
    """Blocks cached before the adapter was reloaded have the same hashes."""
    engine = Engine()
    engine.serve("first", "abc")
    request = engine.add("second", "abc", lora_request="adapter")
    assert request.skip_reading_prefix_cache
    (start,) = schedule(engine.scheduler, request).started
    assert (start.prefix, start.keeps_source) == (None, False)


def test_a_request_is_owned_by_the_rank_that_has_the_file() -> None:
    engine = Engine()
    engine.add("busy", "xyz")
    engine.start("busy")
    first = engine.serve("first", "abc")
    engine.publish("busy", kept=False)
    engine.add("second", "abc")
    assert (first.owner, engine.scheduler._admission.least_loaded()) == (1, 0)
    assert engine.start("second").owner == 1


@pytest.mark.parametrize("cached", range(4))
def test_request_reuses_at_most_the_cached_tokens(cached: int) -> None:
    engine = Engine()
    first = engine.serve("first", "abc")
    engine.add("second", "abc")
    expected = Prefix(first.number, cached * BLOCK) if cached else None
    assert engine.start("second", cached).prefix == expected


def test_source_is_dropped_after_a_failed_request() -> None:
    engine = Engine()
    source = engine.serve("source", "ab")
    for request_id in ("failed", "failed too"):
        engine.add(request_id, "abc")
        assert engine.start(request_id).prefix == Prefix(source.number, 2 * BLOCK)
    for request_id in ("failed", "failed too"):
        engine.publish(request_id, "it could not be copied", kept=False)
    engine.add("last", "abc")
    assert engine.start("last").prefix is None
    assert engine.released == [source.number]


def test_rank_that_needs_space_releases_only_its_own_files() -> None:
    engine = Engine()
    first = engine.serve("first", "ab")
    engine.rank(first.owner, unresponsive=True, started=1)  # so another rank owns the next request
    other = engine.serve("other", "cd")
    engine.rank(first.owner, needs_space=True, started=1)
    engine.add("again", "ab")
    assert engine.start("again").prefix is None
    assert engine.released == [first.number]
    engine.add("the other again", "cd")
    assert engine.start("the other again").prefix == Prefix(other.number, 2 * BLOCK)


def test_cached_tokens_without_rows_are_computed() -> None:
    engine = Engine()
    engine.add("unpublished", "abc")
    engine.start("unpublished")
    engine.publish("unpublished", kept=False)  # the rank could not keep it open
    engine.add("failed", "abc")
    engine.start("failed")
    engine.publish("failed", "the disk is full", kept=False)
    engine.serve("shorter", "a")
    engine.add("last", "abc")
    assert engine.start("last").prefix == Prefix(engine.started["shorter"].number, BLOCK)


def test_used_sources_are_kept_and_the_least_recently_used_is_released() -> None:
    engine = Engine(max_files=2)
    engine.serve("one", "a")
    engine.serve("two", "b")
    engine.serve("three", "ac")
    engine.add("next", "b")
    assert engine.start("next").prefix is None
    assert engine.released == [engine.started["two"].number]


def test_rows_of_an_unresponsive_rank_are_computed_by_another_rank() -> None:
    engine = Engine()
    first = engine.serve("first", "abc")
    engine.rank(first.owner, unresponsive=True, started=1)
    engine.add("second", "abc")
    second = engine.start("second")
    assert (second.prefix, second.owner) == (None, 1 - first.owner)


def test_copied_rows_do_not_count_as_debt() -> None:
    engine = Engine()
    first = engine.serve("first", "abc")
    engine.rank(first.owner, started=1)
    engine.add("second", "abc")
    engine.start("second")
    assert engine.scheduler._loads[first.owner].coming == ROW_BYTES


def test_preempted_request_keeps_its_reused_rows() -> None:
    engine = Engine()
    engine.serve("first", "ab")
    engine.add("second", "abc")
    engine.start("second")
    engine.serve("longer", "abc")
    assert engine.tries("second") == 2
    engine.publish("second")
    assert (
        engine.requests["second"].hsx_reusable_rows(engine.requests["second"], BLOCK)
        == 3 * BLOCK + 1
    )  # the request needs no more rows


def test_no_earlier_row_is_reused_after_a_cache_reset() -> None:
    engine = Engine()
    engine.serve("before", "ab")
    engine.add("running", "abc")
    engine.start("running")
    engine.scheduler.reset_prefixes()
    assert engine.tries("running") == 0
    engine.publish("running")
    engine.add("after", "abc")
    after = engine.start("after")
    assert after.prefix is None
    assert sorted(engine.released) == [
        engine.started["before"].number,
        engine.started["running"].number,
    ]
    engine.publish("after")
    engine.add("again", "abc")
    assert engine.start("again").prefix == Prefix(after.number, 3 * BLOCK)


def test_possible_weight_change_disables_reuse_until_the_prefix_cache_is_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows and cached keys and values could belong to the earlier weights."""
    caplog.set_level("INFO")
    engine = Engine()
    engine.serve("before", "ab")
    engine.add("running", "abc")
    engine.start("running")
    for _ in range(2):
        engine.scheduler.weights_may_change()
    assert caplog.text.count("compute all rows until the prefix cache is reset") == 1
    assert engine.tries("running") == 0
    for name in ("after", "again"):
        engine.add(name, "abc")
        assert engine.start(name).prefix is None
        engine.publish(name)
    engine.scheduler.reset_prefixes()
    engine.add("not emptied", "abc")
    assert engine.start("not emptied").prefix is None
    engine.publish("not emptied")
    engine.scheduler.prefix_cache_is_empty()
    first = engine.serve("first", "abc")
    engine.add("second", "abc")
    assert engine.start("second").prefix == Prefix(first.number, 3 * BLOCK)


def test_rows_of_generated_tokens_are_reusable_once_published() -> None:
    engine = Engine()
    request = engine.add("first", "a", kv_transfer_params={"include_output_tokens": True})
    engine.start("first")
    engine.add("beside", "ab")
    assert engine.tries("beside") == 0
    # one token in the second block of the prompt, three generated, and the last without a row
    request.output_token_ids, request.block_hashes = [1, 2, 3, 4], hashes("ab")
    engine.scheduler.on_finished(request)
    engine.publish("first")
    engine.add("second", "abc")
    assert engine.start("second").prefix == Prefix(engine.started["first"].number, 2 * BLOCK)


RATES = {
    "prompt_rate": 10.0 * ROW_BYTES,
    "write_rate": 1000.0 * ROW_BYTES,
    "step_rate": 10.0,
}  # ten tokens per second


@pytest.mark.parametrize(
    ("left", "state", "waits"),
    [
        (0, {}, True),  # it is being published
        (0, {"paused": True, "unresponsive": True}, False),
        (1, {}, False),  # the duration is unknown
        (1, RATES, True),  # 0.1 s and two steps, against 1.2 s
        (9, RATES, True),
        (10, RATES, False),
        (1, {**RATES, "backlog": 1000 * ROW_BYTES}, False),  # the file takes another second
    ],
)
def test_request_waits_for_rows_that_will_be_published_sooner(
    left: int, state: dict[str, Any], waits: bool
) -> None:
    engine = Engine()
    twin = engine.add("twin", "abc")
    start = engine.start("twin")
    twin.num_computed_tokens = twin.num_prompt_tokens - left
    engine.rank(start.owner, started=1, **state)
    engine.add("second", "abcd")
    assert engine.tries("second") == (None if waits else 0)
    engine.publish("twin")
    assert engine.tries("second") == (0 if state.get("unresponsive") else 3)


def test_a_request_waits_no_longer_than_computing_would_have_taken() -> None:
    engine = Engine()
    twin = engine.add("twin", "abc")
    start = engine.start("twin")
    engine.rank(start.owner, started=1, **RATES)
    twin.num_computed_tokens = twin.num_prompt_tokens
    engine.add("second", "abcd")
    assert engine.tries("second") is None
    engine.now = 1.19
    assert engine.tries("second") is None
    engine.now = 1.21
    assert engine.tries("second") == 0


def test_failed_request_releases_requests_that_wait_for_its_rows() -> None:
    engine = Engine()
    twin = engine.add("twin", "abc")
    engine.start("twin")
    twin.num_computed_tokens = twin.num_prompt_tokens
    engine.add("second", "abc")
    assert engine.tries("second") is None
    engine.publish("twin", "the disk is full", kept=False)
    assert engine.tries("second") == 0
