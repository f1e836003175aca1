"""`LLM.beam_search`: its beams are not extracted, and what the same engine is asked for afterwards is. Over HTTP: test_http_requests.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import START_SECONDS, names_in, process_environment, tokens

from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

arguments, prompt = json.loads(sys.argv[1])
llm = LLM(**arguments)
(found,) = llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
assert [len(each.tokens) for each in found.sequences] == [len(prompt) + 5] * 3
(answer,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1))
print("\\nanswer:", json.dumps(answer.kv_transfer_params))
"""


def test_the_beams_of_an_offline_search_leave_no_file(tiny_qwen3: Path, tmp_path: Path) -> None:
    storage = tmp_path / "hidden_states"
    arguments = {
        "model": str(tiny_qwen3),
        "enforce_eager": True,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.5,
        "speculative_config": speculative_config((1, 2, 4)),
        "kv_transfer_config": kv_transfer_config(storage),
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps([arguments, tokens(9)])]
    environment = os.environ | process_environment(npus=1)
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer: ")]
    path = Path(json.loads(line.removeprefix("answer: "))["hidden_states_path"])
    assert {name.removesuffix(".lock") for name in names_in(storage)} == {path.name}
