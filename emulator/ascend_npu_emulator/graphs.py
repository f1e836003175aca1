"""torch.npu's graphs: capture, replay and updates of task groups.

The implementation is in csrc/graphs/.

The API follows torch_npu 2.10.0.post4 (torch_npu/npu/graphs.py, csrc/core/npu/NPUGraph.cpp).
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch

from ascend_npu_emulator.devices import synchronize
from ascend_npu_emulator.memory import empty_cache
from ascend_npu_emulator.native import core
from ascend_npu_emulator.streams import Stream, StreamContext, current_stream

TaskGroupHandle: Any = core.TaskGroup  # torch_npu._C._NPUTaskGroupHandle
PoolId = tuple[int, int]


def _not_implemented(name: str) -> NoReturn:
    raise NotImplementedError(f"torch.npu.{name} is not implemented by the emulated NPU")


def _place(stream: torch.Stream | None) -> tuple[int, int]:
    """Return (device, stream id) of the given stream, by default of the current one."""
    stream = current_stream() if stream is None else stream
    return stream.device_index, stream.stream_id


def is_current_stream_capturing() -> bool:
    """Return whether work launched on the current stream is recorded into a graph."""
    return core.capturing(core.current_device())


def graph_pool_handle() -> PoolId:
    """Return the id of a new memory pool that several graphs can share."""
    return core.graph_pool_handle()


class NPUGraph:
    """Work of one or more streams that a capture records and each replay runs on the same memory.

    A stream that waits for an event of the capture is captured too. Before the capture ends, the
    stream that began it must wait for all other captured streams.

    Not supported: random operators, copies to the host, asynchronous collectives, nested graphs,
    and ``update``.
    """

    def __init__(self) -> None:
        self._graph = core.Graph()

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Start recording on the current stream.

        Args:
            pool: id from graph_pool_handle() or another graph's pool(); None for a new pool.
            capture_error_mode: threads that may copy synchronously during the capture: none
                ("global"), other threads ("thread_local") or all ("relaxed").

        Raises:
            RuntimeError: if the current stream is the default stream, another capture is active, or
                this graph was captured before.
        """
        self._graph.begin(None if pool is None else tuple(pool), capture_error_mode)

    def capture_end(self) -> None:
        """Stop recording. Raises RuntimeError if the current stream is not the recording stream."""
        self._graph.end()

    def replay(self) -> None:
        """Launch the captured work on the current stream. Raises RuntimeError without a capture."""
        self._graph.replay()

    def reset(self) -> None:
        """Delete the captured work and leave the pool."""
        self._graph.reset()

    def pool(self) -> PoolId:
        """Return the id of the graph's memory pool."""
        return self._graph.pool()

    def update(self, cpu_update_input: object) -> None:
        """Raise NotImplementedError."""
        _not_implemented("NPUGraph.update")

    def debug_dump(self, debug_path: str) -> None:
        """Raise NotImplementedError."""
        _not_implemented("NPUGraph.debug_dump")


class graph:
    """``with torch.npu.graph(g):`` captures the block's work into the NPUGraph ``g``.

    Args:
        npu_graph: the graph.
        pool: see NPUGraph.capture_begin.
        stream: the stream to capture on; None for a stream that all captures share.
        auto_dispatch_capture: must be False; True raises NotImplementedError.
        capture_error_mode: see NPUGraph.capture_begin.
    """

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: PoolId | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if auto_dispatch_capture:
            _not_implemented("graph(auto_dispatch_capture=True)")
        if graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self.npu_graph = npu_graph
        self.pool = pool
        self.capture_stream = graph.default_capture_stream if stream is None else stream
        self.capture_error_mode = capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        empty_cache()
        with ExitStack() as stack:
            stack.enter_context(StreamContext(self.capture_stream))
            self.npu_graph.capture_begin(self.pool, self.capture_error_mode)
            stack.callback(self.npu_graph.capture_end)
            self._capture = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._capture.__exit__(kind, error, traceback)


class ExternalEvent:
    """A flag on the device. Streams that wait for it continue once another stream has recorded it.

    The flag stays set until a stream resets it. Wait and reset may be captured: a replay then
    blocks until the host launches the record.
    """

    def __init__(self) -> None:
        self._event = core.External()

    def record(self, stream: torch.Stream | None = None) -> None:
        """Set the flag when the stream (default: the current one) reaches this point."""
        self._event.record(*_place(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make the stream wait for the flag.

        Raises:
            RuntimeError: at a later call, if the launching thread needs work after the wait and
                nothing sets the flag.
        """
        self._event.wait(*_place(stream))

    def reset(self, stream: torch.Stream | None = None) -> None:
        """Clear the flag when the stream reaches this point."""
        self._event.reset(*_place(stream))


def graph_task_group_begin(stream: torch.Stream) -> None:
    """Start a task group in the work that the stream captures.

    Raises RuntimeError if the stream is not capturing.
    """
    core.task_group_begin(*_place(stream))


def graph_task_group_end(stream: torch.Stream) -> Any:
    """End the task group. Return the handle for updating the group."""
    return core.task_group_end(*_place(stream))


def graph_task_update_begin(stream: torch.Stream, handle: Any) -> None:
    """Start an update: later work of the stream replaces the group's tasks."""
    core.task_update_begin(*_place(stream), handle)


def graph_task_update_end(stream: torch.Stream) -> None:
    """Launch the update on the stream.

    Raises RuntimeError if the operators differ from the captured ones.
    """
    core.task_update_end(*_place(stream))
