"""What cannot be served is refused when the engine starts, before weights are loaded, with the option, its value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_engine
from transformers import OlmoConfig, OlmoForCausalLM, PreTrainedModel

from vllm_ascend_hsx.demo.tiny_models import VOCAB_SIZE, build_model

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt-option": (
        {"connector_options": {"num_writer_thread": 2}},
        "kv_connector_extra_config.num_writer_thread=2 is not an option. Did you mean 'num_writer_threads'?",
    ),
}


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class in vLLM does not collect hidden states."""

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        config = OlmoConfig(num_hidden_layers=layers, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
        return OlmoForCausalLM(config), {}

    return build_model(tmp_path_factory.mktemp("models") / "olmo", "olmo", create, dtype="bfloat16", layers=4, seed=0)


def test_a_target_that_collects_nothing_is_refused_before_it_is_loaded(olmo: Path, tmp_path: Path) -> None:
    run = run_engine(tmp_path, olmo, [])
    assert run.error is not None
    found = run.error + run.log
    assert "model='OlmoForCausalLM' collects no hidden states" in found
    assert "MiniMaxM2ForCausalLM" in found and "Qwen3NextForCausalLM" in found
    assert "Starting to load model" not in run.log


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(tiny_qwen3: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    run = run_engine(tmp_path, tiny_qwen3, [], **options)
    assert run.error is not None
    assert reason in run.error + run.log
    assert "Starting to load model" not in run.log
