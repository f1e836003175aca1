"""The destination of rows: response parameters, checks at start, and the sink of each worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vllm_ascend_hsx.config import EXTRA_CONFIG, HsxConfig
from vllm_ascend_hsx.protocol.api import PATH_KEY
from vllm_ascend_hsx.protocol.mooncake.manifest import handle_of, transfer_params
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions, load_package, own_address
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.base import Sink
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeSink
from vllm_ascend_hsx.sinks.shard import ShardSink

logger = logging.getLogger(__name__)

_DEFAULTS = FileOptions()


@dataclass(frozen=True)
class InDirectory:
    """Files in a directory, or members of shards. Equal destinations are interchangeable.

    Attributes:
        directory: path as the administrator wrote it. A request may choose a file there if that is
            allowed.
        options: how files are written.
        shard_bytes: size at which a shard is sealed; None for a file per request.
        random_ids: whether vLLM makes the ids of requests unique.
    """

    directory: Path
    options: FileOptions = _DEFAULTS
    shard_bytes: int | None = None
    random_ids: bool = True

    @property
    def description(self) -> str:
        """The destination, for log lines."""
        return str(self.directory)

    @property
    def waits(self) -> bool:
        """True if writers wait for storage rather than for the processor."""
        return self._is_direct or self.options.durable

    def of(self, request_id: str) -> Path:
        """Return the default path of a request's rows. Each id has a different path."""
        return self.directory / file_name(request_id)

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        """Return `kv_transfer_params` for a response without an error.

        Args:
            path: destination of the rows.
            tokens: number of rows.
            include_output: whether rows of generated tokens are extracted.
        """
        return {PATH_KEY: path}

    def probe(self) -> int:
        """Test the destination as far as possible without a worker's memory.

        Return the alignment in bytes that row sizes must have. Raises UserError.
        """
        if self.options.io == "direct" and not self._is_direct:
            logger.warning(
                "%s.io='direct' has no effect with sink='shard': shards are written through the "
                "page cache. "
                "Leave it out, or use sink='file'.",
                EXTRA_CONFIG,
            )
        return check_directory(
            self.directory, use_lock=self.options.use_lock, direct=self._is_direct
        ).alignment

    def make_sink(self, row_format: RowFormat, memory: memoryview) -> Sink:
        """Create the sink of one worker. It writes rows from `memory`, the pinned ring.

        Raises UserError if the destination cannot be used, or not from this memory.
        """
        where = self.directory, row_format, self.options, memory
        if self.shard_bytes is None:
            return FileSink(*where, random_ids=self.random_ids)
        return ShardSink(*where, shard_bytes=self.shard_bytes, random_ids=self.random_ids)

    @property
    def _is_direct(self) -> bool:
        return self.options.io == "direct" and self.shard_bytes is None


@dataclass(frozen=True)
class InStore:
    """Objects in a Mooncake store, with the methods of InDirectory."""

    row_format: RowFormat
    options: MooncakeOptions
    checksum: Literal["crc32c", "none"] = "crc32c"

    directory = None  # a request cannot choose a file

    @property
    def description(self) -> str:
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


Destination: TypeAlias = InDirectory | InStore


def make_destination(config: HsxConfig, row_format: RowFormat, random_ids: bool) -> Destination:
    """Return the destination for the option `sink`.

    Args:
        random_ids: whether vLLM makes the ids of requests unique.
    """
    if config.sink == "mooncake":
        assert config.mooncake is not None  # HsxConfig.parse
        return InStore(row_format, config.mooncake, config.checksum)
    assert config.shared_storage_path is not None
    options = FileOptions(
        mode=int(config.file_mode, 8),
        use_lock=config.use_synchronization_lock,
        durability=config.durability,
        io=config.io,
        checksum=config.checksum,
    )
    shard_bytes = config.shard_bytes if config.sink == "shard" else None
    return InDirectory(Path(config.shared_storage_path), options, shard_bytes, random_ids)
