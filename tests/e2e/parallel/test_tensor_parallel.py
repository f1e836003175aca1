"""TP=2, expert parallel, sequence parallelism: every rank sees all rows, one of them writes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from depth import is_long
from harness import Run, check_contexts, read_trace, run_engine, tokens
from launch import SPAWN
from releases import installed_is, only_on_v1, only_with

from vllm_ascend_hsx import load
from vllm_ascend_hsx.checkpoint import find_checkpoint, fingerprint

BLOCK = 128  # tokens in a KV block
FLASHCOMM = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}
# Lengths that TP does not divide: padding rows follow the last real one. The last prompt fills
# steps of 64 tokens. The only staging slot of the rank holds half a step; the ring holds two rows.
LENGTHS = (1, 7, 33, 101, 64, 6, 319)
TIGHT = {"staging_slots": 1, "pinned_ring_bytes": 4096}
SCRIPT = [
    *(["add", f"r{length}", tokens(length), {"max_tokens": 3}] for length in LENGTHS[:3]),
    ["step", 2],
    *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in LENGTHS[3:]),
    ["drain"],
]
# Two prompts, the first one on each rank, and two that begin with each of them.
FIRST = {f"first-{each}": tokens(150, seed=each) for each in (1, 2)}
FOLLOWERS = {
    f"{name}-{length}": (name, [*prompt, *tokens(length)])
    for name, prompt in FIRST.items()
    for length in (9, 70)
}
SHARED = [
    *(["add", name, prompt, {"max_tokens": 1}] for name, prompt in FIRST.items()),
    ["drain"],
    *(["published", name] for name in FIRST),
    ["add", "between", tokens(5), {"max_tokens": 4}],  # these steps report the files
    ["drain"],
    *(["add", name, prompt, {"max_tokens": 1}] for name, (_, prompt) in FOLLOWERS.items()),
    ["drain"],
]
# vLLM's connector of 0.26 writes a request's file in a step after the last one.
AFTER = [["add", "after", tokens(5), {"max_tokens": 4}], ["drain"]]


def writers(directory: Path) -> dict[str, set[int]]:
    """Return the processes that wrote each file."""
    found: dict[str, set[int]] = defaultdict(set)
    for process, events in read_trace(directory).items():
        for event in events:
            found[event["written"]].add(process)
    return found


def make_directories(directory: Path, *names: str) -> dict[str, str]:
    """Create directories for instruments, and return their arguments."""
    for name in names:
        (directory / name).mkdir(parents=True)
    return {name: str(directory / name) for name in names}


def run_tp2(directory: Path, model: Path, *, ours: bool) -> tuple[Run, dict[str, set[int]]]:
    instruments = make_directories(directory, "trace_files", "trace_contexts")
    run = run_engine(
        directory,
        model,
        [*SCRIPT, *(SHARED if ours else AFTER)],
        ours=ours,
        late=ours,
        instruments=instruments,
        environ=FLASHCOMM | (SPAWN if ours and is_long() else {}),
        connector_options=TIGHT if ours else {},
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    return run, writers(Path(instruments["trace_files"]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp2")


@pytest.fixture(scope="module")
def run(tiny_minimax_m2: Path, directory: Path) -> tuple[Run, dict[str, set[int]]]:
    run, written = run_tp2(directory, tiny_minimax_m2, ours=True)
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    return run, written


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_those_of_the_request(run: tuple[Run, dict[str, set[int]]], length: int) -> None:
    comparison = run[0].compare(f"r{length}")
    assert comparison.matches, comparison


@pytest.mark.usefixtures("run")
def test_each_worker_has_a_context_only_on_its_own_npu(directory: Path) -> None:
    check_contexts(read_trace(directory / "trace_contexts"), npus=2)


def test_a_prefix_is_copied_on_the_rank_that_has_its_rows(
    run: tuple[Run, dict[str, set[int]]],
) -> None:
    found, written = run
    for name, (first, _) in FOLLOWERS.items():
        request = found.requests[name]
        assert (
            request["num_cached_tokens"],
            request["kv_transfer_params"].get("reused_tokens"),
        ) == (BLOCK, BLOCK)
        assert written[str(found.path(name))] == written[str(found.path(first))]
    assert len(set().union(*(written[str(found.path(first))] for first in FIRST))) == 2
    for name in (*FIRST, *FOLLOWERS):
        comparison = found.compare(name)
        assert comparison.matches, (name, comparison)


def test_all_ranks_report_the_same_weights(
    run: tuple[Run, dict[str, set[int]]], tiny_minimax_m2: Path
) -> None:
    checkpoint = find_checkpoint(tiny_minimax_m2, "auto")
    assert checkpoint is not None
    told = {load(run[0].path(f"r{length}")).metadata["weights"] for length in LENGTHS}
    assert told == {fingerprint(checkpoint)}


@only_with(">=0.30", "its log does not tell")
def test_sequence_parallelism_needs_no_data_parallelism(
    run: tuple[Run, dict[str, set[int]]],
) -> None:
    """vLLM's own does; vllm-ascend replaces it (patch/platform/patch_parallel_config.py)."""
    assert "FlashComm1 is enabled." in run[0].log


@pytest.mark.long
@only_on_v1("upstream's connector is watched where V1 calls it")
def test_defect_20_one_rank_writes_a_file_and_all_ranks_share_the_work(
    run: tuple[Run, dict[str, set[int]]], tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    _, written = run
    assert len(written) == len(run[0].requests)
    assert all(len(processes) == 1 for processes in written.values())
    assert len(set().union(*written.values())) == 2
    _, upstream = run_tp2(tmp_path / "upstream", tiny_minimax_m2, ours=False)
    if installed_is("<0.26"):
        assert any(len(processes) == 2 for processes in upstream.values())
    else:  # no longer a defect, but one rank does all the work
        assert len(upstream) >= len(LENGTHS)
        assert len(set().union(*upstream.values())) == 1
