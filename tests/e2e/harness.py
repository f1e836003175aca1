"""Runs engines and servers on the emulated NPU for the tests, with our connector or with vLLM's in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_ascend_hsx.demo.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.demo.reference import Comparison, compare, reference_hidden_states
from vllm_ascend_hsx.emulator.launch import environment

HERE = Path(__file__).parent
HBM_BYTES = 2 << 30
# vllm-ascend's own general plugins: without ours, the engine is what its users have today.
UPSTREAM_PLUGINS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling,hsx_test_instruments"


def process_environment(*, npus: int, ours: bool = True, late: bool = True, instruments: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The environment of a process on the emulated NPU, to be added to the current one."""
    added = environment(npus=npus, hbm_bytes=HBM_BYTES, late=late)
    folders = [str(HERE / "instruments"), added.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    added["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, os.pathsep.join(folders).split(os.pathsep))))
    added["HSX_TEST_INSTRUMENTS"] = json.dumps(instruments or {})
    if not ours:
        added["VLLM_PLUGINS"] = UPSTREAM_PLUGINS
    return added


@dataclass
class Run:
    """What an engine did with a script."""

    model: Path
    storage: Path
    layer_ids: Sequence[int]
    result: dict[str, Any]
    log: str
    prompts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def requests(self) -> dict[str, Any]:
        return self.result["requests"]

    @property
    def error(self) -> str | None:
        """Traceback of what stopped the engine, or None."""
        return self.result["error"]

    def path(self, request_id: str) -> Path:
        return Path(self.requests[request_id]["kv_transfer_params"]["hidden_states_path"])

    def rows(self, request_id: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(request_id))

    def compare(self, request_id: str) -> Comparison:
        """The request's file against transformers."""
        return compare_file(self.path(request_id), self.model, self.prompts[request_id], self.layer_ids)


def compare_file(path: Path, model: Path, prompt: Sequence[int], layer_ids: Sequence[int]) -> Comparison:
    """A file against transformers on the CPU: token ids equal, rows within the tolerance of their dtype."""
    tensors = load_file(path)
    if tensors["token_ids"].tolist() != list(prompt):
        return Comparison(float("nan"), "mismatch", f"token_ids {tensors['token_ids'].tolist()} are not the prompt's")
    return compare(tensors["hidden_states"], reference_hidden_states(model, prompt, layer_ids))


def upstream_transfer_config(storage: Path) -> dict[str, Any]:
    """vLLM's own connector, as vllm-ascend's users have it."""
    return kv_transfer_config(storage) | {"kv_connector": "ExampleHiddenStatesConnector"}


def run_engine(
    directory: Path,
    model: Path,
    script: Sequence[Sequence[Any]],
    *,
    layer_ids: Sequence[int] = (1, 2, 4),
    extract: bool = True,
    ours: bool = True,
    late: bool = True,
    instruments: Mapping[str, Any] | None = None,
    connector_options: Mapping[str, Any] | None = None,
    timeout: float = 280,
    environ: Mapping[str, str] | None = None,
    **engine: Any,
) -> Run:
    """Run an engine in a process of its own.

    Args:
        directory: for the files and the log of this run.
        model: the target's directory.
        script: actions of driver.py.
        layer_ids: to extract, in the file's order.
        extract: without it the engine serves as if nothing of extraction existed.
        ours: our plugin and connector, or vLLM's.
        late: late mode of the emulator.
        instruments: see instruments/hsx_test_instruments.py.
        connector_options: added to kv_connector_extra_config.
        engine: EngineArgs.

    Raises:
        AssertionError: the driver ended without a result, or ran out of time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    storage = directory / "hidden_states"
    options: dict[str, Any] = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    if not ours:
        # vLLM refuses its connector together with chunked prefill.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    if extract:
        transfer = kv_transfer_config(storage) if ours else upstream_transfer_config(storage)
        transfer["kv_connector_extra_config"].update(connector_options or {})
        options |= {"speculative_config": speculative_config(layer_ids), "kv_transfer_config": transfer}
    options |= engine
    job, answer, log = directory / "job.json", directory / "result.json", directory / "engine.log"
    job.write_text(json.dumps({"engine": options, "script": list(script)}))
    npus = options.get("tensor_parallel_size", 1)
    with log.open("wb") as output:
        subprocess.run(
            [sys.executable, str(HERE / "driver.py"), str(job), str(answer)],
            env={**os.environ, **process_environment(npus=npus, ours=ours, late=late, instruments=instruments), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    text = log.read_text(errors="replace")
    assert answer.exists(), f"the engine's process ended without a result:\n{text[-4000:]}"
    prompts = {action[1]: action[2] for action in script if action[0] == "add"}
    return Run(model, storage, layer_ids, json.loads(answer.read_text()), text, prompts)


def read_trace(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Events of the instruments, by process id, in order."""
    return {
        int(path.stem.removeprefix("trace-")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(directory.glob("trace-*.jsonl"))
    }


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt of given length; different seeds share no prefix."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(8, 600, (length,), generator=generator).tolist()
