"""Record system calls of the sinks, and make them fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_ascend_hsx.sinks import storage

_OF_REQUESTS = ("data_file", "request_file", "storage", "directory", "workspace", "shard_file")
_OF_THE_START = ("orphans",)


class Traced:
    """A module whose functions first call `checkpoint(name)`. The checkpoint may raise."""

    def __init__(self, module: ModuleType, checkpoint: Callable[[str], None]) -> None:
        self._module = module
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        cannot_fail = name in ("fspath", "fsencode", "fsdecode", "getegid", "strerror")
        if cannot_fail or not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                self._checkpoint(name)
            except OSError:
                if name == "close":  # close() closes the descriptor even if it fails
                    attribute(*args, **kwargs)
                raise
            return attribute(*args, **kwargs)

        return call


def trace(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], None], *, start: bool = False
) -> None:
    """Call `checkpoint` before each system call of the sinks that write to a directory.

    Args:
        monkeypatch: ends the tracing.
        checkpoint: called with the name of the system call.
        start: include the clean-up when a sink starts.
    """
    for module in (
        *(f"sinks.{name}" for name in _OF_REQUESTS),
        "protocol.checksum",
        "protocol.files",
        "protocol.lock",
    ):
        monkeypatch.setattr(f"vllm_ascend_hsx.{module}.os", Traced(os, checkpoint))
    monkeypatch.setattr(
        "vllm_ascend_hsx.sinks.shard_file.copy_into", Traced(storage, checkpoint).copy_into
    )
    monkeypatch.setattr("vllm_ascend_hsx.protocol.lock.fcntl", Traced(fcntl, checkpoint))
    monkeypatch.setattr(
        "vllm_ascend_hsx.sinks.data_file.reserve", Traced(storage, checkpoint).reserve
    )
    for name in _OF_THE_START if start else ():
        monkeypatch.setattr(f"vllm_ascend_hsx.sinks.{name}.os", Traced(os, checkpoint))


class Calls:
    """A checkpoint that records the calls, and makes some of them fail.

    Args:
        number: errno of the failures.
        names: calls that always fail.
        nth: number of a call that fails, from 1 on; 0: none.
        when: calls fail only while it returns True.

    Attributes:
        made: names of all calls, in order.
    """

    def __init__(
        self, number: int = 0, *names: str, nth: int = 0, when: Callable[[], bool] = lambda: True
    ) -> None:
        self.made: list[str] = []
        self._number = number
        self._names = names
        self._nth = nth
        self._when = when

    def __call__(self, name: str) -> None:
        self.made.append(name)
        if len(self.made) == self._nth or (name in self._names and self._when()):
            raise OSError(self._number, os.strerror(self._number))

    @property
    def failed(self) -> str:
        """Name of call number `nth`; empty if fewer calls were made."""
        return self.made[self._nth - 1] if 0 < self._nth <= len(self.made) else ""
