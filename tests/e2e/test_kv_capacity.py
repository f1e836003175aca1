"""The KV cache is as large with extraction as without, but for the staging slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_engine, tokens

SCRIPT = [["add", "r", tokens(20), {"max_tokens": 1}], ["drain"]]


@pytest.mark.long
def test_only_the_staging_slots_are_taken_from_the_kv_cache(tiny_minimax_m2: Path, tmp_path: Path) -> None:
    without = run_engine(tmp_path / "without", tiny_minimax_m2, SCRIPT, extract=False)
    extracting = run_engine(tmp_path / "with", tiny_minimax_m2, SCRIPT)
    assert without.error is None, without.error
    assert extracting.error is None, extracting.error
    # The layer of the drafter is in no group: same groups, same block size, same bytes per block.
    assert extracting.result["kv_groups"] == without.result["kv_groups"]
    block_bytes = without.result["kv_bytes"] // without.result["num_gpu_blocks"]
    assert extracting.result["kv_bytes"] == extracting.result["num_gpu_blocks"] * block_bytes
    slots, max_tokens, layers, hidden, itemsize = 2, 64, 3, 256, 2
    staging = slots * max_tokens * layers * hidden * itemsize
    taken = (without.result["num_gpu_blocks"] - extracting.result["num_gpu_blocks"]) * block_bytes
    # What else differs is the profiled activation peak: the target now returns its aux layers, a list of [tokens, hidden] each.
    activations = max_tokens * layers * hidden * itemsize
    assert taken <= staging + activations + (4 << 20)
