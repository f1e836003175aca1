"""Scheduler side: let requests read the prefix cache and copy the rows of cached tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.connector.admission import RankLoad
from vllm_ascend_hsx.connector.metadata import Prefix

logger = logging.getLogger(__name__)

_UNKNOWN_S = 0.1  # longest wait for rows under computation while rates are unknown

BlockHash = Hashable  # vllm.v1.core.kv_cache_utils.BlockHash: a block and all tokens before it


@dataclass(eq=False)
class Source:
    """A request from which other requests may copy their first rows.

    Attributes:
        number: as in RequestStart.
        rank: owner of the request.
        hashes: hashes of the whole blocks that have rows.
        num_tokens: number of rows.
        request: vllm.v1.request.Request while the prompt is computed.
    """

    number: int
    rank: int
    hashes: Sequence[BlockHash]
    num_tokens: int
    request: Any = None


class PrefixIndex:
    """Index of this engine's requests with open files, and of requests under computation.

    A block's hash identifies all tokens up to the end of the block, and their adapter, images and
    salt (v1/core/kv_cache_utils.py:537 in vLLM 0.23.0). If several requests have the same tokens,
    the latest is used. The least recently used request is released first. This loses no prefix in
    use: a later request with the same prefix has become the source of that prefix.

    Args:
        max_files: most files that are kept open.
        max_bytes: most bytes of rows in these files.
        row_bytes: stored bytes of one token's rows.
    """

    def __init__(self, max_files: int, max_bytes: int, row_bytes: int) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        self._published: dict[BlockHash, Source] = {}
        self._computing: dict[BlockHash, Source] = {}
        self._kept: OrderedDict[int, Source] = OrderedDict()  # by number, least recently used first
        self._bytes = 0
        self._released: list[int] = []

    def find(self, hashes: Sequence[BlockHash]) -> tuple[Source, int] | None:
        """Return the published request with the longest part of a prefix, and the blocks in common.

        Args:
            hashes: hashes of the whole blocks of the prefix.
        """
        return _longest(self._published, hashes)

    def find_computing(self, hashes: Sequence[BlockHash]) -> tuple[Source, int] | None:
        """Search the requests under computation as `find` searches published requests."""
        return _longest(self._computing, hashes)

    def use(self, source: Source) -> None:
        """Record that a request copies rows of a published request."""
        self._kept.move_to_end(source.number)

    def begin(self, source: Source) -> None:
        """Add a request under computation."""
        self._computing.update(dict.fromkeys(source.hashes, source))

    def end(self, source: Source) -> None:
        """Remove a request that is no longer under computation."""
        _remove(self._computing, source)

    def publish(self, source: Source) -> None:
        """Add a request with an open file. Release older files, or this file if it is too large."""
        num_bytes = source.num_tokens * self._row_bytes
        if not source.hashes or num_bytes > self._max_bytes:
            self.refuse(source.number)
            return
        self._published.update(dict.fromkeys(source.hashes, source))
        self._kept[source.number] = source
        self._bytes += num_bytes
        while len(self._kept) > self._max_files or self._bytes > self._max_bytes:
            self._release(next(iter(self._kept.values())))

    def refuse(self, number: int) -> None:
        """Release an open file that no request may use."""
        self._released.append(number)

    def drop(self, source: Source) -> None:
        """Release a published file if it is still kept open."""
        if source.number in self._kept:
            self._release(source)

    def drop_files_of(self, rank: int) -> None:
        """Release all files of a rank."""
        for source in [each for each in self._kept.values() if each.rank == rank]:
            self._release(source)

    def clear(self) -> None:
        """Release all files, and forget all requests under computation."""
        self._computing.clear()
        for source in list(self._kept.values()):
            self._release(source)

    def take_released(self) -> list[int]:
        """Return the numbers of the files that were released since the last call."""
        released, self._released = self._released, []
        return released

    def _release(self, source: Source) -> None:
        _remove(self._published, source)
        del self._kept[source.number]
        self._bytes -= source.num_tokens * self._row_bytes
        self._released.append(source.number)


def _longest(
    entries: dict[BlockHash, Source], hashes: Sequence[BlockHash]
) -> tuple[Source, int] | None:
    for count in range(len(hashes), 0, -1):
        source = entries.get(hashes[count - 1])
        if source is not None:
            return source, count
    return None


def _remove(entries: dict[BlockHash, Source], source: Source) -> None:
    for each in source.hashes:
        if entries.get(each) is source:
            del entries[each]


@dataclass
class Reuse:
    """State of prefix reuse for one request.

    Attributes:
        number: as in RequestStart.
        tokens: number of first tokens with copied rows. Set when the request starts.
        source: another request with rows of the first tokens. May change until the start.
        waits: whether the request waits for rows that another request is computing.
    """

    number: int
    tokens: int = 0
    source: Source | None = None
    waits: bool = False
    _hashes: Sequence[BlockHash] = ()
    _num_blocks: int = 0  # blocks of `source` in common
    _generation: int = -1  # of the prefix cache
    _waits_until: float | None = None
    _request: Any = None  # vllm.v1.request.Request, until the start
    _computing: Source | None = None


class PrefixReuse:
    """Decide which rows a request copies from another request, and which rows it computes.

    A request may read the prefix cache as far as the rows of the cached tokens are reusable. Rows
    are reusable if the owner rank keeps the file of a published request open. If another request is
    computing the rows, a request waits for them if this is faster than computing them again.
    Requests with an adapter (LoRA) compute all rows. vLLM 0.23.0 hashes a block with only the name
    of the adapter (v1/core/kv_cache_utils.py:484), so the cache may have blocks of earlier weights.

    Args:
        index: index of the requests that have rows.
        loads: load of each rank.
        row_bytes: bytes of one token's rows in memory.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        index: PrefixIndex,
        loads: Sequence[RankLoad],
        row_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._loads = loads
        self._row_bytes = row_bytes
        self._clock = clock
        self._numbers = itertools.count()
        self._generation = 0
        self._is_stale = False  # the prefix cache may have values of other weights
        self._block_size = 0  # tokens of a hashed block; 0 before the first prefix cache lookup

    def new(self) -> Reuse:
        """Return the state of a new request."""
        return Reuse(next(self._numbers))

    def offer(self, reuse: Reuse, request: Any, num_tokens: int, block_size: int) -> int:
        """Return the number of first tokens with reusable rows for a request that has not started.

        Args:
            reuse: state of the request.
            request: vllm.v1.request.Request.
            num_tokens: number of prompt tokens.
            block_size: tokens of a hashed block.
        """
        self._block_size = block_size
        reuse._request = request
        hashes = reuse._hashes = (
            [] if self._is_stale else request.block_hashes[: num_tokens // block_size]
        )
        found = self._index.find(hashes)
        if found is not None and not self._answers(found[0].rank):
            found = None
        reuse.source, reuse._num_blocks = found or (None, 0)
        reuse.waits = self._should_wait(reuse, hashes)
        return reuse._num_blocks * block_size

    def start(
        self, reuse: Reuse, owner: int, num_computed: int, include_output: bool
    ) -> Prefix | None:
        """Record that a request starts. Return the rows to copy from another request.

        Args:
            reuse: state of the request. `offer` was called in the same step.
            owner: owner of the request: the rank of the source if there is a source.
            num_computed: number of tokens that the request has read from the prefix cache.
            include_output: whether rows of generated tokens are extracted too. If so, prompt rows
                are not published before the request ends.
        """
        reuse._generation = self._generation
        request, reuse._request = reuse._request, None
        if not include_output and reuse._hashes:
            reuse._computing = Source(
                reuse.number, owner, reuse._hashes, request.num_prompt_tokens, request
            )
            self._index.begin(reuse._computing)
        source = reuse.source
        if (
            source is None
            or not num_computed
            or num_computed > reuse._num_blocks * self._block_size
        ):
            return None
        reuse.tokens = num_computed
        self._index.use(source)
        return Prefix(source.number, num_computed)

    def resume(self, reuse: Reuse) -> int:
        """Return the number of first tokens with reusable rows for a preempted request.

        This is the number at the start. After a reset it is 0, because the prefix cache may have
        values of other weights.
        """
        return reuse.tokens if reuse._generation == self._generation else 0

    def keeps_source(self, reuse: Reuse, include_output: bool) -> bool:
        """Return whether to keep the file of a request that starts open for other requests."""
        return bool(self._block_size and (reuse._hashes or include_output))

    def end(self, reuse: Reuse, request: Any, num_rows: int) -> None:
        """Record the end of a request with rows of generated tokens and `num_rows` rows in all."""
        if self._block_size:
            reuse._hashes = request.block_hashes[: num_rows // self._block_size]

    def decide(self, reuse: Reuse, owner: int, num_rows: int, has_open_source: bool) -> None:
        """Record that a request is published or has failed.

        Args:
            reuse: state of the request.
            owner: owner of the request.
            num_rows: number of rows.
            has_open_source: whether the file is kept open.
        """
        if reuse._computing is not None:
            self._index.end(reuse._computing)
            reuse._computing = None
        if has_open_source and reuse._generation == self._generation:
            self._index.publish(Source(reuse.number, owner, reuse._hashes, num_rows))
        elif has_open_source:
            self._index.refuse(reuse.number)

    def fail(self, reuse: Reuse) -> None:
        """Record that a request has failed. Drop the source, because it may be truncated."""
        if reuse.tokens and reuse.source is not None:
            self._index.drop(reuse.source)

    def release_files_of(self, rank: int) -> None:
        """Release all files of a rank, because they may hold space that the rank needs."""
        self._index.drop_files_of(rank)

    def reset(self) -> None:
        """Forget all rows, because weights may have changed."""
        self._generation += 1
        self._index.clear()

    def weights_may_change(self) -> None:
        """Forget all rows, and reuse none before the prefix cache is empty. Log this once."""
        self.reset()
        if not self._is_stale:
            logger.info(
                "a client has called the workers, and the call may have changed weights: extracted "
                "requests compute all rows until the prefix cache is reset"
            )
        self._is_stale = True

    def prefix_cache_is_empty(self) -> None:
        """Reuse rows again: the prefix cache will only have values of the current weights."""
        self._is_stale = False

    def take_released(self) -> list[int]:
        """Return the numbers of the files that were released since the last call."""
        return self._index.take_released()

    def _answers(self, rank: int) -> bool:
        state = self._loads[rank].state
        return not state.unresponsive and not state.paused

    def _should_wait(self, reuse: Reuse, hashes: Sequence[BlockHash]) -> bool:
        """Return True if another request publishes rows sooner than this request computes them."""
        twin = self._index.find_computing(hashes)
        if twin is None or twin[1] <= reuse._num_blocks or not self._answers(twin[0].rank):
            return False
        state, (source, num_blocks) = self._loads[twin[0].rank].state, twin
        tokens_per_s = (state.prompt_rate or 0.0) / self._row_bytes
        left = max(0, source.num_tokens - source.request.num_computed_tokens)
        compute = (
            (num_blocks - reuse._num_blocks) * self._block_size / tokens_per_s
            if tokens_per_s
            else _UNKNOWN_S
        )
        wait = state.backlog / state.write_rate if state.write_rate else 0.0
        if left and tokens_per_s and state.step_rate:
            # Two steps, because the step after the last row reports the publication.
            wait += left / tokens_per_s + 2 / state.step_rate
        elif left:
            return False
        now = self._clock()
        if reuse._waits_until is None:
            reuse._waits_until = now + compute
        return wait < compute and now < reuse._waits_until
