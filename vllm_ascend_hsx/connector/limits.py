"""How much one API request may store: the files and bytes of all prompts and samples that it makes the engine run."""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_hsx.protocol.api import shown

FILES_OPTION = "kv_connector_extra_config.max_files_per_request"
BYTES_OPTION = "kv_connector_extra_config.max_bytes_per_request"

# vLLM's internal ids, see reader/find.py. Completions number their prompts with '-', and scoring its items; in any other id that is the
# client's own number.
_INTERNAL_ID = re.compile(r"(?:(?P<sample>\d+)_)?(?P<id>.*?)(?:-[0-9a-f]{8})?", re.DOTALL)
_PROMPT = re.compile(r"(?P<id>(?:cmpl|generative-scoring)-.*)-(?P<prompt>\d+)", re.DOTALL)

_REMEMBERED = 1024  # API requests: so many others may arrive between two prompts or samples of one
_LOG_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass
class _Account:
    """What an API request stores. Its first prompt and sample tells it from a later request with the same id."""

    first_child: int
    files: int = 0
    bytes: int = 0


class RequestLimits:
    """Counts files and bytes by API request, in this engine: each data-parallel rank counts what it is given itself.

    Args:
        max_files: of one API request.
        max_bytes: of one API request.
        row_bytes: one token's rows in a file, all layers.
        clock: seconds that never run backwards.
    """

    def __init__(self, max_files: int, max_bytes: int, row_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        self._clock = clock
        self._accounts: OrderedDict[int, _Account] = OrderedDict()  # by hashes: a client's id can be megabytes long
        self._silent_until = float("-inf")
        self._unlogged = 0

    def refusal(self, request_id: str, num_rows: int) -> str | None:
        """Count a file, or return why the API request may have no more.

        Args:
            request_id: vLLM's internal id.
            num_rows: the most rows that the file can have.
        """
        account = self._account(request_id)
        num_bytes = num_rows * self._row_bytes
        if account.files >= self._max_files:
            reason = (
                f"this API request has stored {account.files} files already, as many as {FILES_OPTION} allows; "
                "send fewer prompts or samples in one request"
            )
        elif account.bytes + num_bytes > self._max_bytes:
            reason = (
                f"this API request would store up to {account.bytes + num_bytes} bytes, and {BYTES_OPTION} is {self._max_bytes}; "
                "send fewer prompts or samples in one request or, with include_output_tokens, a smaller max_tokens"
            )
        else:
            account.files += 1
            account.bytes += num_bytes
            return None
        self._log(request_id, reason)
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

    def _log(self, request_id: str, reason: str) -> None:
        now = self._clock()
        if now < self._silent_until:
            self._unlogged += 1
            return
        self._silent_until = now + _LOG_SECONDS
        others = f" ({self._unlogged} others were refused since the last such line)" if self._unlogged else ""
        self._unlogged = 0
        logger.warning("request %s is not extracted: %s%s", shown(request_id), reason, others)


def split_id(request_id: str) -> tuple[str, tuple[str, str]]:
    """The API request that an internal id belongs to, and which (prompt, sample) of it this is."""
    found = _INTERNAL_ID.fullmatch(request_id)
    assert found is not None  # it matches anything
    sample = found["sample"] or ""
    if numbered := _PROMPT.fullmatch(found["id"]):
        return numbered["id"], (numbered["prompt"], sample)
    # Samples of one parent share its random digits, and two requests with the same id do not.
    return request_id[len(sample) + 1 :] if sample else request_id, ("", sample)
