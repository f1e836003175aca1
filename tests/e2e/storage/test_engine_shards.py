"""An engine that writes shards: rows of every worker are right, and it seals all shards."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import FIRST_WEIGHTS, names_in, run_engine, tokens
from oracle import Oracle, Reference, Served
from session import EngineSession, Request

from vllm_ascend_hsx.cli import verify
from vllm_ascend_hsx.demo.compare import compare
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.protocol.api import REUSED_KEY
from vllm_ascend_hsx.protocol.names import MANIFEST
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.reader.shards import Shards

BLOCK = 128  # tokens in a KV block
SHARDS = {"sink": "shard", "shard_bytes": 1 << 20}


def members(storage: Path) -> list[str]:
    """Return the names that tarfile sees."""
    found = []
    for path in storage.glob("hsx-*.tar"):
        with tarfile.open(path) as tar:
            found += [info.name for info in tar]
    return sorted(found)


def copy_out_of_shards(session: EngineSession, check: Callable[[Request], None]) -> Request:
    """Copy the same block from open, sealed, and removed shards; return the last request."""

    def add(prompt: list[int]) -> Request:
        request = session.add(prompt, {"max_tokens": 1}, name="p")
        session.settle()
        check(request)
        return request

    prompt = tokens(BLOCK + 20, seed=31)
    request = add(prompt)
    for at, state in enumerate(("open", "sealed", "removed")):
        if state == "removed":
            add(tokens(300, seed=32))
        # Two requests, or one of 300 tokens, exceed SHARDS.
        assert len(list(session.storage.glob(f"hsx-*{MANIFEST}"))) == at
        if state == "removed":
            for path in session.storage.glob("hsx-*-*"):
                path.unlink()
        request = add([*prompt, *tokens(10 * at + 7)])
        assert request.reused == BLOCK, state
    return request


@pytest.mark.parametrize(
    "options", [{}, {"io": "direct", "durability": "fdatasync"}], ids=["default", "direct, durable"]
)
def test_rows_of_prompts_and_of_generated_tokens_are_right_in_shards(
    float32_qwen3: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    layer_ids = (0, 1, 2, 4)
    with EngineSession(
        tmp_path,
        float32_qwen3,
        layer_ids=layer_ids,
        dtype="float32",
        connector_options={**SHARDS, **options, "check_finite": True},
    ) as session:
        output = {
            "max_tokens": 6,
            "extra_args": {"kv_transfer_params": {"include_output_tokens": True}},
        }
        oracle = Oracle(Reference(float32_qwen3, 4, torch.float32), layer_ids)

        def check(request: Request) -> None:
            (path,) = session.paths(request)
            reused = {REUSED_KEY: request.reused} if request.reused else {}
            assert request.kv_transfer_params == {
                "hidden_states_path": str(path),
                **FIRST_WEIGHTS,
                **reused,
            }
            rows = len(request.prompt) + (5 if request.id.startswith("o") else 0)
            own = Served(request.id, tuple(request.sequence()[:rows]), request.begun, request.ended)
            assert oracle.verdict(path, own, rows, len(request.prompt)) == ""
            load(path, 10, verify=True)

        requests = [copy_out_of_shards(session, check)]
        for turn in range(4):
            requests += [
                session.add(tokens(length, seed=length + turn), {"max_tokens": 1}, name="p")
                for length in (1, 63, 400, 299)
            ]
            requests.append(session.add(tokens(100 + turn), output, name="o"))
            session.step(3)
        aborted = [
            session.add(tokens(300, seed=9), {"max_tokens": 1}, name="a"),
            session.add(tokens(40, seed=8), output, name="a"),
        ]
        session.step(2)
        for request in aborted:
            session.abort(request)
        requests.append(session.add(tokens(200, seed=5), {"max_tokens": 1}, name="p"))
        session.settle()
        for request in requests:
            check(request)
        for request in aborted:
            (path,) = session.paths(request)
            with pytest.raises(FileNotFoundError, match="no hidden states, lock or error"):
                load(path, 0)
        storage = session.storage
        assert all(name.startswith(("hsx-", ".hsx-")) for name in names_in(storage)), (
            "neither files nor locks"
        )
        expected = sorted(path.name for request in requests for path in session.paths(request))
    assert not [name for name in os.listdir(storage) if name.startswith(".")]
    manifests = [json.loads(path.read_text()) for path in storage.glob("hsx-*.json")]
    assert len(manifests) == len(list(storage.glob("hsx-*.tar"))) > 2
    assert {said["sealed_by"] for said in manifests} == {"server"}
    assert sum(said["members"] for said in manifests) == len(requests)
    assert members(storage) == expected
    assert verify.main([str(storage), "--jobs", "1"]) == 0


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_each_worker_writes_separate_shards_in_one_directory(
    tiny_minimax_m2: Path, tmp_path: Path, quantization: str
) -> None:
    lengths = (1, 7, 33, 101, 64, 6, 300, 200)
    run = run_engine(
        tmp_path,
        tiny_minimax_m2,
        [
            *(["add", f"r{length}", tokens(length), {"max_tokens": 3}] for length in lengths[:3]),
            ["step", 2],
            *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in lengths[3:]),
            ["drain"],
        ],
        environ={"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"},
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        connector_options={**SHARDS, "quantization": quantization},
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for length in lengths:
        states = load(run.path(f"r{length}"), 10, verify=True)
        assert states.token_ids.tolist() == run.sequence(f"r{length}")
        if quantization == "none":
            expected = reference_hidden_states(run.model, run.sequence(f"r{length}"), run.layer_ids)
            comparison = compare(states.hidden_states, expected)
            assert comparison.matches, comparison
        else:
            assert states.scales is not None
    tokens_of_shards = {path.name.split("-")[1] for path in run.storage.glob("hsx-*.json")}
    assert len(tokens_of_shards) == 2, "both workers have sealed theirs"
    assert len(Shards(run.storage).members()) == len(lengths)
    assert len(members(run.storage)) == len(lengths)
