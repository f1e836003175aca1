"""The options of a run: defaults, bounds, and which ones exclude each other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.protocol.arguments import LONGEST_S

# Bounds of whole numbers.
BOUNDS = {
    "concurrency": (1, 4096),
    "max_retries": (0, 1000),
    "max_consecutive_errors": (1, 10**9),
    "limit": (1, 10**12),
    "max_tokens": (1, 2**31 - 1),
    "world_size": (1, 10**6),
    "rank": (0, 10**6 - 1),
}
ORDERS = ("prefix", "given")
# Consecutive rows that one rank does, because turns of a conversation follow each other.
RANK_ROWS = 16


@dataclass(frozen=True)
class PathMap:
    """A directory's path on the servers' machines, and here."""

    server: str
    local: Path


@dataclass(frozen=True)
class Options:
    """The options of a run, named as on the command line.

    Attributes:
        data: the dataset.
        output: the servers' storage directory, or a folder below it, for the files and the ledger.
        endpoints: base URLs of servers, without /v1.
        column: of the dataset; None for the first known one.
        limit: number of rows, from the first; None for all.
        model: its name on the servers; None to ask them.
        concurrency: concurrent requests, over all endpoints.
        validate: read each file once, existing ones too, to check numbers and checksum.
        request_timeout: seconds for an answer, and again for its file.
        max_retries: most repeated requests for a row.
        retry_delay: seconds before the first retry; doubled for each further one.
        max_consecutive_errors: errors without a finished row in between that end the run; refusals
            of rows do not count.
        world_size, rank: this run does each world_size-th run of RANK_ROWS rows, from the rank-th.
        order: "prefix" to send rows with a common prefix one after the other, "given" as they are.
        include_output_tokens: store rows of generated tokens too.
        max_tokens: tokens to generate; only with include_output_tokens.
        path_maps: the longest one that contains `output` is used.
        api_key: sent to the servers.

    Raises:
        InputError: a value is invalid; the message names option, value and remedy.
    """

    data: Path
    output: Path
    endpoints: Sequence[str] = ("http://localhost:8000",)
    column: str | None = None
    limit: int | None = None
    model: str | None = None
    concurrency: int = 32
    validate: bool = False
    request_timeout: float = 120.0
    max_retries: int = 3
    retry_delay: float = 1.0
    max_consecutive_errors: int | None = None
    world_size: int = 1
    rank: int = 0
    order: str = "prefix"
    include_output_tokens: bool = False
    max_tokens: int | None = None
    path_maps: Sequence[PathMap] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise InputError(f"{_flag(name)} {value}: give a whole number from {least} to {most}")
        for name in ("request_timeout", "retry_delay"):
            if isinstance(getattr(self, name), bool) or not 0 < getattr(self, name) <= LONGEST_S:
                raise InputError(f"{_flag(name)} {getattr(self, name)}: give a number of seconds above 0 and at most {LONGEST_S}")
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"--rank {self.rank}: give a number from 0 to {self.world_size - 1}, for --world-size is {self.world_size}")
        if self.order not in ORDERS:
            raise InputError(f"--order {self.order}: give one of {', '.join(ORDERS)}")
        if not self.endpoints:
            raise InputError("--endpoint: give the URL of at least one server, such as http://localhost:8000")
        for url in self.endpoints:
            if not url.startswith(("http://", "https://")) or not url.split("://", 1)[1]:
                raise InputError(f"--endpoint {url}: give the URL of a server, such as http://localhost:8000")
        if len(set(self.endpoints)) != len(self.endpoints):
            raise InputError("--endpoint: one is named twice; name each once")
        if self.include_output_tokens and self.max_tokens is None:
            raise InputError("--include-output-tokens: say with --max-tokens how many tokens are to be generated for a row")
        if not self.include_output_tokens and self.max_tokens is not None:
            raise InputError("--max-tokens: the prompt's rows do not depend on it; add --include-output-tokens or leave it out")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):  # a secret: not printed
            raise InputError("--api-key (or OPENAI_API_KEY): it has characters that no header can have; give ASCII without blanks")

    @property
    def tokens_to_generate(self) -> int:
        return self.max_tokens or 1

    @property
    def errors_to_stop(self) -> int:
        return self.max_consecutive_errors or self.concurrency

    def is_ours(self, row: int) -> bool:
        """Return True if the row is one of this rank's."""
        return row // RANK_ROWS % self.world_size == self.rank

    def count_ours(self, rows: int) -> int:
        """Return how many of the first `rows` rows are this rank's."""
        rounds, rest = divmod(rows, RANK_ROWS * self.world_size)
        return rounds * RANK_ROWS + min(max(rest - self.rank * RANK_ROWS, 0), RANK_ROWS)

    def is_wanted(self, row: int) -> bool:
        """Return True if this run does the row, and `limit` includes it."""
        return self.is_ours(row) and (self.limit is None or row < self.limit)

    def server_path(self, path: Path) -> str:
        """Return the name of a directory on the servers' machines."""
        here = os.path.abspath(path)
        maps = [each for each in self.path_maps if Path(here).is_relative_to(each.local)]
        best = max(maps, key=lambda each: len(each.local.parts), default=None)
        if best is None:
            return here
        return os.path.normpath(os.path.join(best.server, os.path.relpath(here, best.local)))


def base_url(text: str) -> str:
    """Return an endpoint's URL without the /v1 of OpenAI clients."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def path_map(text: str) -> PathMap:
    """Parse SERVER=LOCAL. Raises InputError."""
    server, equals, local = text.partition("=")
    if not equals or not server.startswith("/") or not local:
        raise InputError(f"--map-path {text}: give SERVER=LOCAL, two directories, such as /data/hidden_states=/mnt/hidden_states")
    return PathMap(server, Path(os.path.abspath(local)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
