"""Files of an engine with direct I/O, durability and every check hold the right rows."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from harness import tokens
from oracle import Reference
from session import EngineSession
from stage import Stage

from vllm_ascend_hsx.reader.load import load

BLOCK = 128  # tokens in a KV block
LAYER_IDS = (0, 1, 2, 4)  # rows of a multiple of 512 bytes
OPTIONS = {
    "io": "direct",
    "durability": "fdatasync",
    "check_finite": True,
    "file_mode": "0600",
    "num_writer_threads": 3,
}


def test_direct_and_durable_files_hold_the_right_rows(float32_qwen3: Path, tmp_path: Path) -> None:
    options = {
        "max_num_batched_tokens": 64,
        "layer_ids": LAYER_IDS,
        "dtype": "float32",
        "connector_options": OPTIONS,
    }
    with EngineSession(tmp_path, float32_qwen3, **options) as session:
        stage = Stage(session, Reference(float32_qwen3, 4, torch.float32))
        requests = [
            stage.add(tokens(length, seed=length), name=f"r{length}") for length in (1, 7, 64, 150)
        ]
        requests.append(stage.add(tokens(20), expect="output", max_tokens=6))
        stage.session.settle()
        copied = stage.add([*tokens(150, seed=150), *tokens(70)], name="copied")
        requests.append(copied)
        stage.check()
        assert copied.reused == BLOCK
        for request in requests:
            (path,) = session.paths(request)
            load(path, 10, verify=True)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
