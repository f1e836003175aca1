"""vLLM's planner, called by the capacity benchmark, against manual figures and the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from documents import page
from releases import installed_is, only_with

from benchmarks import report
from benchmarks.kv_cache import capacity, vllm_planner
from benchmarks.kv_cache.model_shape import shape_of
from benchmarks.kv_cache.preset_configs import CONFIGS
from benchmarks.kv_cache.server_config import EngineOptions, Layout, UnknownFieldError
from benchmarks.kv_cache.vllm_planner import Capacity, LayoutError
from vllm_ascend_hsx.cli import plan
from vllm_ascend_hsx.plan.presets import PRESETS

OF_THE_PAGE = only_with("<0.26", "docs/performance.md has the figures of 0.23.0")
PAGE = Path(__file__).parents[3] / "docs" / "performance.json"
OPTIONS = EngineOptions()
# A token has 2 layers x keys and values x 2 heads x 16 elements x 2 bytes = 256 bytes of KV cache;
# a block of 128 tokens has 32 KiB.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}
# Upstream's remaining share, before 0.30 and since. There a hybrid model has smaller blocks, and
# the prefix cache keeps a second state of each request.
UPSTREAM_KEEPS = {
    "minimax-m2": (0.7209, 0.7209),
    "qwen3.5-35b-a3b": (0.0777, 0.0837),
    "qwen3.5-27b": (0.0393, 0.0301),
    "qwen3-next-80b-a3b": (0.0696, 0.0751),
    "deepseek-v3": (0.5504, 0.5504),
}
DENSE_OPTIONS = EngineOptions(tensor_parallel=1, max_model_len=256, max_num_batched_tokens=128)


@pytest.fixture(scope="module", autouse=True)
def planner() -> None:
    vllm_planner.load()


@pytest.fixture(scope="module")
def measured(planner: None) -> capacity.Result:
    return capacity.run(lambda text: None)


def counted(
    config: dict[str, Any], options: EngineOptions, kv_bytes: int, staging_bytes: int, layers: int
) -> list[Capacity]:
    found = capacity.capacities(shape_of(config), options, layers, kv_bytes, staging_bytes)
    return [each for each in found.values() if isinstance(each, Capacity)]


def test_dense_model_matches_manual_calculation() -> None:
    """1 MiB has 32 blocks. Staging takes three; upstream's are 128 x 384 bytes larger: 12 fit."""
    found = counted(DENSE, DENSE_OPTIONS, 1 << 20, 96 << 10, 3)
    assert [each.num_blocks for each in found] == [32, 29, 12]
    assert [each.tokens for each in found] == [32 * 128, 29 * 128, 12 * 128]


def test_tensor_parallel_ranks_share_the_kv_cache() -> None:
    one, two = (
        counted(DENSE, replace(DENSE_OPTIONS, tensor_parallel=ranks), 1 << 20, 0, 3)[0]
        for ranks in (1, 2)
    )
    assert two.num_blocks == 2 * one.num_blocks


@only_with("<0.30", "a block also holds the state of the convolution, and prefixes are cached")
def test_hybrid_model_with_recurrent_state_blocks_matches_manual_calculation() -> None:
    plain, *_ = counted(CONFIGS["qwen3-next-80b-a3b"], OPTIONS, 30 << 30, 0, 4)
    state, keys = 8 * 128 * 128 * 2, 256 * 2  # recurrent state of a layer; keys of a token
    convolution = (2 * 16 * 128 + 32 * 128) // 4 * 3 * 2
    assert plain.block_size == state // keys == 512
    page = 512 * 2 * keys + convolution
    assert plain.block_bytes == 12 * page
    assert plain.num_blocks == (30 << 30) // (12 * page)
    assert plain.groups == ((12, 512), *3 * ((12, 8192),))
    # A request of 8,192 tokens takes 16 blocks of attention and a state of each of three groups.
    assert plain.tokens == int(plain.num_blocks / 19 * 8192)


@only_with(">=0.30", "a block holds the recurrent state alone, and prefixes are not cached")
def test_hybrid_model_with_whole_state_blocks_matches_manual_calculation() -> None:
    plain, *_ = counted(CONFIGS["qwen3-next-80b-a3b"], OPTIONS, 30 << 30, 0, 4)
    token = 2 * 256 * 2  # keys and values
    state = 8 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) // 4 * 3 * 2  # recurrent; convolution
    assert plain.block_size == 128 * math.ceil(state / (128 * token)) == 384
    assert plain.block_bytes == 12 * 384 * token
    assert plain.num_blocks == (30 << 30) // plain.block_bytes
    assert plain.groups == 4 * ((12, 384),)
    # A request of 8,192 tokens takes 22 blocks of attention and two states of each of three groups:
    # the current one, and the last whole block's for the prefix cache.
    assert plain.tokens == int(plain.num_blocks / 28 * 8192)


