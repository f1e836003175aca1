"""The options of a run: defaults, bounds and conflicts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.protocol.arguments import LONGEST_S
from vllm_ascend_hsx.protocol.files import describe, read_regular

# Bounds of whole numbers.
BOUNDS = {
    "concurrency": (1, 1000),  # connections of the openai client
    "max_retries": (0, 1000),
    "max_consecutive_errors": (1, 10**9),
    "limit": (1, 10**12),
    "allow_failures": (0, 10**12),
    "show": (0, 1000),
    "max_tokens": (1, 2**31 - 1),
    "seed": (0, 2**62),
    "bytes_per_token": (1, 2**40),
    "world_size": (1, 10**6),
    "rank": (0, 10**6 - 1),
}
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 10.0),
}
RAY_TASKS = (1, 4096)
ORDERS = ("prefix", "given")
# Consecutive rows that a rank does together, because turns of a conversation are neighbours.
RANK_ROWS = 16


@dataclass(frozen=True)
class PathMap:
    """A directory's path on the servers' machines and on this machine."""

    server: str
    local: Path


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster, and the placement of tasks.

    Attributes:
        address: address of the cluster, such as head:6379, or auto.
        label: key and value that nodes must have; None for any node.
        tasks: maximum number of tasks. Each task does the rows of a rank.
    """

    address: str
    label: tuple[str, str] | None = None
    tasks: int = 64

    def __post_init__(self) -> None:
        least, most = RAY_TASKS
        if not least <= self.tasks <= most:
            raise InputError(
                f"--ray-tasks {self.tasks}: give a whole number from {least} to {most}"
            )


@dataclass(frozen=True)
class Sampling:
    """Sampling of generated tokens: the API's fields of these names. None: the server's default.

    The default temperature 0 is greedy decoding, so that rows can be reproduced.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Options:
    """The options of a run, named as on the command line.

    Attributes:
        data: the dataset: a path, the id of a dataset on a hub, or - for standard input.
        split: split of a dataset with several splits.
        output: the servers' storage directory or a folder below it, for files and ledger.
        endpoints: base URLs of servers, without /v1.
        endpoint_file: file with the endpoints, read again during the run; None if they are fixed.
        column: column to send; None for the first known column.
        ignored_columns: columns to ignore.
        limit: number of rows from the first; None for all.
        skip_invalid: skip rows that cannot be sent.
        allow_failures: maximum number of missing rows, besides invalid rows, of a successful run.
        show: number of rows to show as tokens before the run; None: one for a new directory.
        dry_run: show sizes and send nothing.
        rate: tokens per second, for the time estimate of a dry run.
        bytes_per_token: bytes of hidden states per token, for a dry run; None: as in finished rows.
        chat_template_kwargs: arguments for all chats. A row's own arguments take precedence.
        add_special_tokens: False for texts that a chat template has rendered.
        model: the model's name on the servers; None to ask them.
        concurrency: requests in flight over all endpoints.
        validate: read every file, including existing files, to check numbers and checksum.
        request_timeout: seconds to wait for an answer, and again for the file.
        max_retries: maximum number of retries per row.
        retry_delay: seconds before the first retry; doubled for each further retry.
        max_consecutive_errors: number of errors without a finished row in between that ends the
            run. Refused rows do not count.
        world_size, rank: of every world_size groups of RANK_ROWS rows, this run does group `rank`.
        rank_source: variables of a launcher that set the two; "" if there are none.
        waits_for_lock: wait for another run of the same rank.
        ray: cluster that does the rows; None to do them in this process.
        order: "prefix" to send rows with a common prefix one after another, "given" as in the data.
        include_output: also store rows and text of generated tokens.
        max_tokens: number of tokens to generate; only with include_output.
        sampling: sampling of generated tokens.
        seed: seed of sampling. Each row's seed is computed from it and the row's content.
        path_maps: the longest path that contains `output` is used.
        api_key: key for the servers.

    Raises:
        InputError: a value is invalid; the message names option, value and remedy.
    """

    data: str
    output: Path
    endpoints: Sequence[str] = ("http://localhost:8000",)
    endpoint_file: Path | None = None
    split: str | None = None
    column: str | None = None
    ignored_columns: frozenset[str] = frozenset()
    limit: int | None = None
    skip_invalid: bool = False
    allow_failures: int = 0
    show: int | None = None
    dry_run: bool = False
    rate: float | None = None
    bytes_per_token: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    model: str | None = None
    concurrency: int = 32
    validate: bool = False
    request_timeout: float = 120.0
    max_retries: int = 3
    retry_delay: float = 1.0
    max_consecutive_errors: int | None = None
    world_size: int = 1
    rank: int = 0
    rank_source: str = ""
    waits_for_lock: bool = False
    ray: RayCluster | None = None
    order: str = "prefix"
    include_output: bool = False
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    seed: int | None = None
    path_maps: Sequence[PathMap] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise InputError(
                    f"{_flag(name)} {value}: give a whole number from {least} to {most}"
                )
        for name in ("request_timeout", "retry_delay"):
            if isinstance(getattr(self, name), bool) or not 0 < getattr(self, name) <= LONGEST_S:
                raise InputError(
                    f"{_flag(name)} {getattr(self, name)}: give a number of seconds above 0 and "
                    f"at most {LONGEST_S}"
                )
        if not 0 <= self.rank < self.world_size:
            raise InputError(
                f"--rank {self.rank}: give a number from 0 to {self.world_size - 1}, for "
                f"--world-size is {self.world_size}"
            )
        if self.order not in ORDERS:
            raise InputError(f"--order {self.order}: give one of {', '.join(ORDERS)}")
        if self.ray is not None and self.data == "-":
            raise InputError(
                "--ray with --data -: the nodes of a cluster read the dataset themselves; write "
                "it to a file that all nodes can read"
            )
        check_endpoints(self.endpoints)
        if self.include_output and self.max_tokens is None:
            raise InputError(
                "--include-output: give --max-tokens, the number of tokens to generate for a row"
            )
        for name in () if self.include_output else ("max_tokens", "seed", "sampling"):
            if getattr(self, name) != getattr(Options, name):
                flag = (
                    "--temperature and other sampling options"
                    if name == "sampling"
                    else _flag(name)
                )
                raise InputError(
                    f"{flag}: the prompt's rows do not depend on it; add --include-output or "
                    "leave it out"
                )
        try:
            os.fspath(self.output).encode()
        except UnicodeEncodeError:
            problem = "the name is not UTF-8, so a request cannot contain it"
            raise InputError(f"--output {self.output}: {problem}; give another directory") from None
        # The key is a secret, so the message does not show it.
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise InputError(
                "--api-key (or OPENAI_API_KEY): not allowed in an HTTP header; give ASCII "
                "characters without spaces"
            )

    @property
    def request(self) -> dict[str, Any]:
        """Fields of all requests. They are part of a row's identity."""
        fields = {"max_tokens": self.max_tokens or 1, **asdict(self.sampling), "seed": self.seed}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def errors_to_stop(self) -> int:
        return self.max_consecutive_errors or self.concurrency

    def is_ours(self, row: int) -> bool:
        """Return True if the row belongs to this rank."""
        return row // RANK_ROWS % self.world_size == self.rank

    def count_ours(self, rows: int) -> int:
        """Return the number of rows of this rank among the first `rows`."""
        return rows_of_rank(rows, self.world_size, self.rank)

    def is_wanted(self, row: int) -> bool:
        """Return True if this run does the row, and `limit` includes it."""
        return self.is_ours(row) and (self.limit is None or row < self.limit)

    def server_path(self, path: Path) -> str:
        """Return the path of a directory on the servers' machines."""
        here = os.path.abspath(path)
        maps = [each for each in self.path_maps if Path(here).is_relative_to(each.local)]
        best = max(maps, key=lambda each: len(each.local.parts), default=None)
        if best is None:
            return here
        return os.path.normpath(os.path.join(best.server, os.path.relpath(here, best.local)))


