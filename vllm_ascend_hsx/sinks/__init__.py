"""Where extracted rows go: the contract (`base`), its implementations, and the one factory for the option `sink`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_hsx.config import HsxConfig
    from vllm_ascend_hsx.protocol.rows import RowFormat
    from vllm_ascend_hsx.sinks.destination import Destination


def make_destination(config: HsxConfig, row_format: RowFormat) -> Destination:
    """Return the destination that the options name.

    Args:
        config: the options.
        row_format: of the server's rows.
    """
    from vllm_ascend_hsx.sinks.data_file import FileOptions
    from vllm_ascend_hsx.sinks.destination import InDirectory, InStore

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
    return InDirectory(Path(config.shared_storage_path), options, shard_bytes)
