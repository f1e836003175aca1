"""A separate reader process: reports when it is woken for a file and when it has the tensors.

Usage: python -m benchmarks.pipeline.reader_process sleep|poll|flock

Reads a path per line and answers each with a line of JSON: "told" and "loaded", in seconds of a
clock that all processes share.
* sleep: like vllm_ascend_hsx.load, sleeps on the lock.
* poll: tries the lock every 0.1 s, like speculators (hs_connectors/transfer.py, hs-connectors
  0.9.0).
* flock: sleeps on the lock and loads nothing: the system's own time to wake a process.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from pathlib import Path

import vllm_ascend_hsx
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

POLL_SECONDS = 0.1
TIMEOUT = 60.0


def wait_asleep(path: Path) -> None:
    """The first action of `load`."""
    wait_until_released(path.with_name(path.name + LOCK_SUFFIX), TIMEOUT)


def wait_polling(path: Path) -> None:
    with open(path.with_name(path.name + LOCK_SUFFIX)) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            else:
                return


def wait_for_flock(path: Path) -> None:
    with open(path.with_name(path.name + LOCK_SUFFIX)) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


WAYS = {"sleep": wait_asleep, "poll": wait_polling, "flock": wait_for_flock}


def main(way: str) -> None:
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        WAYS[way](path)
        told = time.monotonic()
        if way != "flock":
            vllm_ascend_hsx.load(path, TIMEOUT, mmap=True)
        print(json.dumps({"told": told, "loaded": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