def rows_of_rank(rows: int, world_size: int, rank: int) -> int:
    """Return the number of rows of a rank among the first `rows`."""
    rounds, rest = divmod(rows, RANK_ROWS * world_size)
    return rounds * RANK_ROWS + min(max(rest - rank * RANK_ROWS, 0), RANK_ROWS)


def check_endpoints(urls: Sequence[str]) -> None:
    """Raise InputError unless these are the URLs of different servers."""
    if not urls:
        raise InputError(
            "--endpoint: give the URL of at least one server, such as http://localhost:8000"
        )
    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.split("://", 1)[1]:
            raise InputError(
                f"--endpoint {url}: give the URL of a server, such as http://localhost:8000"
            )
    if len(set(urls)) != len(urls):
        raise InputError("--endpoint: a URL is given twice; give each once")


def read_endpoints(path: Path) -> tuple[str, ...]:
    """Read the URLs of servers, one per line. A # starts a comment.

    Raises:
        InputError: the file cannot be read, has no URL, or has an invalid line.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            describe("cannot be read", error) if isinstance(error, OSError) else "not UTF-8 text"
        )
        raise InputError(
            f"--endpoint @{path}: {reason}; give a file with the URL of a server in each line"
        ) from error
    urls = tuple(base_url(text) for line in lines if (text := line.partition("#")[0].strip()))
    if not urls:
        raise InputError(
            f"--endpoint @{path}: the file lists no server; write one URL in each line"
        )
    try:
        check_endpoints(urls)
    except InputError as error:
        raise InputError(
            f"--endpoint @{path}: {str(error).removeprefix('--endpoint').lstrip(': ')}"
        ) from error
    return urls


def base_url(text: str) -> str:
    """Return an endpoint's URL without /v1, which OpenAI clients need."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def path_map(text: str) -> PathMap:
    """Parse SERVER=LOCAL. Raises InputError."""
    server, equals, local = text.partition("=")
    if not equals or not server.startswith("/") or not local:
        raise InputError(
            f"--map-path {text}: give SERVER=LOCAL, two directories, such as "
            "/data/hidden_states=/mnt/hidden_states"
        )
    return PathMap(server, Path(os.path.abspath(local)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
