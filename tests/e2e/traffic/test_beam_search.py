"""`LLM.beam_search`: beams are not extracted; later requests to the same engine are.

Over HTTP: test_http_requests.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness import names_in, tokens
from launch import run_module

from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config


def test_the_beams_of_an_offline_search_leave_no_file(tiny_qwen3: Path, tmp_path: Path) -> None:
    storage = tmp_path / "hidden_states"
    arguments = {
        "model": str(tiny_qwen3),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,  # the emulator computes all of them while vLLM measures memory
        "gpu_memory_utilization": 0.5,
        "speculative_config": speculative_config((1, 2, 4)),
        "kv_transfer_config": kv_transfer_config(storage),
    }
    code, printed = run_module("offline_beam_search", json.dumps([arguments, tokens(9)]))
    assert code == 0, printed
    (line,) = [line for line in printed.splitlines() if line.startswith("answer: ")]
    path = Path(json.loads(line.removeprefix("answer: "))["hidden_states_path"])
    assert {name.removesuffix(".lock") for name in names_in(storage)} == {path.name}
