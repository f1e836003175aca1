"""An engine that stores float8: rows within float8's error, in half the bytes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from harness import tokens
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from oracle import EXACT, Reference
from safetensors import safe_open
from session import EngineSession, Request

from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.load import HiddenStates, load

LAYER_IDS = (0, 2, 4, 1)
LENGTHS = (1, 7, 64, 150)  # the last one in three chunks
BLOCK = 128  # tokens in a KV block
FLOAT16_ROUNDING = (
    0.005  # of a row, relative; an eighth of oracle.py's limit for bfloat16 (three bits less)
)
FP8 = {"quantization": "fp8", "check_finite": True}


def serve(session: EngineSession) -> list[tuple[Request, Path, HiddenStates]]:
    """Serve prompts, then generate tokens; return each request, file and storage format."""
    requests = []
    prompts = [tokens(length, seed=length) for length in LENGTHS]
    for prompt in (*prompts, [*prompts[-1], *tokens(70)]):
        requests.append(session.add(prompt, {"max_tokens": 1}, name=f"r{len(prompt)}"))
        session.settle()
    assert [request.reused for request in requests] == [0, 0, 0, 0, BLOCK]
    params = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
    requests.append(session.add(tokens(20), {"max_tokens": 6, **params}, name="generated"))
    session.settle()
    paths = [path_of(session, request) for request in requests]
    return [
        (request, path, load(path, 10, verify=True, dequantize=False))
        for request, path in zip(requests, paths, strict=True)
    ]


def path_of(session: EngineSession, request: Request) -> Path:
    (path,) = session.paths(request)
    return path


def test_rows_are_right_within_float8_error(float32_qwen3: Path, tmp_path: Path) -> None:
    """A float32 target: only float8 rounds."""
    with EngineSession(
        tmp_path, float32_qwen3, layer_ids=LAYER_IDS, dtype="float32", connector_options=FP8
    ) as session:
        reference = Reference(float32_qwen3, 4, torch.float32)
        for request, path, stored in serve(session):
            own = request.sequence()[: len(stored.token_ids)]
            assert len(own) == len(request.prompt) + (
                5 if request.id.startswith("generated") else 0
            )
            assert stored.token_ids.tolist() == own
            assert (stored.hidden_states.dtype, stored.layer_ids) == (
                torch.float8_e4m3fn,
                list(LAYER_IDS),
            )
            expected = reference.rows(own, LAYER_IDS)
            assert stored.scales is not None
            largest = expected.abs().amax((1, 2))
            assert torch.allclose(
                stored.scales.view(-1).double(), largest / 448, rtol=1e-6, atol=EXACT / 448
            )
            rows = load(path, 10).hidden_states
            assert rows.dtype == torch.float32
            allowed = (
                torch.maximum(expected.abs() * 2**-4, stored.scales.double() * 2**-10) + 2 * EXACT
            )
            assert bool(((rows.double() - expected).abs() <= allowed).all())
            assert examine(path).verdict == "verified"


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.bfloat16, "tiny_minimax_m2"),
        pytest.param(torch.float16, "float32_qwen3", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stored_float8_equals_hs_connectors_in_half_the_bytes(
    dtype: torch.dtype, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(target)
    stored: dict[str, list[HiddenStates]] = {}
    data_bytes: dict[str, int] = {}
    for name, options in (("plain", {}), ("fp8", FP8)):
        directory = tmp_path / name
        named = str(dtype).removeprefix("torch.")
        with EngineSession(
            directory, model, layer_ids=LAYER_IDS, dtype=named, connector_options=options
        ) as session:
            found = serve(session)
            stored[name] = [states for _, _, states in found]
            data_bytes[name] = sum(_data_bytes(path) for _, path, _ in found)
            if name == "fp8" and dtype == torch.bfloat16:  # hs_connectors supports only this dtype
                _their_reader_waits_for_the_lock_and_gives_the_rows_of_ours(session, directory)
    reference = Reference(model, 4, torch.float32)
    for plain, quantised in zip(stored["plain"], stored["fp8"], strict=True):
        assert (plain.dtype, quantised.dtype) == (dtype, dtype)
        if dtype == torch.float16:  # no other test covers float16
            expected = reference.rows(plain.token_ids.tolist(), LAYER_IDS)
            difference = (plain.hidden_states - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert float(difference.max()) < FLOAT16_ROUNDING
        values, scales = quantize_tensor_to_fp8(plain.hidden_states)
        assert torch.equal(quantised.hidden_states.view(torch.uint8), values.view(torch.uint8))
        assert quantised.scales is not None and torch.equal(quantised.scales, scales)
        assert torch.equal(quantised.token_ids, plain.token_ids)
        assert quantised.metadata["quantization"] == "fp8_e4m3_per_token"
    num_tokens = sum(len(each.token_ids) for each in stored["plain"])
    row = stored["plain"][0].hidden_states[0].numel()
    assert data_bytes == {"plain": num_tokens * (2 * row + 8), "fp8": num_tokens * (row + 8 + 4)}
    assert 0.5 < data_bytes["fp8"] / data_bytes["plain"] < 0.51


def _data_bytes(path: Path) -> int:
    """Return the number of bytes after the header of a file, as safetensors counts them."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    size: int = max(tensor["data_offsets"][1] for tensor in header.values())
    assert path.stat().st_size == 8 + length + size
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == set(header)
    return size


def _their_reader_waits_for_the_lock_and_gives_the_rows_of_ours(
    session: EngineSession, directory: Path
) -> None:
    request = session.add(tokens(150, seed=3), {"max_tokens": 1}, name="waited-for")
    session.step()
    path = path_of(session, request)
    assert path.with_name(path.name + ".lock").exists() and not path.exists()
    samples: list[dict[str, torch.Tensor] | None] = []
    transfer = FP8Transfer(directory)
    reader = threading.Thread(
        target=lambda: samples.append(transfer.get_generated({"hidden_states_path": str(path)})),
        daemon=True,
    )
    reader.start()
    session.settle()
    reader.join(60)
    (sample,) = samples
    assert sample is not None and set(sample) == {"hidden_states", "token_ids"}
    ours = load(path, 10)
    assert sample["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(sample["hidden_states"], ours.hidden_states)
    assert sample["token_ids"].tolist() == tokens(150, seed=3)
    assert not path.with_name(path.name + ".lock").exists()  # as with vLLM's own files
