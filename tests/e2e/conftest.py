"""Fixtures of the e2e tests: one engine run serves many claims."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def float32_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny dense Qwen3 in float32, for exact comparisons."""
    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    return build_qwen3(tmp_path_factory.mktemp("models") / "qwen3-float32", dtype="float32")
