"""Readers of vLLM and speculators: they wait for a file of ours, load it and remove it."""

from __future__ import annotations

import ast
import fcntl
import os
import threading
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sink_harness import listing, token_ids, wait_for_sleepers
from test_reader_load import assert_rows, written

from vllm_ascend_hsx.reader.load import HiddenStates
from vllm_ascend_hsx.sinks.file import FileSink


def vllm_functions() -> dict[str, Any]:
    """Return vLLM's reader, compiled from the source: importing vLLM takes 10 s and a device."""
    source = distribution("vllm").locate_file(
        "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
    )
    wanted = ("load_hidden_states", "cleanup_hidden_states")
    module = ast.parse(Path(str(source)).read_text())
    module.body = [
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    namespace: dict[str, Any] = {"fcntl": fcntl, "os": os, "torch": torch, "load_file": load_file}
    exec(compile(module, str(source), "exec"), namespace)
    return namespace


def test_vllms_own_reader_sleeps_until_commit_and_loads_before_and_after(
    sink: FileSink, tmp_path: Path
) -> None:
    functions = vllm_functions()
    file = written(sink, tmp_path)
    results: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(
        target=lambda: results.append(functions["load_hidden_states"](str(file.path)))
    )
    thread.start()
    wait_for_sleepers(Path(f"{file.path}.lock"))
    assert results == []
    file.commit(token_ids(5), 5)
    thread.join(30)
    results.append(functions["load_hidden_states"](str(file.path)))
    for result in results:
        assert_rows(HiddenStates(result["hidden_states"], result["token_ids"], {}), 5)
    functions["cleanup_hidden_states"](str(file.path))
    assert listing(tmp_path) == []


def test_speculators_own_reader_waits_until_commit_and_loads_before_and_after(
    sink: FileSink, tmp_path: Path
) -> None:
    from hs_connectors.transfer import FileTransfer

    transfer = FileTransfer(tmp_path)
    file = written(sink, tmp_path, "hs_0")
    results: list[dict[str, torch.Tensor] | None] = []
    thread = threading.Thread(
        target=lambda: results.append(
            transfer.get_generated({"hidden_states_path": str(file.path)})
        )
    )
    thread.start()
    thread.join(0.25)  # the reader polls, so the test cannot see that it waits
    assert results == []
    file.commit(token_ids(5), 5)
    thread.join(30)
    results.append(transfer.get_cached(0))
    for result in results:
        assert result is not None
        assert_rows(HiddenStates(result["hidden_states"], result["token_ids"], {}), 5)
    transfer.delete(str(file.path))
    assert listing(tmp_path) == []
