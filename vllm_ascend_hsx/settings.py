"""Everything that is settled when a server starts, and all that can be wrong with it, before weights are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_hsx.config import HsxConfig, read_options
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake_store import load_package, own_address
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.target import ExtractionTarget, read_target

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class StartUp:
    """What proposer, drafter and both halves of the connector are built from."""

    config: HsxConfig
    target: ExtractionTarget
    row_format: RowFormat
    dtype: torch.dtype

    @property
    def directory(self) -> Path:
        """Where files go; only for sinks that make some."""
        assert self.config.shared_storage_path is not None
        return Path(self.config.shared_storage_path)

    @property
    def where(self) -> str:
        """Where rows go, in words."""
        if self.config.sink == "mooncake" and self.config.mooncake is not None:
            return f"the Mooncake store at {self.config.mooncake.master_server_address}"
        return str(self.directory)

    @property
    def file_options(self) -> FileOptions:
        config = self.config
        return FileOptions(
            mode=int(config.file_mode, 8),
            use_lock=config.use_synchronization_lock,
            durability=config.durability,
            io=config.io,
            checksum=config.checksum,
        )

    def num_writers(self, num_workers: int) -> int:
        """Writer threads of one worker, of so many on this machine."""
        waits = self.config.io == "direct" or self.config.durability == "fdatasync" or self.config.sink == "mooncake"
        fewest = 4 if waits else 2
        return self.config.num_writer_threads or max(fewest, min(8, len(os.sched_getaffinity(0)) // num_workers))


def read_start_up(vllm_config: Any) -> StartUp:
    """Read and check the settings of a server.

    Args:
        vllm_config: vllm.config.VllmConfig; with MultiConnector the engine's own or the one that it hands to its children.

    Raises:
        UserError: a setting that cannot be used.
        UserError: the storage directory cannot be made or written.
    """
    config = read_options(vllm_config.kv_transfer_config)
    target = read_target(vllm_config)
    dtype: torch.dtype = vllm_config.model_config.dtype
    if dtype not in _DTYPE_NAMES:
        raise UserError("dtype", str(dtype), "cannot be stored", "Serve the target in bfloat16, float16 or float32.")
    elements = target.num_layers * target.hidden_size
    if config.quantization == "fp8" and elements % 8:
        raise UserError(
            "kv_connector_extra_config.quantization",
            config.quantization,
            f"needs rows of a multiple of 8 elements, and {target.num_layers} layers of {target.hidden_size} make {elements}",
            'Use "none", or extract another number of layers.',
        )
    row_format = RowFormat(target.layer_ids, target.hidden_size, _DTYPE_NAMES[dtype], target.model, config.quantization)
    if config.pinned_ring_bytes < 2 * row_format.row_bytes:
        raise UserError(
            "kv_connector_extra_config.pinned_ring_bytes",
            config.pinned_ring_bytes,
            f"does not hold two rows of {row_format.row_bytes} bytes",
            f"Give at least {2 * row_format.row_bytes}, better the default of 32MiB.",
        )
    start_up = StartUp(config, target, row_format, dtype)
    if config.mooncake is not None and config.sink == "mooncake":
        load_package()
        own_address(config.mooncake.master_server_address)  # only workers join the store
        return start_up
    filesystem = check_directory(start_up.directory, use_lock=config.use_synchronization_lock, direct=config.io == "direct")
    if row_format.stored_row_bytes % filesystem.alignment:
        raise UserError(
            "kv_connector_extra_config.io",
            config.io,
            f"needs rows of a multiple of {filesystem.alignment} bytes on this filesystem, and {row_format.num_layers} layers make rows of "
            f"{row_format.stored_row_bytes} bytes",
            'Use "buffered", or extract another number of layers.',
        )
    return start_up
