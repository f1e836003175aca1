"""`hsx plan` and the capacity benchmark predict engines and vLLM's planner."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import run_module
from releases import installed_is
from session import EngineSession
from tiny_hybrid import build_qwen3_5_moe

from benchmarks.kv_cache.model_shape import LayerKind, shape_of
from benchmarks.kv_cache.preset_configs import CONFIGS
from vllm_ascend_hsx.cli import plan as command
from vllm_ascend_hsx.plan.shape import read_shape

LAYER_IDS = (1, 2, 4)
MEMORY = 96 << 20
MODELS = {"dense": {}, "hybrid": {"language_model_only": True, "enable_prefix_caching": False}}


@pytest.fixture(scope="module")
def models(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "dense": tiny_qwen3,
        "hybrid": build_qwen3_5_moe(tmp_path_factory.mktemp("models") / "qwen3_5_moe"),
    }


def hsx_plan(model: Path | str, **options: Any) -> dict[str, Any]:
    """Return the output of the command in a process without emulated NPUs."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    program = [
        str(Path(sys.executable).with_name("hsx")),
        "plan",
        str(model),
        "--layers",
        ",".join(map(str, LAYER_IDS)),
        *words,
        "--json",
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def engine_facts(directory: Path, model: Path, **options: Any) -> dict[str, Any]:
    with EngineSession(directory, model, layer_ids=LAYER_IDS, **options) as session:
        return session.facts


def planner_facts(directories: Sequence[str], **options: int) -> dict[str, Any]:
    """Return vLLM's configuration for each directory, and the benchmark's KV cache."""
    _, printed = run_module("plan_configs", json.dumps(options), *directories, npus=4)
    line = next((line for line in printed.splitlines() if line.startswith("configs:")), None)
    assert line is not None, printed[-4000:]
    found: dict[str, Any] = json.loads(line.removeprefix("configs:"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_engine_has_the_benchmarks_number_of_blocks(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    staging = hsx_plan(models[kind], tp=1, max_num_batched_tokens=64, kv_memory=MEMORY)[
        "staging_bytes"
    ]
    assert staging == 2 * 64 * 3 * 256 * 2
    options = {
        "tensor_parallel": 1,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "kv_bytes": MEMORY,
        "staging_bytes": staging,
    }
    (counted,) = planner_facts([str(models[kind])], **options).values()
    # An engine takes all of kv_cache_memory_bytes; the benchmark first subtracts staging slots.
    for name, more, memory in (
        ("plain", {"extract": False}, MEMORY),
        ("hsx", {}, MEMORY - staging),
        ("upstream", {"ours": False}, MEMORY),
    ):
        facts = engine_facts(
            tmp_path / name, models[kind], kv_cache_memory_bytes=memory, **MODELS[kind], **more
        )
        capacity = counted["capacities"][name]
        assert facts["num_gpu_blocks"] == capacity["num_blocks"], name
        if installed_is("<0.30"):  # since then each tensor has the size of the whole pool
            assert facts["kv_bytes"] == capacity["num_blocks"] * capacity["block_bytes"], name
        assert sorted(map(len, facts["kv_groups"])) == sorted(
            layers for layers, _ in capacity["groups"]
        ), name


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_engine_that_measures_memory_loses_the_planned_share(
    tiny_qwen3: Path, tmp_path: Path, ranks: int
) -> None:
    """With 2,048 tokens per step the last layers are the peak: collected layers add to it."""
    options = {"max_num_batched_tokens": 2048, "max_model_len": 512, "tensor_parallel_size": ranks}
    plain = engine_facts(tmp_path / "plain", tiny_qwen3, extract=False, **options)
    ours = engine_facts(tmp_path / "ours", tiny_qwen3, **options)
    planned = hsx_plan(
        tiny_qwen3, tp=ranks, max_num_batched_tokens=2048, kv_memory=plain["kv_bytes"]
    )
    taken = planned["staging_bytes"] + planned["collected_bytes"]
    block_bytes = plain["kv_bytes"] // plain["num_gpu_blocks"]
    lost = plain["num_gpu_blocks"] - ours["num_gpu_blocks"]
    assert abs(lost * block_bytes - taken) <= block_bytes, (lost * block_bytes, taken, block_bytes)
    assert (
        abs(ours["kv_bytes"] / plain["kv_bytes"] - planned["kept_at_least"])
        <= block_bytes / plain["kv_bytes"]
    )


@pytest.mark.long
def test_vllm_reads_presets_as_plan_and_benchmark_assume(
    tmp_path: Path,
) -> None:
    directories = {str(tmp_path / name): name for name in CONFIGS}
    for directory, name in directories.items():
        config = CONFIGS[name]
        if config["model_type"].endswith("_text"):
            config = {
                "architectures": config["architectures"],
                "model_type": config["model_type"].removesuffix("_text"),
                "text_config": config,
                "vision_config": {},
            }
        Path(directory).mkdir()
        (Path(directory) / "config.json").write_text(json.dumps(config))
    defaults = command.parse_arguments(["MODEL"])
    options = {
        "tensor_parallel": 4,
        "max_model_len": 8192,
        "max_num_batched_tokens": defaults.max_num_batched_tokens,
    }
    for directory, made in planner_facts(
        list(directories), **options, kv_bytes=30 << 30, staging_bytes=0
    ).items():
        name = directories[directory]
        shape, planned = shape_of(CONFIGS[name]), read_shape(name)
        assert read_shape(directory) == replace(planned, name=name), "with the text part on top"
        capacity = made["capacities"]["plain"]
        # Since 0.30 the worker chooses the sizes of a hybrid, by the backends of the layers.
        final = installed_is("<0.30") or not shape.is_hybrid
        assert made["block_size"] == capacity["block_size"] or not final, name
        assert made["enable_prefix_caching"] is (installed_is(">=0.30") or not shape.is_hybrid), (
            name
        )
        assert (made["hidden_size"], made["num_layers"], made["dtype"]) == (
            planned.hidden_size,
            planned.num_layers,
            planned.dtype,
        ), name
        assert made["head_size"] == shape.head_dim, name
        assert made["attention_layers"] == sum(
            kind is not LayerKind.LINEAR for kind in shape.layers
        ), name
        assert made["max_num_batched_tokens"] == defaults.max_num_batched_tokens
        assert made["max_concurrent_batches"] == 2
        if shape.is_hybrid and final:
            layers = capacity["groups"][0][0]
            assert made["mamba_page_size_padded"] * layers == capacity["block_bytes"], name
            assert made["mamba_block_size"] == capacity["groups"][1][1], name
        elif final:
            pairs = 1 if shape.is_latent else 2
            page = made["block_size"] * made["num_kv_heads"] * made["head_size"] * pairs * 2
            assert page * planned.num_layers == capacity["block_bytes"], name
