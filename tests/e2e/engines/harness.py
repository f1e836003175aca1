"""Run scripts on engines, and compare files with transformers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from session import EngineError, EngineSession

from vllm_ascend_hsx.demo.reference import Comparison, compare, reference_hidden_states
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX, token_of_workspace
from vllm_ascend_hsx.reader.lock_wait import wait_until_released
from vllm_ascend_hsx.sinks.workspace import LOCK

PUBLISH_SECONDS = 60.0
# In responses, before weights are loaded again.
FIRST_WEIGHTS = {"weight_versions": [[0, ""]]}


@dataclass
class Run:
    """Results of a script on an engine."""

    model: Path
    storage: Path
    layer_ids: Sequence[int]
    result: dict[str, Any]
    log: str

    @property
    def requests(self) -> dict[str, Any]:
        return self.result["requests"]

    @property
    def texts(self) -> dict[str, list[int]]:
        """Return the generated tokens of each request."""
        return {name: request["tokens"] for name, request in self.requests.items()}

    @property
    def error(self) -> str | None:
        """Traceback of the error that stopped the engine, or None."""
        return self.result["error"]

    def path(self, request_id: str) -> Path:
        return Path(self.requests[request_id]["kv_transfer_params"]["hidden_states_path"])

    def sequence(self, request_id: str) -> list[int]:
        """Return the tokens of the rows in the request's file."""
        request = self.requests[request_id]
        params = request["sampling"].get("extra_args", {}).get("kv_transfer_params", {})
        generated = request["tokens"][:-1] if params.get("include_output_tokens") else []
        return request["prompt"] + generated

    def rows(self, request_id: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(request_id))

    def compare(self, request_id: str) -> Comparison:
        """Compare the request's file with transformers."""
        return compare_file(
            self.path(request_id), self.model, self.sequence(request_id), self.layer_ids
        )


def compare_file(
    path: Path, model: Path, prompt: Sequence[int], layer_ids: Sequence[int]
) -> Comparison:
    """Compare token ids and rows of a file with transformers on the CPU."""
    wait_until_released(
        path.with_name(path.name + LOCK_SUFFIX), PUBLISH_SECONDS
    )  # a server publishes after it answers
    tensors = load_file(path)
    if tensors["token_ids"].tolist() != list(prompt):
        return Comparison(
            float("nan"),
            "mismatch",
            f"token_ids {tensors['token_ids'].tolist()} are not the prompt's",
        )
    return compare(tensors["hidden_states"], reference_hidden_states(model, prompt, layer_ids))


def run_engine(
    directory: Path,
    model: Path,
    script: Sequence[Sequence[Any]],
    *,
    timeout: float = 900,
    **options: Any,
) -> Run:
    """Run an engine in a separate process.

    Args:
        directory: for the files and the log of this run.
        model: directory of the target.
        script: actions of driver.py, or "published", to wait for the file of a request.
        timeout: total seconds for all actions.
        options: options of EngineSession.

    Raises:
        AssertionError: the driver ended without a result, or ran out of time.
    """
    deadline = time.monotonic() + timeout
    session = EngineSession(directory, model, timeout=timeout, **options)
    error: str | None = None
    try:
        with session:
            for action, *arguments in script:
                session.timeout = deadline - time.monotonic()
                if action == "add":
                    request_id, prompt, sampling = arguments
                    session.add(prompt, sampling, name=request_id)
                elif action == "abort":
                    session.abort(session.requests[arguments[0]])
                elif action == "published":
                    (path,) = session.paths(session.requests[arguments[0]])
                    wait_until_released(path.with_name(path.name + LOCK_SUFFIX), PUBLISH_SECONDS)
                else:
                    session.call(action, *arguments)
    except EngineError as failure:
        error = str(failure)
    result = {**session.facts, "preemptions": len(session.preemptions), "error": error}
    result["requests"] = {
        each.id: {**vars(each), "tokens": each.tokens} for each in session.requests.values()
    }
    return Run(model, session.storage, session.layer_ids, result, session.log)


def names_in(storage: Path) -> set[str]:
    """Return names in a storage directory and in workspaces, without locks."""
    names = set()
    for path in storage.iterdir():
        if token_of_workspace(path.name) is None:
            names.add(path.name)
        else:
            with suppress(FileNotFoundError):  # the server has stopped meanwhile
                names |= {f"{path.name}/{each}" for each in os.listdir(path) if each != LOCK}
    return names


def read_trace(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the events of the instruments, in order, by process id."""
    return {
        int(path.stem.removeprefix("trace-")): [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in sorted(directory.glob("trace-*.jsonl"))
    }


def check_contexts(trace: Mapping[int, list[dict[str, Any]]], npus: int) -> None:
    """Check that each worker's process, and no other, has a context on the worker's NPU.

    Args:
        trace: trace of the instrument trace_contexts.
        npus: NPUs that have a worker each; the machine may have more.
    """
    last = {process: events[-1] for process, events in trace.items() if events}
    assert len(last) == npus
    for event in last.values():
        others = [each for each in event["contexts"] if each["device"] != event["device"]]
        shown = "".join(
            (
                f"\nthread {each['thread']} used NPU {each['device']} by "
                f"{each['call']}:\n{each['python']}"
            )
            for each in others
        )
        assert not others, f"the worker of NPU {event['device']} has other contexts, too:{shown}"
    for event in last.values():
        used, unused = event["processes"][:npus], event["processes"][npus:]
        assert (set(used), sum(unused)) == ({1}, 0), (
            f"processes with a context on each NPU: {event['processes']}"
        )


def tokens(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of this length; different seeds share no prefix."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(8, 600, (length,), generator=generator).tolist()
