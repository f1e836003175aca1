"""Report when storage opens files, in the engine's process; the driver calls these functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_PATIENT_S = 60.0
_held: list[Callable[[], int]] = []


def be_patient(worker: Any) -> None:
    """Allow slow opens on a busy machine, for tests that are not about opening."""
    from vllm_ascend_hsx.connector import storage_watch

    storage_watch._OPENS_S = _PATIENT_S


def hold(worker: Any, storage_timeout: float) -> None:
    """Open no file until `release`.

    Args:
        worker: vllm_ascend_hsx.connector.worker.ExtractionWorker.
        storage_timeout: maximum seconds for which a step waits meanwhile.
    """
    from vllm_ascend_hsx.connector import storage_watch

    watch, sink, opens_again = worker._watch, worker._sink, threading.Event()
    usual = watch.storage_timeout, storage_watch._OPENS_S
    watch.storage_timeout, storage_watch._OPENS_S = storage_timeout, 0.05
    wait_for_files, open_file = watch.wait_for_files, sink.open
    waits = 0

    def count_and_wait(opener: Any) -> bool:
        nonlocal waits
        waits += 1
        return bool(wait_for_files(opener))

    def wait_and_open(*args: Any) -> Any:
        opens_again.wait()
        return open_file(*args)

    def release() -> int:
        del watch.wait_for_files, sink.open
        watch.storage_timeout, storage_watch._OPENS_S = usual
        opens_again.set()
        worker._opener.wait()
        return waits

    watch.wait_for_files, sink.open = count_and_wait, wait_and_open
    _held.append(release)


def release(worker: Any) -> int:
    """Open files again, the earliest deadline first. Return the number of steps that waited."""
    return _held.pop()()
