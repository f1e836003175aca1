"""Flags of vllm-ascend's tutorials: rows are right with each of them, and with many at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from harness import run_engine, tokens
from releases import installed_is
from session import WITH_OUTPUT
from test_graph_modes import COMPILER, ENVIRON, SIZES
from tiny_deepseek_v3 import add_mtp_layer, build_deepseek_v3
from tiny_hybrid import build_qwen3_5_moe
from tiny_qwen3_moe import build_qwen3_moe

LAYER_IDS = (4, 0, 2)
PREFIX = tokens(150, seed=3)
SCRIPT = [
    ["add", "decoding", tokens(10), {"max_tokens": 12, **WITH_OUTPUT}],
    ["step", 3],
    *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in (1, 7, 101)),
    ["add", "first", PREFIX, {"max_tokens": 1}],
    ["drain"],
    ["published", "first"],
    ["add", "between", tokens(5), {"max_tokens": 4}],  # these steps report the file
    ["drain"],
    ["add", "copied", [*PREFIX, *tokens(9)], {"max_tokens": 1}],
    ["drain"],
]
REQUESTS = [action[1] for action in SCRIPT if action[0] == "add"]


class Case(NamedTuple):
    """An engine with a flag of the tutorials.

    Attributes:
        model: one of MODELS.
        flags: flags in additional_config.
        engine: further EngineArgs.
        environ: added to the environment.
    """

    model: str
    flags: Mapping[str, Any]
    engine: Mapping[str, Any]
    environ: Mapping[str, str] = MappingProxyType({})


MODELS = {
    "qwen3_moe": build_qwen3_moe,
    "deepseek_v3": build_deepseek_v3,
    "deepseek_v3 with MTP": lambda directory: add_mtp_layer(build_deepseek_v3(directory)),
    "qwen3_5_moe": build_qwen3_5_moe,
}
EXACT = {"dtype": "float32"}
TWO = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}
HYBRID = {
    "language_model_only": True,
    "max_num_batched_tokens": 192,
}  # with aligned states a chunk is a block of 128
LOADING = {
    "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 8},
    "enable_ep_weight_filter": True,
}
STEPS = {
    "safetensors_load_strategy": "prefetch",
    "block_size": 128,
    "long_prefill_token_threshold": 32,
    "async_scheduling": False,
}
SHARED_DP, OVERLAP = {"enable_shared_expert_dp": True}, {"multistream_overlap_shared_expert": True}
SP = {"enable_flashcomm1": True}
# By flag: the words of vllm-ascend's log for flags that no configuration shows.
LOGGED = {
    "recompute_scheduler_enable": "recompute_scheduler_enable is ignored on PD-disaggregated P nodes"
}
if installed_is(">=0.30"):
    LOGGED["enable_flashcomm1"] = "FlashComm1 is enabled."

CASES = {
    "flashcomm1": Case("qwen3_moe", SP, EXACT | TWO),
    "shared experts DP": Case("deepseek_v3", SHARED_DP, TWO),
    "shared experts DP, flashcomm1": Case("deepseek_v3", SHARED_DP | SP, TWO),
    "shared experts on a stream of their own": Case("deepseek_v3", OVERLAP, TWO),
    "bound CPUs": Case("qwen3_moe", {"enable_cpu_binding": True}, EXACT | TWO),
    "NZ weights": Case("deepseek_v3", {"weight_nz_mode": 2}, TWO),
    "recompute scheduler, which producers ignore": Case(
        "qwen3_moe", {"recompute_scheduler_enable": True}, EXACT | TWO
    ),
    "MLAPO of bfloat16 weights": Case("deepseek_v3", {"enable_mlapo": True}, TWO),
    # The tutorials' float16 is only for Atlas 300I: the kernels of A2 and A3 refuse it.
    "states in float32": Case(
        "qwen3_5_moe", {}, {**TWO, **HYBRID, "mamba_ssm_cache_dtype": "float32"}
    ),
    "MTP weights": Case("deepseek_v3 with MTP", {}, TWO),
    "weights loaded by threads, those of own experts alone": Case(
        "qwen3_moe", {}, EXACT | TWO | LOADING
    ),
    "prefetched weights, other steps": Case("qwen3_moe", {}, EXACT | TWO | STEPS),
    "FULL_DECODE_ONLY": Case("qwen3_moe", COMPILER, EXACT | TWO | GRAPHS, ENVIRON),
    "many at once": Case(
        "deepseek_v3 with MTP",
        COMPILER
        | SHARED_DP
        | OVERLAP
        | SP
        | {"enable_cpu_binding": True, "weight_nz_mode": 2, "enable_mlapo": True},
        TWO | GRAPHS,
        ENVIRON,
    ),
}
SHORT = {"many at once"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_rows_are_right_with_a_flag_of_the_tutorials(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = MODELS[case.model](tmp_path / "model")
    run = run_engine(
        tmp_path / "run",
        model,
        SCRIPT,
        layer_ids=LAYER_IDS,
        additional_config=dict(case.flags),
        environ=case.environ,
        **case.engine,
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for flag, value in case.flags.items():
        assert (
            LOGGED[flag] in run.log
            if flag in LOGGED
            else flag in COMPILER or run.result["ascend_config"][flag] == value
        ), flag
    for request_id in REQUESTS:
        comparison = run.compare(request_id)
        assert comparison.matches, f"{request_id}: {comparison}"
    assert run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 128