def test_defect_17_upstream_has_a_page_in_every_tensor_for_a_block_of_rows_and_a_state_for_drafts() -> (
    None
):
    plain, ours, upstream = counted(
        CONFIGS["qwen3-next-80b-a3b"], replace(OPTIONS, max_model_len=512), 30 << 30, 64 << 20, 4
    )
    if installed_is("<0.30"):
        # A request of 512 tokens takes one block of attention and three states. Upstream has six
        # states, and 16 blocks of 33 tokens with hidden states.
        blocks, upstreams, rows = 1 + 3, 1 + 6 + 16, 33
    else:
        # Two blocks of attention and six states. Upstream has nine states, and 22 blocks of 24
        # tokens with hidden states.
        blocks, upstreams, rows = 2 + 6, 2 + 9 + 22, 24
    assert plain.tokens == int(plain.num_blocks / blocks * 512)
    assert ours.tokens == int(ours.num_blocks / blocks * 512)
    assert upstream.tokens == int(upstream.num_blocks / upstreams * 512)
    assert (ours.block_bytes, ours.groups) == (plain.block_bytes, plain.groups)
    assert upstream.groups[-1] == (1, rows)


def test_missing_field_of_the_stand_in_is_not_a_layout_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = vllm_planner.server_config

    def without_parallel_config(*arguments: Any) -> Any:
        config = made(*arguments)
        del config.parallel_config
        return config

    monkeypatch.setattr(vllm_planner, "server_config", without_parallel_config)
    with pytest.raises(
        UnknownFieldError, match="vLLM reads 'parallel_config', which the stand-in lacks"
    ):
        counted(DENSE, DENSE_OPTIONS, 1 << 20, 0, 3)


def test_too_little_memory_is_a_layout_error_with_vllms_reason() -> None:
    (plain, *_) = capacity.capacities(shape_of(DENSE), DENSE_OPTIONS, 3, 1 << 10, 0).values()
    assert isinstance(plain, LayoutError) and str(plain).startswith("ValueError: ")


def test_operations_md_has_the_installed_planners_figures(
    measured: capacity.Result,
) -> None:
    table = dict(re.findall(r"^\| (\S+) \| (.* %) \|$", page("operations.md"), re.MULTILINE))
    assert len(table) == len(UPSTREAM_KEEPS)
    for name in UPSTREAM_KEEPS:
        plain, ours, upstream = (
            cell for cell in measured.cells if cell.model == PRESETS[name].repository
        )
        cells = [
            f"{cell.kept:.2%}".replace("%", " %") if cell.tokens else "does not start"
            for cell in (ours, upstream)
        ]
        of_releases = next(row for model, row in table.items() if model in plain.model).split(" | ")
        if installed_is("<0.26") or name != "deepseek-v3":
            assert cells == (of_releases[2:] if installed_is(">=0.30") else of_releases[:2]), name
        else:
            assert cells == of_releases[2:], "0.26 keeps what 0.30 keeps"


@OF_THE_PAGE
def test_performance_md_has_the_planners_figures(measured: capacity.Result) -> None:
    assert json.loads(PAGE.read_text())["capacity"] == json.loads(json.dumps(asdict(measured)))
    text = PAGE.with_suffix(".md").read_text()
    rows = report.cost_table(replace(report.NOTHING, capacity=measured))[2]
    assert len(rows) == len(UPSTREAM_KEEPS)
    assert all(f"| {' | '.join(line)} |\n" in text for line in rows)


def test_performance_md_has_the_planned_cost_of_turning_rows_back() -> None:
    planned = plan.plan(plan.parse_arguments(["minimax-m2", "--rotated"]))
    cost = (
        f"{planned.turn_back_flops / 1e6:.0f} MFLOP per token and "
        f"{planned.turn_back_bytes >> 20} MiB per NPU"
    )
    assert cost in " ".join(PAGE.with_suffix(".md").read_text().split())


@pytest.mark.parametrize("name", UPSTREAM_KEEPS)
def test_our_kv_cache_share_equals_the_plan_within_a_block(
    name: str, measured: capacity.Result
) -> None:
    plain, ours, upstream = (
        cell for cell in measured.cells if cell.model == PRESETS[name].repository
    )
    assert abs(ours.kept - plan.plan(plan.parse_arguments([name])).kept) <= 1 / plain.blocks
    if name == "deepseek-v3" and installed_is("<0.26"):
        assert (
            upstream.reason
            == "AttributeError: 'HiddenStateCacheSpec' object has no attribute 'scale_dim'"
        )
    else:
        assert upstream.kept == pytest.approx(
            UPSTREAM_KEEPS[name][installed_is(">=0.30")], abs=5e-5
        )
    assert (plain.layout, ours.layout, upstream.layout) == tuple(layout.value for layout in Layout)


@pytest.mark.parametrize(("name", "kv_cache"), [("minimax-m2", 63488), ("deepseek-v3", 70272)])
def test_kv_cache_bytes_per_token_equal_published_values(name: str, kv_cache: int) -> None:
    plain, *_ = counted(CONFIGS[name], OPTIONS, 30 << 30, 0, 4)
    assert plain.block_bytes == 128 * kv_cache
