"""Defect 19: extraction costs no graph mode, and rows are right in replays of graphs.

vllm-ascend's graphs need torch.compile. The default compiler, npugraph_ex, is not emulated.
vllm-ascend's own options switch it off, together with the fusions that import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Run, read_trace, run_engine, tokens
from releases import installed_is
from session import WITH_OUTPUT
from tiny_deepseek_v3 import build_deepseek_v3

OPTIONS = ["enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add"]
if installed_is("<0.30"):  # since then refused as unknown
    OPTIONS.append("fuse_allreduce_rms")
COMPILER = {"ascend_compilation_config": dict.fromkeys(OPTIONS, False)}
ENVIRON = {
    # The compiler of vllm-ascend 0.23.0 returns no artifact.
    "VLLM_USE_MEGA_AOT_ARTIFACT": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
# Captures of each mode, of these sizes.
SIZES = [1, 2, 4, 32]
CAPTURES = {"FULL_DECODE_ONLY": {"FULL": [4, 2, 1]}, "PIECEWISE": {"PIECEWISE": [32, 4, 2, 1]}}

# One decode alone, beside a prompt, beside the chunks of another, and three together.
SCRIPT = [
    ["add", "decoding", tokens(10), {"max_tokens": 16}],
    ["step", 3],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 6}],
    ["step", 2],
    ["add", "chunked", tokens(150), {"max_tokens": 5}],
    ["drain"],
    # Workers learn in the next step that a request has ended.
    ["add", "last", tokens(3), {"max_tokens": 1}],
    ["drain"],
]
REQUESTS = [action[1] for action in SCRIPT if action[0] == "add" and action[1] != "last"]
Events = list[dict[str, Any]]


def run(
    directory: Path,
    model: Path,
    mode: str,
    *,
    extract: bool = True,
    layer_ids: Sequence[int] = (4, 1, 2),
    **options: Any,
) -> tuple[Run, list[Events]]:
    """Run the script; return the result, and each rank's events of trace_graph_mode."""
    (directory / "trace").mkdir(parents=True)
    done = run_engine(
        directory,
        model,
        [
            [*action[:3], action[3] | (WITH_OUTPUT if extract else {})]
            if action[0] == "add"
            else action
            for action in SCRIPT
        ],
        layer_ids=layer_ids,
        extract=extract,
        instruments={"trace_graph_mode": str(directory / "trace")},
        environ=ENVIRON,
        enforce_eager=False,
        compilation_config={"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES},
        additional_config=COMPILER,
        **options,
    )
    return done, [events for events in read_trace(directory / "trace").values() if events]


def resolved(events: Events) -> Mapping[str, Any]:
    """Return the runner's decision: mode, sizes, and captured graphs."""
    *_, decision = (event for event in events if "resolved" in event)
    return decision


def forwards(events: Events) -> list[tuple[str, int]]:
    """Return (graph mode, padded tokens) of each forward pass once the engine serves."""
    last = max(index for index, event in enumerate(events) if "captured" in event)
    return [(event["forward"], event["tokens"]) for event in events[last:] if "forward" in event]


@dataclass
class Pair:
    """The same engine in one graph mode, with and without extraction."""

    mode: str
    extracting: Run
    plain: Run
    events: Events
    plain_events: Events

    @property
    def graph(self) -> str:
        """The mode in which a forward pass is a replay."""
        (graph,) = CAPTURES[self.mode]
        return graph


@pytest.fixture(
    scope="module", params=["FULL_DECODE_ONLY", pytest.param("PIECEWISE", marks=pytest.mark.long)]
)
def pair(
    request: pytest.FixtureRequest, float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    runs, events = [], []
    for extract in (True, False):
        done, (rank,) = run(
            tmp_path_factory.mktemp("run"),
            float32_qwen3,
            request.param,
            extract=extract,
            dtype="float32",
        )
        assert done.error is None, done.error
        runs.append(done)
        events.append(rank)
    return Pair(request.param, *runs, *events)


def test_graph_mode_and_captured_sizes_are_as_without_extraction(pair: Pair) -> None:
    assert resolved(pair.events) == resolved(pair.plain_events)
    assert resolved(pair.plain_events)["resolved"] == pair.mode
    assert resolved(pair.plain_events)["captures"] == CAPTURES[pair.mode]


def test_every_step_runs_in_the_same_graph_as_without_extraction(pair: Pair) -> None:
    ran = forwards(pair.events)
    assert ran == forwards(pair.plain_events)
    assert {mode for mode, _ in ran} == {"NONE", pair.graph}
    captures, replays = (
        sum(kind in event for event in pair.events) for kind in ("captured", "replayed")
    )
    pieces = captures // len(CAPTURES[pair.mode][pair.graph])
    assert replays == pieces * sum(mode == pair.graph for mode, _ in ran) > 0


def test_generated_tokens_are_as_without_extraction(pair: Pair) -> None:
    for request_id in REQUESTS:
        assert (
            pair.extracting.requests[request_id]["tokens"]
            == pair.plain.requests[request_id]["tokens"]
        )


@pytest.mark.parametrize("request_id", REQUESTS)
def test_rows_of_prompts_and_of_tokens_decoded_in_replays_are_exact(
    pair: Pair, request_id: str
) -> None:
    comparison = pair.extracting.compare(request_id)
    assert comparison.matches, comparison
    assert comparison.max_abs_difference <= 1e-5


def test_rows_of_a_mixture_of_experts_on_two_npus_are_right_in_replays(
    tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    done, (one, other) = run(
        tmp_path,
        tiny_minimax_m2,
        "FULL_DECODE_ONLY",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    assert done.error is None, done.error
    assert forwards(one) == forwards(other)
    assert ("FULL", 2) in forwards(one)
    for request_id in REQUESTS:
        comparison = done.compare(request_id)
        assert comparison.matches, (request_id, comparison)


@pytest.mark.long
def test_rows_of_latent_attention_are_right_in_replays(tmp_path: Path) -> None:
    model = build_deepseek_v3(tmp_path / "deepseek_v3")
    done, (events,) = run(tmp_path / "run", model, "FULL_DECODE_ONLY", layer_ids=(4, 0, 2, 1))
    assert done.error is None, done.error
    assert ("FULL", 2) in forwards(events)
    for request_id in REQUESTS:
        comparison = done.compare(request_id)
        assert comparison.matches, (request_id, comparison)


# The builder of upstream's cache-only layer supports no graphs.


@pytest.mark.long
def test_upstreams_connector_disables_graphs(float32_qwen3: Path, tmp_path: Path) -> None:
    _, (events,) = run(
        tmp_path, float32_qwen3, "FULL_DECODE_ONLY", ours=False, late=False, dtype="float32"
    )
    assert resolved(events)["resolved"] == "NONE"
    assert resolved(events)["captures"] == {}


@pytest.mark.long
def test_upstreams_connector_refuses_full_graphs(float32_qwen3: Path, tmp_path: Path) -> None:
    done, _ = run(tmp_path, float32_qwen3, "FULL", ours=False, late=False, dtype="float32")
    assert done.error is not None
    assert "CUDAGraphMode.FULL is not supported with CacheOnlyAttentionBackend" in done.error
