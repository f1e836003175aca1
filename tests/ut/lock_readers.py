"""The lock protocols of other projects' readers, one system call at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

Reader = Generator[None, None, "dict[str, Any] | None"]


def speculators_reader(path: Path) -> Reader:
    """Take the steps of hs-connectors 0.9.0's FileTransfer (transfer.py:25 and 124)."""
    lock = f"{path}.lock"
    locked = os.path.exists(lock)
    yield
    if locked:
        fd = os.open(lock, os.O_RDWR)
        try:
            while True:
                yield
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    continue
            yield
        finally:
            os.close(fd)
        yield
        os.remove(lock)
        yield
    if not os.path.exists(path):
        return None
    yield
    return load_file(path)


def vllm_reader(path: Path) -> Reader:
    """Take the steps of vLLM 0.23.0's load_hidden_states. Polls where vLLM blocks.

    example_hidden_states_connector.py:45
    """
    with open(f"{path}.lock") as lock:
        while True:
            yield
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        yield
        return load_file(path)


class Stepped:
    """Runs a reader some steps at a time.

    Attributes:
        running: True during a step.
        done: True if the reader has returned.
        result: the returned value.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.running = False
        self.done = False
        self.result: dict[str, Any] | None = None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.done:
                return
            self.running = True
            try:
                next(self._reader)
            except StopIteration as stop:
                self.done = True
                self.result = stop.value
            finally:
                self.running = False

    def finish(self) -> dict[str, Any] | None:
        """Run the reader to the end, and return the result."""
        self.step(100)
        assert self.done, "the reader still waits for a lock that nobody should hold"
        return self.result
