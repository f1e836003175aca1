"""Latency histograms of constant size: the buckets are fixed. Needs no vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds of the buckets in seconds. One more bucket counts longer observations.
BUCKETS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2,
    2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
NUM_BUCKETS = len(BUCKETS) + 1
_BUCKETS_NS = tuple(round(bound * 1e9) for bound in BUCKETS)


def bucket_of(nanoseconds: int) -> int:
    """Return the index of the first bucket whose bound the observation does not exceed."""
    return bisect_left(_BUCKETS_NS, nanoseconds)


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds below which `share` of the observations lie, or 0 without observations.

    Interpolates like histogram_quantile of Prometheus.

    Args:
        counts: observations in each bucket.
        share: from 0 to 1.
    """
    left = share * sum(counts)
    for bucket, (bound, count) in enumerate(zip(BUCKETS, counts, strict=False)):
        if count and left <= count:
            lower = BUCKETS[bucket - 1] if bucket else 0.0
            return min(lower + (bound - lower) * left / count, bound)  # rounding may exceed it
        left -= count
    return BUCKETS[-1] if any(counts) else 0.0
