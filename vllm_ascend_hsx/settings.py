"""The settings of a server, read and checked before weights are loaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm import envs

from vllm_ascend_hsx.compat.installed import require_checked
from vllm_ascend_hsx.compat.rotation import rotation_of
from vllm_ascend_hsx.compat.targets import layer_id_meaning
from vllm_ascend_hsx.config import EXTRA_CONFIG, HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.destination import Destination, make_destination
from vllm_ascend_hsx.target import ExtractionTarget, read_target
from vllm_ascend_hsx.transfer_config import read_options

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the proposer, the drafter and both sides of the connector.

    Attributes:
        config: the options.
        target: the model and the layers to extract.
        row_format: format of the rows.
        dtype: dtype of the model and of `row_format`.
        rotation: file of the rotation to undo; None without one.
        random_ids: whether vLLM makes the ids of requests unique.
    """

    config: HsxConfig
    target: ExtractionTarget
    row_format: RowFormat
    dtype: torch.dtype
    random_ids: bool = True
    rotation: Path | None = None

    @property
    def destination(self) -> Destination:
        """Destination of the rows."""
        return make_destination(self.config, self.row_format, self.random_ids)

    def num_writers(self, num_workers: int) -> Callable[[], int]:
        """Return a function that counts the writer threads of a worker.

        The worker gets an equal part of the current CPUs. If the process has fewer CPUs when the
        function is called, vllm-ascend has bound the process to them, and the worker gets all.

        Args:
            num_workers: number of workers on this machine.
        """
        cpus_at_start = len(os.sched_getaffinity(0))
        fewest, given = 4 if self.destination.waits else 2, self.config.num_writer_threads

        def count() -> int:
            cpus = len(os.sched_getaffinity(0))
            return given or max(
                fewest, min(8, cpus if cpus < cpus_at_start else cpus // num_workers)
            )

        return count


def read_settings(vllm_config: Any, *, has_engine: bool = True) -> ServerSettings:
    """Read and check the settings of a server. Probe storage once per process.

    Args:
        vllm_config: vllm.config.VllmConfig; with MultiConnector the config of the engine, or the
            config that the children get.
        has_engine: whether an engine runs on this machine. If not, storage need not be mounted on
            this machine, and is not probed.

    Raises:
        UserError: if a setting, the storage directory or the store cannot be used.
        IncompatibleVersionError: see require_checked.
    """
    config = read_options(vllm_config.kv_transfer_config)
    require_checked(config.allow_unchecked_versions)
    target = read_target(vllm_config)
    dtype: torch.dtype = vllm_config.model_config.dtype
    if dtype not in _DTYPE_NAMES:
        raise UserError(
            "dtype",
            str(dtype),
            "cannot be stored",
            "Serve the target in bfloat16, float16 or float32.",
        )
    elements = target.num_layers * target.hidden_size
    if config.quantization == "fp8" and elements % 8:
        raise UserError(
            f"{EXTRA_CONFIG}.quantization",
            config.quantization,
            f"needs rows of a multiple of 8 elements, but {target.num_layers} layers of "
            f"{target.hidden_size} make {elements}",
            'Use "none", or extract a different number of layers.',
        )
    rotation = rotation_of(vllm_config, config.rotation)
    basis: Literal["", "model", "rotated"] = (
        "" if rotation is None else "model" if config.rotation == "undo" else "rotated"
    )
    row_format = RowFormat(
        target.layer_ids,
        target.hidden_size,
        _DTYPE_NAMES[dtype],
        target.model,
        config.quantization,
        basis=basis,
        layer_id_meaning=layer_id_meaning(vllm_config.model_config.architecture),
    )
    if config.pinned_ring_bytes is not None and config.pinned_ring_bytes < 2 * row_format.row_bytes:
        raise UserError(
            f"{EXTRA_CONFIG}.pinned_ring_bytes",
            config.pinned_ring_bytes,
            f"does not hold two rows of {row_format.row_bytes} bytes",
            f"Give at least {2 * row_format.row_bytes}, or leave pinned_ring_bytes out.",
        )
    # vLLM will remove this variable (v1/engine/input_processor.py:234, vLLM 0.23.0).
    random_ids = not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)
    undone = rotation if basis == "model" else None
    settings = ServerSettings(config, target, row_format, dtype, random_ids, undone)
    alignment = _probe(settings.destination) if has_engine else 1
    if row_format.stored_row_bytes % alignment:
        raise UserError(
            f"{EXTRA_CONFIG}.io",
            config.io,
            f"needs rows of a multiple of {alignment} bytes on this filesystem, but "
            f"{row_format.num_layers} layers make rows of {row_format.stored_row_bytes} bytes",
            'Use "buffered", or extract a different number of layers.',
        )
    return settings


@functools.cache
def _probe(destination: Destination) -> int:
    """Probe a destination once per process; see Destination.probe. Failures are not cached."""
    return destination.probe()
