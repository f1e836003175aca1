"""`hsx plan` says what engines do: the same blocks for the same memory, and the configuration that vLLM makes of the presets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, EngineSession, process_environment
from tiny_hybrid import build_qwen3_5_moe

from vllm_ascend_hsx.cli import plan as command
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.plan.shape import LayerKind, read_shape

LAYER_IDS = (1, 2, 4)
MEMORY = 96 << 20
MODELS = {"dense": {}, "hybrid": {"language_model_only": True, "enable_prefix_caching": False}}


@pytest.fixture(scope="module")
def models(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"dense": tiny_qwen3, "hybrid": build_qwen3_5_moe(tmp_path_factory.mktemp("models") / "qwen3_5_moe")}


def hsx_plan(model: Path | str, **options: Any) -> dict[str, Any]:
    """What the command prints, as a user has it: in a process of its own that knows of no emulated NPU."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    program = [str(Path(sys.executable).with_name("hsx")), "plan", str(model), "--layers", ",".join(map(str, LAYER_IDS)), *words, "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def engine_facts(directory: Path, model: Path, **options: Any) -> dict[str, Any]:
    with EngineSession(directory, model, layer_ids=LAYER_IDS, **options) as session:
        return session.facts


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_has_the_blocks_that_the_plan_says_for_the_same_memory(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    planned = hsx_plan(models[kind], tp=1, max_model_len=512, max_num_batched_tokens=64, kv_memory=MEMORY)
    staging = planned["staging_bytes"]
    assert staging == 2 * 64 * 3 * 256 * 2
    # With kv_cache_memory_bytes an engine takes what it is given; from ours the plan takes the staging slots first.
    for name, options, memory in (
        ("plain", {"extract": False}, MEMORY),
        ("hsx", {}, MEMORY - staging),
        ("upstream", {"ours": False}, MEMORY),
    ):
        facts = engine_facts(tmp_path / name, models[kind], kv_cache_memory_bytes=memory, **MODELS[kind], **options)
        capacity = planned["layouts"][name]["capacity"]
        assert facts["num_gpu_blocks"] == capacity["num_blocks"], name
        assert facts["kv_bytes"] == capacity["num_blocks"] * capacity["block_bytes"], name
        assert sorted(map(len, facts["kv_groups"])) == sorted(layers for layers, _ in capacity["groups"]), name


@pytest.mark.long
def test_an_engine_that_measures_its_memory_loses_what_the_plan_says(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Steps of 2,048 tokens, whose activations in the last layers are the peak: what is collected adds to it in full."""
    options = {"max_num_batched_tokens": 2048, "max_model_len": 512}
    plain = engine_facts(tmp_path / "plain", tiny_qwen3, extract=False, **options)
    ours = engine_facts(tmp_path / "ours", tiny_qwen3, **options)
    planned = hsx_plan(tiny_qwen3, tp=1, **options)
    taken = planned["staging_bytes"] + planned["collected_bytes"]
    block_bytes = planned["layouts"]["plain"]["capacity"]["block_bytes"]
    assert plain["kv_bytes"] == plain["num_gpu_blocks"] * block_bytes
    lost = plain["num_gpu_blocks"] - ours["num_gpu_blocks"]
    assert abs(lost * block_bytes - taken) <= block_bytes


def test_the_presets_are_configurations_of_which_vllm_makes_what_the_plan_assumes(tmp_path: Path) -> None:
    directories = {str(tmp_path / name): name for name in PRESETS}
    for directory, name in directories.items():
        config = PRESETS[name].config
        if config["model_type"].endswith("_text"):
            config = {
                "architectures": config["architectures"],
                "model_type": config["model_type"].removesuffix("_text"),
                "text_config": config,
                "vision_config": {},
            }
        Path(directory).mkdir()
        (Path(directory) / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, str(HERE / "plan_configs.py"), *directories],
        env={**os.environ, **process_environment(npus=4)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("configs:")), None)
    assert line is not None, done.stdout[-4000:]
    defaults = command.parse_arguments(["MODEL"])
    for directory, made in json.loads(line.removeprefix("configs:")).items():
        name = directories[directory]
        shape = read_shape(name)
        capacity = made["plan"]["layouts"]["plain"]["capacity"]
        assert made["block_size"] == capacity["block_size"], name
        assert made["enable_prefix_caching"] is not shape.is_hybrid, name
        assert (made["hidden_size"], made["num_layers"], made["dtype"]) == (shape.hidden_size, shape.num_layers, shape.dtype), name
        assert made["head_size"] == shape.head_dim, name
        assert made["attention_layers"] == sum(kind is not LayerKind.LINEAR for kind in shape.layers), name
        assert made["max_num_batched_tokens"] == defaults.max_num_batched_tokens
        assert made["gpu_memory_utilization"] == defaults.gpu_memory_utilization
        assert made["max_concurrent_batches"] == 2
        if shape.is_hybrid:
            layers = capacity["groups"][0][0]
            assert made["mamba_page_size_padded"] * layers == capacity["block_bytes"], name
            assert made["mamba_block_size"] == capacity["groups"][1][1], name
        else:
            pairs = 1 if shape.is_latent else 2
            page = made["block_size"] * made["num_kv_heads"] * made["head_size"] * pairs * shape.dtype_bytes
            assert page * shape.num_layers == capacity["block_bytes"], name
