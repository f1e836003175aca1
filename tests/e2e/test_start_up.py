"""What cannot be served is refused when the engine starts, before weights are loaded, with the option, its value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_engine

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt-option": (
        {"connector_options": {"num_writer_thread": 2}},
        "kv_connector_extra_config.num_writer_thread=2 is not an option. Did you mean 'num_writer_threads'?",
    ),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(tiny_qwen3: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    run = run_engine(tmp_path, tiny_qwen3, [], **options)
    assert run.error is not None
    assert reason in run.error + run.log
    assert "Starting to load model" not in run.log
