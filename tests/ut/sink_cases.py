"""Every sink for the tests of the contract: requests, results of readers, and leftovers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from sink_harness import FORMAT, MIB, bits, is_held, member_bytes, open_fds, run_threads

from vllm_ascend_hsx.protocol.mooncake.manifest import handle_of, keys_of
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.reader.tensors import dequantized
from vllm_ascend_hsx.sinks.base import Sink, SinkFile
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeSink
from vllm_ascend_hsx.sinks.shard import ShardSink


class SinkCase(ABC):
    """A sink whose requests have names, with the reader of the sink.

    Attributes:
        row_format: of the rows.
        sink: sink that `open` uses; set by `serve`.
        published, failed: traces of a committed request, and of a failed request.
        spare_fds: descriptors that a sink may keep for later requests.
    """

    published: frozenset[str]
    failed: frozenset[str]
    spare_fds = 0

    def __init__(self, quantization: Literal["none", "fp8"] = "none") -> None:
        self.row_format = replace(FORMAT, quantization=quantization)
        self.sink: Sink

    @contextmanager
    def serve(self, **changes: Any) -> Iterator[Sink]:
        """Start and stop a sink. `changes` change the format of the rows."""
        before = getattr(self, "sink", None)
        with self.make(replace(self.row_format, **changes)) as self.sink:
            yield self.sink
        self.sink = before or self.sink

    @abstractmethod
    def make(self, row_format: RowFormat) -> Sink:
        """Return another sink for the same directory or store."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """Return the path with which the request is opened."""

    @abstractmethod
    def load(self, name: str, timeout: float = 0) -> HiddenStates:
        """Load with the reader of the sink."""

    @abstractmethod
    def traces(self, name: str) -> set[str]:
        """Return the existing traces: rows, reason, lock, manifest, hidden file."""

    @abstractmethod
    def held(self) -> int:
        """Return the memory, or the number of descriptors, that this process holds for requests."""

    def open(self, name: str, tokens: int = 0, adapter: Adapter = NO_ADAPTER) -> SinkFile:
        return self.sink.open(name, self.path(name), tokens, adapter=adapter)

    def outcome(self, name: str) -> npt.NDArray[np.uint16] | str | None:
        """Return the rows of a request, the reason of the failure, or None if there is neither."""
        try:
            return bits(self.load(name).hidden_states)
        except HiddenStatesError as error:
            return error.reason
        except (TimeoutError, FileNotFoundError):
            return None

    def as_read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the expected rows of a reader: unchanged, or as quantised by hs_connectors."""
        if not self.row_format.is_quantized or not len(rows):
            return rows
        return dequantized(*quantize_tensor_to_fp8(rows), rows.dtype)

    def has(self, name: str, rows: npt.NDArray[np.uint16]) -> bool:
        """Return True if a reader gets these rows, given as bfloat16 bits."""
        found = self.outcome(name)
        return isinstance(found, np.ndarray) and np.array_equal(
            found, bits(self.as_read(torch.from_numpy(rows).view(torch.bfloat16)))
        )


class FileCase(SinkCase):
    """A FileSink.

    Args:
        where: directory of the sink.
        quantization, options: of the sink.
    """

    published = frozenset({"rows", "lock"})
    failed = frozenset({"reason", "lock"})

    def __init__(
        self, where: Path, quantization: Literal["none", "fp8"] = "none", **options: Any
    ) -> None:
        super().__init__(quantization)
        self.where = where
        self.options = FileOptions(**options)

    def make(self, row_format: RowFormat) -> DirectorySink:
        return FileSink(self.where, row_format, self.options)

    def path(self, name: str) -> Path:
        return self.where / f"{name}.safetensors"

    def load(self, name: str, timeout: float = 0) -> HiddenStates:
        return load(self.path(name), timeout, verify=self.options.checksum != "none")

    def traces(self, name: str) -> set[str]:
        path = self.path(name)
        suffixes = {"reason": ".error", "lock": ".lock"}
        found = {trace for trace, suffix in suffixes.items() if os.path.lexists(f"{path}{suffix}")}
        hidden = [
            each
            for each in self.where.glob(".hsx-*/*")
            if each.name.startswith(f"{path.name}.") and each.suffix != ".new"
        ]
        return (
            found
            | ({"rows"} if self.has_rows(name) else set())
            | ({"hidden file"} if hidden else set())
        )

    def has_rows(self, name: str) -> bool:
        return self.path(name).exists()

    def is_locked(self, name: str) -> bool:
        return is_held(Path(f"{self.path(name)}.lock"))

    def held(self) -> int:
        return len(open_fds(self.where))


