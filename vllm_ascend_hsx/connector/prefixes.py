"""Scheduler side: requests copy the first rows that another one has, and read the prefix cache."""

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

_UNKNOWN_S = 0.1  # how long a request waits for rows that are computed while rates are unknown
_UNTIL_RESET = "extracted requests compute all of their rows until the prefix cache is reset"
BlockHash = Hashable  # vllm.v1.core.kv_cache_utils.BlockHash: of a block and all tokens before it


@dataclass(eq=False)
class Source:
    """A request whose rows other requests may begin with.

    Attributes:
        number: as in RequestStart.
        rank: the rank that owns it.
        hashes: of its whole blocks that have rows.
        num_tokens: number of its rows.
        request: vllm.v1.request.Request, while its prompt is computed.
    """

    number: int
    rank: int
    hashes: Sequence[BlockHash]
    num_tokens: int
    request: Any = None


class PrefixIndex:
    """The published requests of this engine that are kept open, and those that are being computed.

    A block's hash names all tokens up to its end, and the adapter, images and salt that they were
    computed with (v1/core/kv_cache_utils.py:537 in vLLM 0.23.0). Of several requests with the same
    tokens the latest counts. The least recently used one is released first. That loses no prefix
    that a request used after it: this request has the same prefix, and has become its source.

    Args:
        max_files: most files that are kept open.
        max_bytes: most bytes of their rows.
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
        """Return the published request that has most of the prefix, and how many blocks it has.

        Args:
            hashes: of the whole blocks of the prefix.
        """
        return _longest(self._published, hashes)

    def find_computing(self, hashes: Sequence[BlockHash]) -> tuple[Source, int] | None:
        """Return the same of the requests that are being computed."""
        return _longest(self._computing, hashes)

    def use(self, source: Source) -> None:
        """Record that a request begins with rows of a published one."""
        self._kept.move_to_end(source.number)

    def begin(self, source: Source) -> None:
        """Add a request that is being computed."""
        self._computing.update(dict.fromkeys(source.hashes, source))

    def end(self, source: Source) -> None:
        """Remove a request that is no longer being computed."""
        _remove(self._computing, source)

    def publish(self, source: Source) -> None:
        """Add a request whose file is kept open. Release others, or this one if it is too large."""
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
        """Release a file that was kept open but is not to be used."""
        self._released.append(number)

    def drop(self, source: Source) -> None:
        """Release a file from which no other request is to copy."""
        if source.number in self._kept:
            self._release(source)

    def drop_files_of(self, rank: int) -> None:
        """Release all files of a rank."""
        for source in [each for each in self._kept.values() if each.rank == rank]:
            self._release(source)

    def clear(self) -> None:
        """Release all files, and forget what is being computed."""
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


def _longest(entries: dict[BlockHash, Source], hashes: Sequence[BlockHash]) -> tuple[Source, int] | None:
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
    """What one request reuses, and what others may reuse of it.

    Attributes:
        number: as in RequestStart.
        tokens: number of first tokens whose rows it has from another request. Set when it starts.
        source: the request that has rows of its first tokens. Until it starts, this may change.
        waits: whether it waits for rows that another request is computing.
    """

    number: int
    tokens: int = 0
    source: Source | None = None
    waits: bool = False
    _hashes: Sequence[BlockHash] = ()
    _num_blocks: int = 0  # that `source` has
    _generation: int = -1  # of the prefix cache
    _waits_until: float | None = None
    _request: Any = None  # vllm.v1.request.Request, until it starts
    _computing: Source | None = None


class PrefixReuse:
    """Decide which rows a request has from another one, and which it computes.

    A request may read the prefix cache as far as the rows of the cached tokens are reusable: in the
    file of a published request that its owner rank keeps open. If another request is computing
    them, it waits if they are published sooner than it could compute them. Requests with an adapter
    (LoRA) compute all rows: vLLM 0.23.0 hashes a block with the adapter's name alone
    (v1/core/kv_cache_utils.py:484), so the cache may have blocks of its earlier weights.

    Args:
        index: the requests that have rows.
        loads: the ranks, by rank.
        row_bytes: bytes of one token's rows in memory.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, index: PrefixIndex, loads: Sequence[RankLoad], row_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = index
        self._loads = loads
        self._row_bytes = row_bytes
        self._clock = clock
        self._numbers = itertools.count()
        self._generation = 0
        self._is_stale = False  # the prefix cache has values that other weights may have computed
        self._block_size = 0  # tokens of a hashed block; 0 until vLLM has looked into its prefix cache

    def new(self) -> Reuse:
        """Return the state of a request that has arrived."""
        return Reuse(next(self._numbers))

    def offer(self, reuse: Reuse, request: Any, num_tokens: int, block_size: int) -> int:
        """Return how many first tokens of a request that has not started have reusable rows.

        Args:
            reuse: of the request.
            request: vllm.v1.request.Request.
            num_tokens: number of its prompt tokens.
            block_size: tokens of a hashed block.
        """
        self._block_size = block_size
        reuse._request = request
        hashes = reuse._hashes = [] if self._is_stale else request.block_hashes[: num_tokens // block_size]
        found = self._index.find(hashes)
        if found is not None and not self._answers(found[0].rank):
            found = None
        reuse.source, reuse._num_blocks = found or (None, 0)
        reuse.waits = self._is_sooner_at_hand(reuse, hashes)
        return reuse._num_blocks * block_size

    def start(self, reuse: Reuse, owner: int, num_computed: int, include_output: bool) -> Prefix | None:
        """Record that a request starts, and return the rows that it has from another one.

        Args:
            reuse: as in `offer`, which was called in the same step.
            owner: the rank that owns it; that of its source if it has one.
            num_computed: number of tokens that it has read from the prefix cache.
            include_output: whether rows of generated tokens are extracted too; these are published
                with those of the prompt.
        """
        reuse._generation = self._generation
        request, reuse._request = reuse._request, None
        if not include_output and reuse._hashes:
            reuse._computing = Source(reuse.number, owner, reuse._hashes, request.num_prompt_tokens, request)
            self._index.begin(reuse._computing)
        source = reuse.source
        if source is None or not num_computed or num_computed > reuse._num_blocks * self._block_size:
            return None
        reuse.tokens = num_computed
        self._index.use(source)
        return Prefix(source.number, num_computed)

    def resume(self, reuse: Reuse) -> int:
        """Return how many first tokens of a preempted request have reusable rows.

        These are the ones that it started with. After a reset the prefix cache may have values of
        other weights, so then there are none.
        """
        return reuse.tokens if reuse._generation == self._generation else 0

    def keeps_source(self, reuse: Reuse, include_output: bool) -> bool:
        """Return whether the file of a request that starts is to be kept open for others."""
        return bool(self._block_size and (reuse._hashes or include_output))

    def end(self, reuse: Reuse, request: Any, num_rows: int) -> None:
        """Record that a request has ended that has rows of generated tokens, `num_rows` in all."""
        if self._block_size:
            reuse._hashes = request.block_hashes[: num_rows // self._block_size]

    def decide(self, reuse: Reuse, owner: int, num_rows: int, has_open_source: bool) -> None:
        """Record that a request is published or has failed.

        Args:
            reuse: of the request.
            owner: the rank that owns it.
            num_rows: number of its rows.
            has_open_source: whether its file is kept open.
        """
        if reuse._computing is not None:
            self._index.end(reuse._computing)
            reuse._computing = None
        if has_open_source and reuse._generation == self._generation:
            self._index.publish(Source(reuse.number, owner, reuse._hashes, num_rows))
        elif has_open_source:
            self._index.refuse(reuse.number)

    def fail(self, reuse: Reuse) -> None:
        """Record that a request has failed, perhaps because its source was truncated."""
        if reuse.tokens and reuse.source is not None:
            self._index.drop(reuse.source)

    def release_files_of(self, rank: int) -> None:
        """Keep no file of a rank open any longer, because they may hold space that it needs."""
        self._index.drop_files_of(rank)

    def reset(self) -> None:
        """Forget all rows, because weights may have changed."""
        self._generation += 1
        self._index.clear()

    def weights_may_change(self) -> None:
        """Forget all rows, and reuse none before the prefix cache is empty. Log that once."""
        self.reset()
        if not self._is_stale:
            logger.info("a client has called the workers, which may change weights: %s", _UNTIL_RESET)
        self._is_stale = True

    def prefix_cache_is_empty(self) -> None:
        """Reuse rows again: all values of the prefix cache will be of the present weights."""
        self._is_stale = False

    def take_released(self) -> list[int]:
        """Return the numbers of the files that need no longer be kept open, since the last call."""
        return self._index.take_released()

    def _answers(self, rank: int) -> bool:
        state = self._loads[rank].state
        return not state.unresponsive and not state.paused

    def _is_sooner_at_hand(self, reuse: Reuse, hashes: Sequence[BlockHash]) -> bool:
        """Return whether another request publishes more rows before this one could compute them."""
        twin = self._index.find_computing(hashes)
        if twin is None or twin[1] <= reuse._num_blocks or not self._answers(twin[0].rank):
            return False
        state, (source, num_blocks) = self._loads[twin[0].rank].state, twin
        tokens_per_s = (state.prompt_rate or 0.0) / self._row_bytes
        left = max(0, source.num_tokens - source.request.num_computed_tokens)
        compute = (num_blocks - reuse._num_blocks) * self._block_size / tokens_per_s if tokens_per_s else _UNKNOWN_S
        wait = state.backlog / state.write_rate if state.write_rate else 0.0
        if left and tokens_per_s and state.step_rate:
            wait += left / tokens_per_s + 2 / state.step_rate  # the next step reports that it is published
        elif left:
            return False
        now = self._clock()
        if reuse._waits_until is None:
            reuse._waits_until = now + compute
        return wait < compute and now < reuse._waits_until
