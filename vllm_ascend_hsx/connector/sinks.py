"""Which sink the option `sink` stands for."""

from __future__ import annotations

from vllm_ascend_hsx.settings import StartUp
from vllm_ascend_hsx.sinks.base import Sink
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.mooncake import MooncakeSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def make_sink(start_up: StartUp, memory: memoryview) -> Sink:
    """The sink of one worker.

    Args:
        start_up: the settings.
        memory: of the pinned ring, which rows will come from.

    Raises:
        UserError: files could not be published in the directory, or not in the way that is asked for.
        UserError: the Mooncake store cannot be used.
    """
    config, row_format = start_up.config, start_up.row_format
    if config.sink == "mooncake":
        assert config.mooncake is not None  # HsxConfig.parse
        return MooncakeSink(config.mooncake, row_format, config.checksum)
    if config.sink == "shard":
        return ShardSink(start_up.directory, row_format, start_up.file_options, memory, shard_bytes=config.shard_bytes)
    return FileSink(start_up.directory, row_format, start_up.file_options, memory)
