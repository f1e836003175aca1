"""The contract of a sink: a place that takes the rows of a request, in any order, and publishes all of them or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

# Bytes per element of the dtypes a row can have, by their safetensors names.
ROW_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
FP8_DTYPE = "F8_E4M3"  # one byte per element

# The reason that stands in every file that is still open when its sink is closed.
SERVER_STOPPED = "the server stopped before all rows were written"

Rows = npt.NDArray[np.generic] | memoryview
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowFormat:
    """What one row, the hidden states of one token, looks like: as the model computes it, and as it is stored.

    Attributes:
        layer_ids: residual-stream ids in the order of the row's layers; id i is the stream after i layers.
        hidden_size: elements per layer.
        dtype: safetensors name of the model's element type: "BF16", "F16" or "F32".
        model: name of the target model, for the metadata.
        quantization: "fp8": stored as float8_e4m3fn with a scale per row; "none": as the model computes it.

    Raises:
        ValueError: no layers, a size that is not positive, an unknown dtype, or stored rows that are not a multiple of 8 bytes (the token
            ids stand behind them and would not be aligned).
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    model: str = ""
    quantization: Literal["none", "fp8"] = "none"

    def __post_init__(self) -> None:
        if not self.layer_ids:
            raise ValueError("layer_ids=() names no layer. Give at least one.")
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size={self.hidden_size} is not a size. Give the target's hidden size.")
        if self.dtype not in ROW_DTYPES:
            raise ValueError(f"dtype={self.dtype!r} cannot be stored. Use one of {', '.join(ROW_DTYPES)}.")
        if self.stored_row_bytes % 8:
            raise ValueError(
                f"hidden_size={self.hidden_size} with {self.num_layers} layers of {self.stored_dtype} makes rows of "
                f"{self.stored_row_bytes} bytes. "
                "Choose layers so that a row is a multiple of 8 bytes."
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(layers, hidden)."""
        return self.num_layers, self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Of a row as the model computes it, and as it is written to a SinkFile."""
        return self.num_layers * self.hidden_size * ROW_DTYPES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def stored_dtype(self) -> str:
        """Safetensors name of the element type in the file."""
        return FP8_DTYPE if self.is_quantized else self.dtype

    @property
    def stored_row_bytes(self) -> int:
        """Of a row in the file, without its scale."""
        return self.num_layers * self.hidden_size if self.is_quantized else self.row_bytes


class SinkError(Exception):
    """The rows of one request could not be stored; other requests are not affected.

    Attributes:
        request_id: the request.
        path: the file it was to become.
        reason: one sentence for the request's owner.
        kind: what sort of failure it is, in a word for statistics, if no OSError is behind it.
    """

    def __init__(self, request_id: str, path: Path, reason: str, kind: str | None = None) -> None:
        super().__init__(request_id, path, reason, kind)
        self.request_id = request_id
        self.path = path
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"request {self.request_id!r}, {self.path}: {self.reason}"


class SinkFile(ABC):
    """The rows of one request on their way to `path`.

    Exactly one of `commit`, `fail` and `discard` ends it; whichever comes first wins. `write` may be called from several threads at
    once. A position that is written twice holds what was written last, so a caller that has two different rows for one position must
    not have both in flight.
    """

    request_id: str
    path: Path

    @abstractmethod
    def write(self, first: int, rows: Rows) -> None:
        """Store rows at their final place. Blocks until the operating system has them; copies nothing that is not quantised.

        Args:
            first: token position of the first row.
            rows: the bytes of `count` rows in the model's dtype, C-contiguous, [count, layers, hidden]; stored for positions
                [first, first + count).

        Raises:
            SinkError: they could not be stored, or the file has already ended.
            ValueError: not contiguous, not a whole number of rows, or a negative position.
        """

    @abstractmethod
    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Publish the file. Waits for writes in flight; rows at positions beyond the tokens are dropped.

        Args:
            token_ids: int64 [tokens], prompt first, then output.
            num_prompt_tokens: how many of them are the prompt's.

        Raises:
            SinkError: a position in [0, tokens) was never written (the reason names the spans), the file could not be published, or
                it had already ended. In the first two cases the file has failed: `fail` need not be called.
            ValueError: token_ids is not int64 [tokens], or num_prompt_tokens is not in [0, tokens]. The file is still open.
        """

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Publish the reason in place of the data. Does nothing if the file has ended; raises nothing but logs what went wrong."""

    @abstractmethod
    def discard(self) -> None:
        """Remove every trace: the request was aborted. Does nothing if the file has ended; raises nothing but logs what went wrong."""


class Sink(ABC):
    """Takes the rows of requests. `open` and `close` belong to one thread; the files' methods to any.

    Attributes:
        writes_side_by_side: whether it is of use to write several parts of one file at the same time.
    """

    writes_side_by_side: bool

    @abstractmethod
    def open(self, request_id: str, path: Path, expected_tokens: int = 0, may_grow: bool = True) -> SinkFile:
        """Announce a request. Cheap: no data is moved. Readers of `path` wait from now on.

        Args:
            request_id: the request.
            path: the file that is to appear.
            expected_tokens: rows that it will have at least; room is made for them with the first ones.
            may_grow: there may be more; otherwise room for the expected ones is all that is needed.

        Raises:
            SinkError: the path cannot be used, or somebody is writing it now.
        """

    @abstractmethod
    def close(self) -> None:
        """Fail every file that is still open, with `SERVER_STOPPED`, and free everything. A second call does nothing."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
