"""Everything that is settled when a server starts, and all that can be wrong with it, before weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_hsx.config import (
    CONNECTOR_NAME,
    EXTRA_CONFIG,
    PLUGIN_NAME,
    ExtractionTarget,
    HsxConfig,
    HsxConfigError,
    MooncakeOptions,
    read_target,
    require_producer,
)
from vllm_ascend_hsx.sinks.base import RowFormat
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.mooncake_client import MooncakeUnavailableError, load_package, own_address

UPSTREAM_CONNECTOR = "ExampleHiddenStatesConnector"
# What VLLM_PLUGINS chooses from (vllm/plugins/__init__.py, 0.23.0).
_PLUGIN_GROUPS = tuple(f"vllm.{kind}_plugins" for kind in ("platform", "general", "io_processor", "stat_logger"))
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
        HsxConfigError: a setting that cannot be used.
        StorageDirectoryError: the storage directory cannot be made or written.
    """
    config = read_options(vllm_config.kv_transfer_config)
    target = read_target(vllm_config)
    dtype: torch.dtype = vllm_config.model_config.dtype
    if dtype not in _DTYPE_NAMES:
        raise HsxConfigError("dtype", str(dtype), "cannot be stored", "Serve the target in bfloat16, float16 or float32.")
    elements = target.num_layers * target.hidden_size
    if config.quantization == "fp8" and elements % 8:
        raise HsxConfigError(
            "kv_connector_extra_config.quantization",
            config.quantization,
            f"needs rows of a multiple of 8 elements, and {target.num_layers} layers of {target.hidden_size} make {elements}",
            'Use "none", or extract another number of layers.',
        )
    row_format = RowFormat(target.layer_ids, target.hidden_size, _DTYPE_NAMES[dtype], target.model, config.quantization)
    if config.pinned_ring_bytes < 2 * row_format.row_bytes:
        raise HsxConfigError(
            "kv_connector_extra_config.pinned_ring_bytes",
            config.pinned_ring_bytes,
            f"does not hold two rows of {row_format.row_bytes} bytes",
            f"Give at least {2 * row_format.row_bytes}, better the default of 32MiB.",
        )
    start_up = StartUp(config, target, row_format, dtype)
    if config.mooncake is not None and config.sink == "mooncake":
        _check_store(config.mooncake)
        return start_up
    filesystem = check_directory(start_up.directory, use_lock=config.use_synchronization_lock, direct=config.io == "direct")
    if row_format.stored_row_bytes % filesystem.alignment:
        raise HsxConfigError(
            "kv_connector_extra_config.io",
            config.io,
            f"needs rows of a multiple of {filesystem.alignment} bytes on this filesystem, and {row_format.num_layers} layers make rows of "
            f"{row_format.stored_row_bytes} bytes",
            'Use "buffered", or extract another number of layers.',
        )
    return start_up


def _check_store(options: MooncakeOptions) -> None:
    """What can be seen of a store without joining it, which only workers do. Raises HsxConfigError."""
    try:
        load_package()
        own_address(options.master_server_address)
    except MooncakeUnavailableError as error:
        raise store_refusal(error) from error


def store_refusal(error: MooncakeUnavailableError) -> HsxConfigError:
    """Why a store cannot be used, as an error of the option that is to blame."""
    if error.option:
        return HsxConfigError(f"{EXTRA_CONFIG}.mooncake.{error.option}", error.value, error.problem, error.remedy)
    return HsxConfigError(f"{EXTRA_CONFIG}.sink", "mooncake", f"cannot be used: {error.problem}", f"{error.remedy}.")


def read_options(transfer: Any) -> HsxConfig:
    """Read and check the options of our connector, alone or inside MultiConnector.

    Args:
        transfer: vllm.config.KVTransferConfig, or None.

    Raises:
        HsxConfigError: it is not there, or has a role or an option that cannot be used.
    """
    role, options = _connector_entry(transfer)
    config = HsxConfig.parse(options)
    require_producer(role)
    return config


def _connector_entry(transfer: Any) -> tuple[str | None, dict[str, Any]]:
    if transfer is not None and transfer.kv_connector == CONNECTOR_NAME:
        return transfer.kv_role, transfer.kv_connector_extra_config
    if transfer is not None and transfer.kv_connector == "MultiConnector":
        children = {child.get("kv_connector"): child for child in transfer.kv_connector_extra_config.get("connectors", ())}
        if CONNECTOR_NAME in children:
            if UPSTREAM_CONNECTOR in children:
                raise HsxConfigError(
                    f"kv_transfer_config.{EXTRA_CONFIG}.connectors",
                    UPSTREAM_CONNECTOR,
                    f"reads hidden states from the KV cache, where {CONNECTOR_NAME} keeps none",
                    "Leave it out.",
                )
            child = children[CONNECTOR_NAME]
            return child.get("kv_role", transfer.kv_role), child.get("kv_connector_extra_config", {})
    raise HsxConfigError(
        "kv_transfer_config.kv_connector",
        getattr(transfer, "kv_connector", None),
        f"does not take the hidden states that the speculative method extracts when the plugin {PLUGIN_NAME} is loaded",
        f'Start the server with --kv-transfer-config \'{{"kv_connector": "{CONNECTOR_NAME}", "kv_role": "kv_producer", ...}}\'; '
        f"or, for another connector of hidden states, without this plugin: VLLM_PLUGINS={plugins_without_ours()} vllm serve ...",
    )


def plugins_without_ours(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of VLLM_PLUGINS that leaves our plugin out and keeps every other one that is loaded now."""
    allowed = environ.get("VLLM_PLUGINS")
    names = [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group) if point.name != PLUGIN_NAME]
    return ",".join(name for name in dict.fromkeys(names) if allowed is None or name in allowed.split(","))
