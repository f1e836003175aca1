"""torch.npu's graphs: capture, replay, and what changes a captured graph's parameters. What they do is in csrc/graphs.h.

As torch_npu 2.10.0.post4 has them (torch_npu/npu/graphs.py, csrc/core/npu/NPUGraph.cpp).
"""

from __future__ import annotations

import gc
from typing import Any, NoReturn

import torch

from vllm_ascend_hsx.emulator.devices import synchronize
from vllm_ascend_hsx.emulator.memory import empty_cache
from vllm_ascend_hsx.emulator.native import core
from vllm_ascend_hsx.emulator.streams import Stream, StreamContext, current_stream

TaskGroupHandle: Any = core.TaskGroup  # torch_npu._C._NPUTaskGroupHandle
PoolId = tuple[int, int]


def _not_implemented(name: str) -> NoReturn:
    raise NotImplementedError(f"torch.npu.{name} is not implemented by the emulated NPU")


def _place(stream: torch.Stream | None) -> tuple[int, int]:
    """(device, stream id), of the current stream if none is given."""
    stream = current_stream() if stream is None else stream
    return stream.device_index, stream.stream_id


def is_current_stream_capturing() -> bool:
    """Whether what is launched on the current stream is recorded into a graph."""
    return core.capturing(core.current_device())


def graph_pool_handle() -> PoolId:
    """The id of a new memory pool, for graphs that share their memory."""
    return core.graph_pool_handle()


class NPUGraph:
    """What a stream was given while it was captured; replays run it on the same memory.

    Not supported: random operators, copies to the host, a second stream, graphs in graphs, updates by ``update``.
    """

    def __init__(self) -> None:
        self._graph = core.Graph()

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """From here on the current stream records.

        Args:
            pool: of graph_pool_handle() or another graph's pool(); None: a pool of its own.
            capture_error_mode: who may copy synchronously meanwhile: "global" nobody, "thread_local" other threads, "relaxed" all.

        Raises:
            RuntimeError: the current stream is the default one, another capture is under way, or the graph was captured already.
        """
        self._graph.begin(None if pool is None else tuple(pool), capture_error_mode)

    def capture_end(self) -> None:
        """The current stream runs again what it is given. Raises RuntimeError if it is not the one that records."""
        self._graph.end()

    def replay(self) -> None:
        """Launches what was captured on the current stream. Raises RuntimeError if nothing was."""
        self._graph.replay()

    def reset(self) -> None:
        """Forgets what was captured and leaves the pool."""
        self._graph.reset()

    def pool(self) -> PoolId:
        """The id of the graph's memory pool."""
        return self._graph.pool()

    def update(self, cpu_update_input: object) -> None:
        """Not implemented."""
        _not_implemented("NPUGraph.update")

    def debug_dump(self, debug_path: str) -> None:
        """Not implemented."""
        _not_implemented("NPUGraph.debug_dump")


class graph:
    """``with torch.npu.graph(g):`` captures what the block launches into the NPUGraph ``g``, on a stream that is current meanwhile.

    Args:
        npu_graph: the graph.
        pool: see NPUGraph.capture_begin.
        stream: to capture on; None: one that all captures share.
        auto_dispatch_capture: True is not implemented.
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
        self._context = StreamContext(self.capture_stream)

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        empty_cache()
        self._context.__enter__()
        try:
            self.npu_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self._context.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self.npu_graph.capture_end()
        finally:
            self._context.__exit__(*exception)


class ExternalEvent:
    """A flag on the device: a stream that waits for it goes on when another has recorded it; it stays set until a stream resets it.

    The wait and the reset may be captured, so that a replay stops until the host has launched the record.
    """

    def __init__(self) -> None:
        self._event = core.External()

    def record(self, stream: torch.Stream | None = None) -> None:
        """Sets the flag when the stream (default: the current one) gets there."""
        self._event.record(*_place(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        """The stream does not go on before the flag is set.

        Raises:
            RuntimeError: later, where the thread that launched the wait needs what comes behind it and nothing sets the flag.
        """
        self._event.wait(*_place(stream))

    def reset(self, stream: torch.Stream | None = None) -> None:
        """Clears the flag when the stream gets there."""
        self._event.reset(*_place(stream))


def graph_task_group_begin(stream: torch.Stream) -> None:
    """What the stream captures from here on belongs to a task group. Raises RuntimeError if it captures nothing."""
    core.task_group_begin(*_place(stream))


def graph_task_group_end(stream: torch.Stream) -> Any:
    """Ends the task group and returns the handle by which it can be updated."""
    return core.task_group_end(*_place(stream))


def graph_task_update_begin(stream: torch.Stream, handle: Any) -> None:
    """What the stream is given from here on replaces the group's tasks."""
    core.task_update_begin(*_place(stream), handle)


def graph_task_update_end(stream: torch.Stream) -> None:
    """Launches the update on the stream. Raises RuntimeError if the operators are not those that the group was captured with."""
    core.task_update_end(*_place(stream))
