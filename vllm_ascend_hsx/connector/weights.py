"""Scheduler side: track the weights that compute the rows of each request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.protocol.weights import WeightVersion, checked_name

Versions = tuple[WeightVersion, ...]  # the only version; or the oldest and the newest


@dataclass
class Computation:
    """The weights that have computed a request's rows.

    Attributes:
        end: number of rows that are wanted; infinite with rows of generated tokens.
        versions: versions of the weights.
        restarted: whether the rows are computed again with other weights. Rows of the earlier
            weights may follow.
        is_complete: whether all rows are computed. A preempted request computes tokens again, but
            makes no rows of them.
    """

    end: float
    versions: Versions
    restarted: bool = False
    is_complete: bool = False


class WeightHistory:
    """The version of the weights, and the versions that have computed the rows of each request.

    Costs nothing in a step where no request begins, computes part of a prompt, or has rows of
    earlier weights.

    Args:
        fingerprint: fingerprint of the checkpoint that the engine has loaded; empty if unknown.
    """

    def __init__(self, fingerprint: str = "") -> None:
        self.current = WeightVersion(fingerprint=fingerprint)
        self._requests: dict[str, Computation] = {}
        self._watched: set[str] = set()  # requests whose versions or completeness may change

    def may_change(self) -> None:
        """Begin a version of unknown weights without a name."""
        self._set(WeightVersion(self.current.number + 1))

    def are(self, fingerprint: str) -> None:
        """Record the fingerprint of the weights that were loaded."""
        self._set(self.current._replace(fingerprint=fingerprint))

    def are_named(self, name: object) -> None:
        """Record a user's name for the weights. Raises ValueError if it cannot be used."""
        self._set(self.current._replace(name=checked_name(name)))

    def _set(self, version: WeightVersion) -> None:
        self.current = version
        self._watched.update(
            request_id for request_id, each in self._requests.items() if not each.is_complete
        )

    def start(self, request_id: str, num_rows: int | None) -> Versions:
        """Return the versions of a request whose first rows are computed in this step.

        Call `follow` afterwards in the same step.

        Args:
            request_id: the request.
            num_rows: number of rows that are wanted; None with rows of generated tokens.
        """
        computation = Computation(math.inf if num_rows is None else num_rows, (self.current,))
        self._requests[request_id] = computation
        self._watched.add(request_id)
        return computation.versions

    def follow(self, scheduler_output: Any) -> dict[str, Versions]:
        """Return the requests that have rows of other versions after this step than before.

        Args:
            scheduler_output: vllm.v1.core.sched.output.SchedulerOutput.
        """
        if not self._watched:
            return {}
        changed: dict[str, Versions] = {}
        positions = _positions(scheduler_output)
        for request_id in self._watched & positions.keys():
            computation, first = self._requests[request_id], positions[request_id]
            before = computation.versions
            self._compute(computation, first)
            computation.is_complete = (
                first + scheduler_output.num_scheduled_tokens[request_id] >= computation.end
            )
            if computation.versions != before:
                changed[request_id] = computation.versions
            if computation.is_complete or (
                computation.end == math.inf and computation.versions == (self.current,)
            ):
                self._watched.discard(request_id)
        return changed

    def _compute(self, computation: Computation, first: int) -> None:
        """Record that the current weights compute a request's rows from position `first` on."""
        oldest = computation.versions[0]
        if oldest.number == self.current.number:
            computation.versions = (self.current,)
        elif first:
            computation.versions = (oldest, self.current)
        else:  # after a preemption; see PrefixReuse.resume
            computation.versions, computation.restarted = (self.current,), True

    def end(self, request_id: str) -> Computation:
        """Forget a request that has started. Return the weights that computed its rows."""
        self._watched.discard(request_id)
        return self._requests.pop(request_id)


def _positions(scheduler_output: Any) -> dict[str, int]:
    """Return the position of the first token of each request in this step.

    vLLM's model runner V2 receives preempted requests as new requests
    (v1/core/sched/scheduler.py:1325 in 0.30.0).
    """
    running = scheduler_output.scheduled_cached_reqs
    positions = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    return positions | {
        new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
    }
