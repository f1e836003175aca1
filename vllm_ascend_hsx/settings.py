"""Everything that is settled when a server starts, and all that can be wrong with it, before weights are loaded."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ascend_hsx.config import HsxConfig, read_options
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks import make_destination
from vllm_ascend_hsx.sinks.destination import Destination
from vllm_ascend_hsx.target import ExtractionTarget, read_target

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class ServerSettings:
    """What proposer, drafter and both halves of the connector are built from."""

    config: HsxConfig
    target: ExtractionTarget
    row_format: RowFormat
    dtype: torch.dtype

    @property
    def destination(self) -> Destination:
        """Where rows go."""
        return make_destination(self.config, self.row_format)

    def num_writers(self, num_workers: int) -> int:
        """Return the number of writer threads of one of `num_workers` workers on this machine."""
        fewest = 4 if self.destination.waits else 2
        return self.config.num_writer_threads or max(
            fewest, min(8, len(os.sched_getaffinity(0)) // num_workers)
        )


def read_settings(vllm_config: Any) -> ServerSettings:
    """Read and check the settings of a server. Storage is probed once per process.

    Args:
        vllm_config: vllm.config.VllmConfig; with MultiConnector the engine's own or the one that it hands to its children.

    Raises:
        UserError: a setting, a storage directory or a store that cannot be used.
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
    settings = ServerSettings(config, target, row_format, dtype)
    if row_format.stored_row_bytes % (alignment := _probe(settings.destination)):
        raise UserError(
            "kv_connector_extra_config.io",
            config.io,
            f"needs rows of a multiple of {alignment} bytes on this filesystem, and {row_format.num_layers} layers make rows of "
            f"{row_format.stored_row_bytes} bytes",
            'Use "buffered", or extract another number of layers.',
        )
    return settings


@functools.cache
def _probe(destination: Destination) -> int:
    """Probe a destination unless this process has done it; see Destination.probe. A failure is not kept."""
    return destination.probe()