class ShardCase(FileCase):
    """A ShardSink."""

    published = frozenset({"rows"})
    spare_fds = 6  # a shard, the index, and hidden files for the next requests

    def make(self, row_format: RowFormat) -> DirectorySink:
        return ShardSink(self.where, row_format, self.options, shard_bytes=MIB)

    def has_rows(self, name: str) -> bool:
        return (
            self.path(name).exists() or member_bytes(self.where, self.path(name).name) is not None
        )


def mooncake_options(master: str, **changes: Any) -> MooncakeOptions:
    """Return options of a small sink; `master` is host:port."""
    return MooncakeOptions(
        **{
            "master_server_address": master,
            "global_segment_size": 64 * MIB,
            "local_buffer_size": 4 * MIB,
            **changes,
        }
    )


class MooncakeCase(SinkCase):
    """A MooncakeSink. A stop takes a second, so a sink serves all tests until `close`.

    Args:
        master: host:port.
        reader: of the same store.
        quantization: of the sink.
    """

    published = frozenset({"rows", "manifest"})
    failed = frozenset({"reason"})

    def __init__(
        self, master: str, reader: MooncakeReader, quantization: Literal["none", "fp8"] = "none"
    ) -> None:
        super().__init__(quantization)
        self._reader = reader
        self._options = mooncake_options(master)
        self._sinks: dict[RowFormat, MooncakeSink] = {}
        self.test = ""  # prefix of each name: all tests share the store

    @contextmanager
    def serve(self, **changes: Any) -> Iterator[Sink]:
        row_format = replace(self.row_format, **changes)
        before = getattr(self, "sink", None)
        self.sink = self._sinks[row_format] = self._sinks.get(row_format) or self._make(
            row_format, 16 * MIB
        )
        yield self.sink
        self.sink = before or self.sink

    def close(self) -> None:
        """Stop all sinks at the same time. Each stop takes some seconds."""
        if self._sinks:
            run_threads(*(sink.close for sink in self._sinks.values()))

    def make(self, row_format: RowFormat) -> MooncakeSink:
        # The rows are in the memory of the other sinks, and remain when this sink is closed.
        return self._make(row_format, 0)

    def _make(self, row_format: RowFormat, segment: int) -> MooncakeSink:
        return MooncakeSink(
            self._options.model_copy(update={"global_segment_size": segment}), row_format
        )

    def path(self, name: str) -> Path:
        return Path(self._handle(name))

    def load(self, name: str, timeout: float = 0) -> HiddenStates:
        return self._reader.load(self._handle(name), timeout)

    def traces(self, name: str) -> set[str]:
        assert isinstance(self.sink, MooncakeSink)
        there = self.sink.client.exist(keys_of(self._handle(name)))
        return {
            trace
            for trace, is_there in zip(("rows", "reason", "manifest"), there, strict=True)
            if is_there
        }

    def _handle(self, name: str) -> str:
        return handle_of(f"{self.test}{name}")

    def held(self) -> int:
        assert isinstance(self.sink, MooncakeSink)
        return self.sink.buffer_pool.size - self.sink.buffer_pool.free


IN_A_DIRECTORY: dict[str, Callable[..., FileCase]] = {
    "files": FileCase,
    "files, direct and durable": lambda where: FileCase(where, io="direct", durability="fdatasync"),
    "shards": ShardCase,
    "shards, durable": lambda where: ShardCase(where, durability="fdatasync"),
}
QUANTIZED: dict[str, Callable[..., FileCase]] = {
    "files, fp8": lambda where: FileCase(where, "fp8"),
    "shards, fp8": lambda where: ShardCase(where, "fp8"),
}
IN_A_STORE = {"mooncake": "none", "mooncake, fp8": "fp8"}
