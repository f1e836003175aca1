"""The format of a row: the hidden states of one token, as computed and as stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# Bytes per element of the dtypes that rows can have, by safetensors name.
ROW_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
FP8_DTYPE = "F8_E4M3"  # one byte per element

Rows = npt.NDArray[np.generic] | memoryview
TokenIds = npt.NDArray[np.int64]


class Adapter(NamedTuple):
    """The adapter (LoRA) of a request, for the metadata.

    Attributes:
        name: served name of the adapter; empty for the target without an adapter.
        weights: fingerprint of the adapter's weights; empty if unknown.
    """

    name: str = ""
    weights: str = ""


NO_ADAPTER = Adapter()


RESIDUAL_STREAM = "residual stream after i layers, before the final norm (0: embedding output)"


@dataclass(frozen=True)
class RowFormat:
    """The format of a row, as the model computes it and as it is stored.

    Attributes:
        layer_ids: residual-stream ids in the order of the row's layers. Id i is the stream after i
            layers.
        hidden_size: elements per layer.
        dtype: safetensors name of the model's element type: "BF16", "F16" or "F32".
        model: name of the target model, for the metadata.
        quantization: "fp8" stores float8_e4m3fn with a scale per row; "none" stores the model's
            values.
        basis: basis of a rotated target's rows, for the metadata: "model" if rows are turned back,
            else "rotated"; empty for other targets.
        adapter: adapter of a request, for the metadata.
        layer_id_meaning: a sentence about layer id i, for the metadata.

    Raises:
        ValueError: if there are no layers, the size is not positive, the dtype is unknown, or
            stored rows are not a multiple of 8 bytes (the token ids that follow them would not be
            aligned).
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    model: str = ""
    quantization: Literal["none", "fp8"] = "none"
    basis: Literal["", "model", "rotated"] = ""
    adapter: Adapter = NO_ADAPTER
    layer_id_meaning: str = RESIDUAL_STREAM

    def __post_init__(self) -> None:
        if not self.layer_ids:
            raise ValueError("layer_ids=() names no layer. Give at least one.")
        if self.hidden_size < 1:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a size. Give the target's hidden size."
            )
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"dtype={self.dtype!r} cannot be stored. Use one of {', '.join(ROW_DTYPES)}."
            )
        if self.stored_row_bytes % 8:
            raise ValueError(
                f"hidden_size={self.hidden_size} with {self.num_layers} layers of "
                f"{self.stored_dtype} makes rows of {self.stored_row_bytes} bytes. Choose layers "
                "so that a row is a multiple of 8 bytes."
            )

    @cached_property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(layers, hidden)."""
        return self.num_layers, self.hidden_size

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row as the model computes it, and as a SinkFile receives it."""
        return self.num_layers * self.hidden_size * ROW_DTYPES[self.dtype]

    @cached_property
    def is_quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def stored_dtype(self) -> str:
        """Safetensors name of the element type in the file."""
        return FP8_DTYPE if self.is_quantized else self.dtype

    @cached_property
    def stored_row_bytes(self) -> int:
        """Bytes of a row in the file, without the scale."""
        return self.num_layers * self.hidden_size if self.is_quantized else self.row_bytes
