"""torch.npu.Stream and torch.npu.Event. csrc/streams/ orders the work."""

from __future__ import annotations

from typing import Any

import torch

from ascend_npu_emulator.devices import Device, index_of
from ascend_npu_emulator.native import core


class Stream(torch.Stream):
    """A queue of work on one NPU.

    Only events and synchronizations order work on different streams.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("npu", index_of(device)), priority=priority)

    def wait_event(self, event: torch.Event) -> None:
        """Make later work of this stream wait for the event. The host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make later work of this stream wait for all work launched on the other stream."""
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record the event (default: a new one) after the work launched so far."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    @property
    def npu_stream(self) -> int:
        """The stream's id on the device; 0 is the default stream."""
        return self.stream_id

    def __repr__(self) -> str:
        return f"<torch.npu.Stream device={self.device} npu_stream={self.stream_id:#x}>"


class Event(torch.Event):
    """A point in a stream's work that other streams and the host can wait for."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        if interprocess:
            raise NotImplementedError(
                "torch.npu.Event(interprocess=True) is not implemented by the emulated NPU"
            )
        return super().__new__(
            cls,
            device=torch.device("npu", index_of(None)),
            enable_timing=enable_timing,
            blocking=blocking,
        )

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the event after the work launched so far on the stream (default: current)."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make later work of the stream (default: the current one) wait for the event.

        The host does not wait.
        """
        super().wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        """Return whether the work before the last record has completed."""
        return core.query_event(self.event_id)

    def synchronize(self) -> None:
        """Block until the work before the last record has completed."""
        core.synchronize_event(self.event_id)

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the milliseconds from this event to the other.

        Raises RuntimeError unless both events have timing enabled and have completed.
        """
        return core.elapsed_time(self.event_id, end_event.event_id)


def _typed(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def current_stream(device: Device = None) -> Stream:
    """Return this thread's current stream of the device (default: the current device)."""
    return _typed(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Device = None) -> Stream:
    """Return the device's default stream, number 0."""
    index = index_of(device)
    core.use_device("default_stream")
    return Stream(
        stream_id=0, device_index=index, device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )


def set_stream(stream: torch.Stream | None) -> None:
    """Make the stream and its device current in this thread. None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """``with torch.npu.stream(s):`` makes s current. Device and streams are restored afterwards."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = index_of(None)
        self._there = current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is None:
            return
        set_stream(self._there)
        torch.accelerator.set_device_index(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager that makes the stream current. None changes nothing."""
    return StreamContext(stream)
