"""Commands of vllm-ascend's tutorials with our two options: rows of tiny models over HTTP.

With test_tutorial_commands.py (MiniMax-M2.7) these are three families for A2 and three for A3.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from harness import compare_file, tokens
from launch import SMALL, START_SECONDS, ForkedServer, process_environment
from test_graph_modes import COMPILER, ENVIRON
from tiny_deepseek_v3 import add_mtp_layer, build_deepseek_v3
from tiny_gpt_oss import build_gpt_oss
from tiny_hybrid import build_qwen3_next
from tiny_qwen3_moe import build_qwen3_moe

from vllm_ascend_hsx.demo.server import free_port
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

pytestmark = pytest.mark.long
LAYER_IDS = (4, 0, 2)
# Sent together: steps then have prompts, chunks of prompts and decodes.
PROMPTS = [tokens(length, seed=length) for length in (1, 3, 40, 64, 130, 300)]
GENERATING = {"max_tokens": 9, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
WITH_OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}


class Tutorial(NamedTuple):
    """The server of a tutorial, and the changes for a tiny model.

    Attributes:
        soc: generation of the NPUs.
        build: builds the target.
        options: values of the command's options; True for an option without a value.
        sizes: values of options that are sizes, instead of the command's, in addition to SMALL.
        changed: values of other options, instead of the command's. None removes an option.
    """

    soc: str
    build: Callable[[Path], Path]
    options: Mapping[str, Any]
    sizes: Mapping[str, str]
    changed: Mapping[str, Any]


# The default compiler of graphs is not emulated.
COMPILED = {"--additional-config": COMPILER}
EAGER = {"--compilation-config": None, "--enforce-eager": True}
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY"}
TUTORIALS = {
    # Qwen3-30B-A3B.md:244 in docs/source/tutorials/models of vllm-ascend 0.23.0.post1.
    "qwen3-30b-a3b": Tutorial(
        "a2",
        build_qwen3_moe,
        {
            "--served-model-name": "qwen3",
            "--trust-remote-code": True,
            "--max-num-seqs": "100",
            "--max-model-len": "40960",
            "--max-num-batched-tokens": "16384",
            "--tensor-parallel-size": "4",
            "--enable-expert-parallel": True,
            "--quantization": "ascend",
            "--distributed_executor_backend": "mp",
            "--no-enable-prefix-caching": True,
            "--async-scheduling": True,
            "--compilation-config": GRAPHS,
            "--additional-config": {"enable_flashcomm1": True, "weight_nz_mode": 2},
            "--gpu-memory-utilization": "0.95",
        },
        sizes={"--tensor-parallel-size": "2"},
        # The tiny weights are not quantised. In float32 rounding changes no routing.
        changed={
            "--quantization": None,
            "--dtype": "float32",
            "--additional-config": {"enable_flashcomm1": True, "weight_nz_mode": 2, **COMPILER},
        },
    ),
    # gpt-oss-120b.md:114. The window is larger than any prompt: vllm-ascend's is one key too wide.
    "gpt-oss-120b": Tutorial(
        "a2",
        partial(build_gpt_oss, window=512),
        {
            "--served-model-name": "gpt-oss-120b-bf16",
            "--trust-remote-code": True,
            "--max-num-seqs": "4",
            "--gpu-memory-utilization": "0.90",
            "--tensor-parallel-size": "4",
            "--max-model-len": "4096",
            "--max-num-batched-tokens": "4096",
            "--enable-expert-parallel": True,
            "--compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 3, 4]},
        },
        sizes={"--tensor-parallel-size": "2", "--max-num-seqs": "4"},
        changed=COMPILED,
    ),
    # DeepSeek-V3.1.md:260, without VLLM_ASCEND_BALANCE_SCHEDULING. We refuse it.
    "deepseek-v3.1": Tutorial(
        "a3",
        lambda directory: add_mtp_layer(build_deepseek_v3(directory)),
        {
            "--data-parallel-size": "4",
            "--tensor-parallel-size": "4",
            "--quantization": "ascend",
            "--seed": "1024",
            "--served-model-name": "deepseek_v3",
            "--enable-expert-parallel": True,
            "--max-num-seqs": "16",
            "--max-model-len": "16384",
            "--max-num-batched-tokens": "4096",
            "--trust-remote-code": True,
            "--no-enable-prefix-caching": True,
            "--gpu-memory-utilization": "0.92",
            "--compilation-config": GRAPHS,
        },
        sizes={"--data-parallel-size": "2", "--tensor-parallel-size": "2"},
        # The tiny weights are not quantised.
        changed={"--quantization": None, **COMPILED},
    ),
    # Qwen3-Next.md:133. Graphs of hybrid targets are not emulated.
    "qwen3-next": Tutorial(
        "a3",
        build_qwen3_next,
        {
            "--served-model-name": "qwen3_next",
            "--tensor-parallel-size": "4",
            "--max-model-len": "32768",
            "--gpu-memory-utilization": "0.8",
            "--max-num-batched-tokens": "4096",
            "--compilation-config": GRAPHS,
        },
        # With aligned states a chunk is a whole block of 128.
        sizes={"--tensor-parallel-size": "2", "--max-num-batched-tokens": "192"},
        changed=EAGER,
    ),
}


def server(tutorial: Tutorial, model: Path, directory: Path) -> ForkedServer:
    """Return the server of a tutorial, not started, with the two options of extraction."""
    ours = {
        "--speculative-config": speculative_config(LAYER_IDS),
        "--kv-transfer-config": kv_transfer_config(directory / "hidden_states"),
    }
    options = {**tutorial.options, **SMALL, **tutorial.sizes, **tutorial.changed, **ours}
    words: list[str] = []
    for option, value in options.items():
        if value is not None:
            words += (
                [option]
                if value is True
                else [option, value if isinstance(value, str) else json.dumps(value)]
            )
    npus = int(options["--tensor-parallel-size"]) * int(options.get("--data-parallel-size", "1"))
    environment = process_environment(npus=npus, soc=tutorial.soc) | ENVIRON
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        *words,
        "--port",
        str(port),
    ]
    return ForkedServer(command, port=port, log=directory / "server.log", environment=environment)


@pytest.mark.parametrize("name", TUTORIALS)
def test_rows_are_right_with_the_command_of_a_tutorial(name: str, tmp_path: Path) -> None:
    tutorial = TUTORIALS[name]
    model = tutorial.build(tmp_path / "model")
    with server(tutorial, model, tmp_path) as started:
        started.wait_ready(START_SECONDS)

        def complete(prompt: list[int]) -> Any:
            body = {
                "model": tutorial.options["--served-model-name"],
                "prompt": prompt,
                **GENERATING,
                **WITH_OUTPUT,
            }
            return (
                httpx.post(f"{started.url}/v1/completions", json=body, timeout=120)
                .raise_for_status()
                .json()
            )

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(complete, PROMPTS))
        started.stop()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        rows_of = prompt + answer["choices"][0]["token_ids"][:-1]
        comparison = compare_file(
            Path(answer["kv_transfer_params"]["hidden_states_path"]), model, rows_of, LAYER_IDS
        )
        assert comparison.matches, f"{len(prompt)}: {comparison}"
