"""A scheduler of extracted requests, and the attributes of vLLM's requests that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ascend_hsx.connector.admission import Ranks, RequestLimits
from vllm_ascend_hsx.connector.budget import DirectoryBudget
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RankState, WorkerReport
from vllm_ascend_hsx.connector.prefixes import PrefixIndex
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.protocol.api import ServerParams
from vllm_ascend_hsx.sinks.destination import Destination, InDirectory

ROW_BYTES = 64
# In responses, before weights are loaded again.
FIRST_WEIGHTS = {"weight_versions": [[0, ""]]}


def make_scheduler(
    num_ranks: int = 2,
    *,
    destination: Destination | None = None,
    ring_bytes: int = 1000,
    row_bytes: int = ROW_BYTES,
    limits: RequestLimits | None = None,
    prefixes: PrefixIndex | None = None,
    budget: DirectoryBudget | None = None,
    **params: Any,
) -> ExtractionScheduler:
    """Return a scheduler, by default of the directory /data. `params` are for ServerParams."""
    destination = destination or InDirectory(Path("/data"))
    return ExtractionScheduler(
        destination,
        Ranks(num_ranks, ring_bytes, row_bytes),
        ServerParams(destination.directory, **params),
        limits,
        prefixes,
        budget=budget,
    )


def make_request(request_id: str, num_tokens: int = 5, **changes: Any) -> Any:
    """Return the attributes of vllm.v1.request.Request that the scheduler reads."""
    request = SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        kv_transfer_params=None,
        pooling_params=None,
        resumable=False,
        mm_features=[],
        priority=0,
        arrival_time=0.0,
        skip_reading_prefix_cache=False,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        sampling_params=SimpleNamespace(stop=[]),
        max_tokens=4,
        num_output_tokens=0,
        output_token_ids=[],
        lora_request=None,
        num_computed_tokens=0,
    )
    vars(request).update(changes)
    return request


def schedule(
    scheduler: ExtractionScheduler,
    *requests: Any,
    running: Mapping[str, tuple[int, int]] | None = None,
    most: int = 1 << 30,
) -> HsxConnectorMetadata:
    """Schedule a step.

    Args:
        scheduler: the scheduler.
        requests: requests that start.
        running: position of the first token and number of tokens of other requests, by id.
        most: maximum number of tokens of a request that starts.
    """
    running = running or {}
    new = [
        SimpleNamespace(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            lora_request=request.lora_request,
            num_computed_tokens=request.num_computed_tokens,
        )
        for request in requests
    ]
    cached = SimpleNamespace(
        req_ids=list(running), num_computed_tokens=[first for first, _ in running.values()]
    )
    counts = {
        each.request_id: min(most, len(each.prompt_token_ids or ()) - each.num_computed_tokens)
        for each in requests
    }
    counts |= {request_id: count for request_id, (_, count) in running.items()}
    output = SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts
    )
    return scheduler.build_metadata(output)


def report(scheduler: ExtractionScheduler, rank: int = 0, **state: Any) -> None:
    scheduler.on_worker_report(WorkerReport({}, {rank: RankState(**state)}))
