"""The threads of a worker use the worker's own NPU alone.

A thread that has set no device would give the process a context on NPU 0, with memory that the
profile of NPU 0's own worker has not seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ascend_npu_emulator.launch import environment

HARNESS = Path(__file__).parents[1]
PROGRAM = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import torch_npu
import worker_harness as harness

from ascend_npu_emulator.native import core

harness.DEVICE = torch.device("npu:1")
torch.npu.set_device(harness.DEVICE)
engine = harness.Engine(Path(sys.argv[2]), num_writers=lambda: 4)
for name in ("one", "two", "three"):
    engine.step(harness.started(engine.start(name, 8)), [(name, 0, 8)])
    engine.wait_until_decided(name)
engine.close()
print(json.dumps([engine.outcomes, core.contexts()]))
"""


def test_worker_creates_a_context_only_on_its_own_npu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HARNESS), str(tmp_path / "out")],
        env={**os.environ, **environment(npus=2, late=True, queue=True)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    outcomes, contexts = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == dict.fromkeys(("one", "two", "three"))
    assert [(device, thread) for device, thread, _, _ in contexts] == [(1, "MainThread")], contexts
