"""The failure that ends a worker: an error of the device, or the exception of a step."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading

logger = logging.getLogger(__name__)

_GRACE_S = 5.0  # time for vLLM to end the process, and for reasons to reach their files


class WorkerFailure:
    """Keep the reason of the first failure, and end a process that vLLM does not end.

    The device may have dropped an event for which the main thread, or the thread that waits for
    sampled tokens, waits. vLLM would notice after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300). The
    user's own process is not ended.

    Attributes:
        reason: reason that no request can complete anymore, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._end_of_grace = threading.Timer(_GRACE_S, _end_process)
        self._end_of_grace.daemon = True

    def set(self, reason: str) -> None:
        """Record the first failure. The caller must hold a lock."""
        assert self.reason is None
        self.reason = reason
        logger.critical("no file can be completed: %s", reason)
        if multiprocessing.parent_process() is not None:
            self._end_of_grace.start()

    def vllm_ends_worker(self) -> None:
        """Leave the end of the process to vLLM, because vLLM has started to end it."""
        self._end_of_grace.cancel()


def _end_process() -> None:
    logger.critical(
        "the engine has failed, and vLLM has not ended this process within %g s: exiting", _GRACE_S
    )
    os._exit(1)
