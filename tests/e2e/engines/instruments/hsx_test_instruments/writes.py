"""Instruments that delay writes of rows, or kill a process during a copy."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import signal
import threading
from typing import Any

from hsx_test_instruments.hooks import after_import

release_writers = threading.Event()


def held_writers(_: Any) -> None:
    """Make the writer threads of vLLM's connector wait until the driver sets `release_writers`."""

    def hold(connector_module: Any) -> None:
        connector = connector_module.ExampleHiddenStatesConnector
        original = connector._write_tensors

        def write_tensors(*args: Any) -> None:
            release_writers.wait()
            original(*args)

        connector._write_tensors = staticmethod(write_tensors)

    after_import(
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector", hold
    )


def gated_writes(gate: str) -> None:
    """Make our connector write rows only while no process holds an flock on the file `gate`."""

    def wrap(module: Any) -> None:
        original = module.DataFile.write

        def write(*args: Any) -> None:
            with open(gate) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
            original(*args)

        module.DataFile.write = write

    after_import("vllm_ascend_hsx.sinks.data_file", wrap)


def die_in_a_copy(number: int) -> None:
    """Kill the process when half of the `number`th copy of rows is done."""
    copies = itertools.count(1)

    def wrap(module: Any) -> None:
        original = module.RowSource.copy_to

        def copy_to(self: Any, fd: int, offset: int, num_bytes: int) -> None:
            if next(copies) != number:
                original(self, fd, offset, num_bytes)
                return
            original(self, fd, offset, num_bytes // 2)
            print(f"killed in copy {number}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        module.RowSource.copy_to = copy_to

    after_import("vllm_ascend_hsx.sinks.data_file", wrap)


def storage_that_answers_late(how: dict[str, float]) -> None:
    """Make writes of "bytes" or more wait until a worker has been closing for "seconds".

    New requests do not wait for them.
    """
    answers = threading.Event()

    def let_through(storage_watch_module: Any) -> None:
        assert storage_watch_module._PAUSE_AFTER_S
        storage_watch_module._PAUSE_AFTER_S = float("inf")

    def hold(data_file_module: Any) -> None:
        write = data_file_module.DataFile.write

        @functools.wraps(write)
        def late(self: Any, first: int, data: memoryview) -> None:
            if data.nbytes >= how["bytes"]:
                answers.wait()
            write(self, first, data)

        data_file_module.DataFile.write = late

    def release(worker_module: Any) -> None:
        close = worker_module.ExtractionWorker.close

        @functools.wraps(close)
        def closing(self: Any, timeout: float | None = None) -> None:
            timer = threading.Timer(how["seconds"], answers.set)
            timer.daemon = True
            timer.start()
            close(self, timeout)

        worker_module.ExtractionWorker.close = closing

    after_import("vllm_ascend_hsx.connector.storage_watch", let_through)
    after_import("vllm_ascend_hsx.sinks.data_file", hold)
    after_import("vllm_ascend_hsx.connector.worker", release)
