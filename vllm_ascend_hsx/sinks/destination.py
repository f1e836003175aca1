"""Where rows go: what the response says, what is checked at start, and the sink of each worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_ascend_hsx.protocol.api import PATH_KEY
from vllm_ascend_hsx.protocol.mooncake_manifest import handle_of, transfer_params
from vllm_ascend_hsx.protocol.mooncake_store import MooncakeOptions, load_package, own_address
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.base import Sink
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.mooncake import MooncakeSink
from vllm_ascend_hsx.sinks.shard import ShardSink

_DEFAULTS = FileOptions()


class Destination(ABC):
    """One destination of rows. Equal ones are interchangeable.

    Attributes:
        directory: directory of the files, in which a request may choose its file if that is
            allowed. None if the sink writes no files.
    """

    directory: Path | None = None

    @property
    @abstractmethod
    def where(self) -> str:
        """The destination, for log lines."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """True if writers wait for storage rather than for the processor."""

    @abstractmethod
    def of(self, request_id: str) -> Path:
        """Return the default path of a request's rows, for the sink. Each id has its own."""

    @abstractmethod
    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        """Return the response's `kv_transfer_params`, without an error.

        Args:
            path: destination of the rows.
            tokens: number of rows.
            include_output: whether rows of generated tokens are extracted.
        """

    @abstractmethod
    def probe(self) -> int:
        """Use the destination as far as possible without a worker's memory.

        Returns:
            Bytes that the size of a row must be a multiple of.

        Raises:
            UserError: if it cannot be used.
        """

    @abstractmethod
    def make_sink(self, row_format: RowFormat, memory: memoryview) -> Sink:
        """Make the sink of one worker.

        Args:
            row_format: format of its rows.
            memory: the pinned ring, from which rows are written.

        Raises:
            UserError: if the destination cannot be used, or not from this memory.
        """


@dataclass(frozen=True)
class InDirectory(Destination):
    """Files in a directory, or members of shards.

    Attributes:
        directory: as the administrator wrote it.
        options: how files are written.
        shard_bytes: size from which on a shard takes no more requests; None for a file per request.
    """

    directory: Path
    options: FileOptions = _DEFAULTS
    shard_bytes: int | None = None

    @property
    def where(self) -> str:
        return str(self.directory)

    @property
    def waits(self) -> bool:
        return self.options.io == "direct" or self.options.durability == "fdatasync"

    def of(self, request_id: str) -> Path:
        return self.directory / file_name(request_id)

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        return {PATH_KEY: path}

    def probe(self) -> int:
        options = self.options
        direct = options.io == "direct"
        return check_directory(self.directory, use_lock=options.use_lock, direct=direct).alignment

    def make_sink(self, row_format: RowFormat, memory: memoryview) -> Sink:
        if self.shard_bytes is None:
            return FileSink(self.directory, row_format, self.options, memory)
        return ShardSink(
            self.directory, row_format, self.options, memory, shard_bytes=self.shard_bytes
        )


@dataclass(frozen=True)
class InStore(Destination):
    """Objects in a Mooncake store.

    Attributes:
        row_format: format of the rows.
        options: options of the store.
        checksum: checksum of each object, or none.
    """

    row_format: RowFormat
    options: MooncakeOptions
    checksum: Literal["crc32c", "none"] = "crc32c"

    @property
    def where(self) -> str:
        return f"the Mooncake store at {self.options.master_server_address}"

    @property
    def waits(self) -> bool:
        return True

    def of(self, request_id: str) -> Path:
        return Path(handle_of(request_id))

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        return transfer_params(path, self.row_format, tokens, include_output)

    def probe(self) -> int:
        load_package()
        own_address(self.options.master_server_address)  # only workers join the store
        return 1

    def make_sink(self, row_format: RowFormat, memory: memoryview) -> Sink:
        return MooncakeSink(self.options, row_format, self.checksum)
