"""Fixtures of the e2e tests: one engine run serves many tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stage import Stages


@pytest.fixture(scope="session")
def float32_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny dense Qwen3 in float32, for exact comparisons.

    Residual streams, and so rounding errors, are a quarter as large as in other tiny models: at
    most 3e-6.
    """
    from safetensors.torch import load_file, save_file

    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    directory = build_qwen3(tmp_path_factory.mktemp("models") / "qwen3-float32", dtype="float32")
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weight.mul_(0.25)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    from stage import Stages

    with closing(Stages(tmp_path_factory.mktemp("stages"))) as stages:
        yield stages
