"""Files of hidden states and members of shards, for tests that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

FORMAT = RowFormat(layer_ids=(2, 4), hidden_size=8, dtype="BF16", model="tiny")


def rows_of(tokens: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(tokens, *FORMAT.row_shape, generator=generator) * scale).bfloat16()


def write(
    directory: Path,
    name: str,
    rows: torch.Tensor,
    prompt: int | None = None,
    options: FileOptions | None = None,
    images: Sequence[Placeholder] = (),
    quantization: Literal["none", "fp8"] = "none",
) -> Path:
    row_format = (
        RowFormat(tuple(range(1, rows.shape[1] + 1)), rows.shape[2], "BF16")
        if rows.shape[1:] != FORMAT.row_shape
        else FORMAT
    )
    with FileSink(
        directory, replace(row_format, quantization=quantization), options or FileOptions()
    ) as sink:
        file = sink.open(name, directory / f"{name}.safetensors", len(rows))
        file.placeholders = images
        if len(rows):
            file.write(0, rows.contiguous().view(torch.uint8).numpy())
        file.commit(np.arange(len(rows), dtype=np.int64), len(rows) if prompt is None else prompt)
    return file.path


def write_member(directory: Path) -> Path:
    """Write a member of a shard with three rows, and return the path. No file has this path."""
    with ShardSink(directory, FORMAT, FileOptions(), shard_bytes=1 << 20) as sink:
        file = sink.open("s", directory / "s.safetensors")
        file.write(0, rows_of(3).view(torch.uint8).numpy())
        file.commit(np.arange(3), 3)
    return directory / "s.safetensors"
