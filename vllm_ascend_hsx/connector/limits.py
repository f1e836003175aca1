"""Limit what one API request may store, and the log lines about requests that are refused."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_hsx.protocol.api import shown
from vllm_ascend_hsx.protocol.request_ids import split_id

FILES_OPTION = "kv_connector_extra_config.max_files_per_request"
BYTES_OPTION = "kv_connector_extra_config.max_bytes_per_request"

# API requests: at most this many others may arrive between two prompts or samples of one
_REMEMBERED = 1024
_LOG_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass
class _Account:
    """Stored files and bytes of an API request.

    `first_child` is its first prompt and sample. If that arrives again, it is a later request with
    the same id.
    """

    first_child: int
    files: int = 0
    bytes: int = 0


class RequestLimits:
    """Count files and bytes by API request, in this engine.

    Each data-parallel rank counts its own requests.

    Args:
        max_files: most files of an API request.
        max_bytes: most bytes of an API request.
        row_bytes: stored bytes of one token's rows, all layers.
    """

    def __init__(self, max_files: int, max_bytes: int, row_bytes: int) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        # keys are hashes: a client's id can be megabytes long
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    def refusal(self, request_id: str, num_rows: int) -> str | None:
        """Count a file, or return the reason why the API request may store no more.

        Args:
            request_id: vLLM's internal id.
            num_rows: most rows that the file can have.
        """
        account = self._account(request_id)
        num_bytes = num_rows * self._row_bytes
        if account.files >= self._max_files:
            reason = (
                f"this API request has stored {account.files} files already, as many as "
                f"{FILES_OPTION} allows; send fewer prompts or samples in one request"
            )
        elif account.bytes + num_bytes > self._max_bytes:
            reason = (
                f"this API request would store up to {account.bytes + num_bytes} bytes, and "
                f"{BYTES_OPTION} is {self._max_bytes}; send fewer prompts or samples in one "
                "request or, with include_output_tokens, a smaller max_tokens"
            )
        else:
            account.files += 1
            account.bytes += num_bytes
            return None
        return reason

    def _account(self, request_id: str) -> _Account:
        api_request, child = map(hash, split_id(request_id))
        account = self._accounts.pop(api_request, None)
        if account is None or account.first_child == child:
            account = _Account(child)
        self._accounts[api_request] = account
        if len(self._accounts) > _REMEMBERED:
            self._accounts.popitem(last=False)
        return account


class RefusalLog:
    """Log a refused request, and in the ten seconds after that only count others.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._unlogged = 0

    def add(self, request_id: str, reason: str) -> None:
        """Log or count a request, by vLLM's internal id, and the reason why it is refused."""
        now = self._clock()
        if now < self._silent_until:
            self._unlogged += 1
            return
        self._silent_until = now + _LOG_SECONDS
        others = f" ({self._unlogged} others were refused since the last log line)" if self._unlogged else ""
        self._unlogged = 0
        logger.warning("request %s is not extracted: %s%s", shown(request_id), reason, others)
