"""The options of a run: defaults, bounds, and which ones exclude each other."""

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
# Consecutive rows that one rank does, because turns of a conversation follow each other.
RANK_ROWS = 16


@dataclass(frozen=True)
class PathMap:
    """A directory's path on the servers' machines, and here."""

    server: str
    local: Path


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster, and how rows are given to its nodes.

    Attributes:
        address: of the cluster, such as head:6379, or auto.
        label: key and value that nodes must have; None for any node.
        tasks: most tasks, each of which does a rank's rows.
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
    """How answers are generated: the API's fields of these names. None: the server's default.

    The default is greedy decoding, so that rows can be reproduced.
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
        data: the dataset: a path, the id of a dataset on a hub, or - for the standard input.
        split: of a dataset that has several.
        output: the servers' storage directory, or a folder below it, for the files and the ledger.
        endpoints: base URLs of servers, without /v1.
        endpoint_file: lists them, and is read again during the run; None if they do not change.
        column: of the dataset; None for the first known one.
        ignored_columns: columns that the run would refuse, and leaves out.
        limit: number of rows, from the first; None for all.
        skip_invalid: leave out rows that cannot be sent.
        allow_failures: most rows without a file, invalid ones apart, for which the run succeeds.
        show: number of rows to show as tokens before the run; None: one, of a new output directory.
        dry_run: show sizes, and send nothing.
        rate: tokens per second, for the hours of a dry run.
        bytes_per_token: hidden states of a token, for a dry run; None: those of finished rows.
        chat_template_kwargs: of every chat; those of a row come first.
        add_special_tokens: False for texts that a chat template has rendered.
        model: its name on the servers; None to ask them.
        concurrency: concurrent requests, over all endpoints.
        validate: read each file once, existing ones too, to check numbers and checksum.
        request_timeout: seconds for an answer, and again for its file.
        max_retries: most repeated requests for a row.
        retry_delay: seconds before the first retry; doubled for each further one.
        max_consecutive_errors: errors without a finished row in between that end the run; refusals
            of rows do not count.
        world_size, rank: this run does each world_size-th run of RANK_ROWS rows, from the rank-th.
        rank_source: variables of a launcher that the two are from; "" if there are none.
        waits_for_lock: wait for another run of the same rank.
        ray: the cluster that does them; None to do them in this process.
        order: "prefix" to send rows with a common prefix one after the other, "given" as they are.
        include_output: store rows and text of generated tokens too.
        max_tokens: tokens to generate; only with include_output.
        sampling: of generated tokens.
        seed: of sampling; each row has a seed of its own, made of this one and the row's content.
        path_maps: the longest one that contains `output` is used.
        api_key: sent to the servers.

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
                "it to a file that they see"
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
            problem = "its name is not UTF-8, so no request can have it"
            raise InputError(f"--output {self.output}: {problem}; name another directory") from None
        if self.api_key is not None and not re.fullmatch(
            r"[!-~]+", self.api_key
        ):  # a secret: not printed
            raise InputError(
                "--api-key (or OPENAI_API_KEY): it has characters that no header can have; give "
                "ASCII without blanks"
            )

    @property
    def request(self) -> dict[str, Any]:
        """Fields that the bodies of all requests have. They are part of a row's identity."""
        fields = {"max_tokens": self.max_tokens or 1, **asdict(self.sampling), "seed": self.seed}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def errors_to_stop(self) -> int:
        return self.max_consecutive_errors or self.concurrency

    def is_ours(self, row: int) -> bool:
        """Return True if the row is one of this rank's."""
        return row // RANK_ROWS % self.world_size == self.rank

    def count_ours(self, rows: int) -> int:
        """Return how many of the first `rows` rows are this rank's."""
        return rows_of_rank(rows, self.world_size, self.rank)

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


def rows_of_rank(rows: int, world_size: int, rank: int) -> int:
    """Return how many of the first `rows` rows a rank does."""
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
        raise InputError("--endpoint: one is named twice; name each once")


def read_endpoints(path: Path) -> tuple[str, ...]:
    """Read the URLs of servers, one in a line; the rest of a line after # is a comment.

    Raises:
        InputError: the file cannot be read, names no server, or something else than servers.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            describe("it cannot be read", error)
            if isinstance(error, OSError)
            else "it is not UTF-8 text"
        )
        raise InputError(
            f"--endpoint @{path}: {reason}; give a file with the URL of a server in each line"
        ) from error
    urls = tuple(base_url(text) for line in lines if (text := line.partition("#")[0].strip()))
    if not urls:
        raise InputError(
            f"--endpoint @{path}: it lists no server; write the URL of one in each line"
        )
    try:
        check_endpoints(urls)
    except InputError as error:
        raise InputError(
            f"--endpoint @{path}: {str(error).removeprefix('--endpoint').lstrip(': ')}"
        ) from error
    return urls


def base_url(text: str) -> str:
    """Return an endpoint's URL without the /v1 of OpenAI clients."""
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
