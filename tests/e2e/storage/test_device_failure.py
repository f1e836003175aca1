"""A failed device ends the server within seconds, and spoils no answer and no file."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from harness import names_in, tokens
from launch import START_SECONDS, tiny_server
from oracle import Oracle, Reference, Served
from quantised.modelslim import plain, write_modelslim

import vllm_ascend_hsx
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStatesError

LAYER_IDS = (4, 1, 2)
PROMPT = tokens(9)
AT_A_TIME = 4
TEXT = "EZ9999: Inner Error!"  # of the emulated driver
SECONDS = 60.0  # on a busy machine; vLLM's own timeout is 300 seconds


class Fault(NamedTuple):
    """A device call that fails.

    Attributes:
        launch: see csrc/streams/faults.h.
        workers: number of tensor-parallel workers.
        rotated: True if the target is rotated (QuaRot), to turn rows back.
    """

    launch: str
    workers: int
    rotated: bool = False


FAULTS = {
    "stack": Fault("aten::stack.out", 1),
    "stack of the second worker": Fault("aten::stack.out npu:1", 2),
    "matrix multiplication": Fault("aten::mm.out drafter/rotation.py", 1, rotated=True),
    "copy": Fault("device_to_host hsx-lander", 1),
    "copy of the second worker": Fault("device_to_host hsx-lander npu:1", 2),
    "record": Fault("record_event hsx-lander", 1),
    "wait": Fault("wait_event hsx-lander", 1),
}


def send(url: str, model: str) -> list[int] | None:
    """Return the generated tokens, or None without an answer of status 200."""
    sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    body = {"model": model, "prompt": PROMPT, "return_token_ids": True, **sampling}
    with suppress(httpx.HTTPError):
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
        if response.status_code == 200:
            found: list[int] = response.json()["choices"][0]["token_ids"]
            return found
    return None


def outcome(path: Path) -> tuple[list[int], str]:
    """Return the tokens of a complete file, or the reason of a failure."""
    try:
        return vllm_ascend_hsx.load(path, timeout=SECONDS).token_ids.tolist(), ""
    except HiddenStatesError as error:
        return [], error.reason


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_device_call_ends_the_server_and_spoils_no_answer_and_no_file(
    tmp_path: Path, float32_qwen3: Path, name: str
) -> None:
    fault = FAULTS[name]
    model, dtype, extra = float32_qwen3, torch.float32, ("--dtype", "float32")
    if fault.rotated:  # vLLM refuses float32 together with a description of the rotation
        model = write_modelslim(float32_qwen3, tmp_path / "rotated", plain, rotated=True)
        dtype, extra = torch.bfloat16, ("--dtype", "bfloat16", "--quantization", "ascend")
    armed = tmp_path / "fault"
    environ = {"NPU_EMULATOR_QUEUE": "1", "NPU_EMULATOR_FAIL_FILE": str(armed)}
    options: dict[str, Any] = {
        "expert_parallel": False,
        "extra": extra,
        "tensor_parallel": fault.workers,
    }
    with tiny_server(tmp_path, model, LAYER_IDS, environ=environ, **options) as server:
        server.wait_ready(START_SECONDS)
        ask = partial(send, server.url, str(model))
        right = ask()
        assert right is not None
        # The names in the server's own directory change.
        (file,) = {
            name.removesuffix(LOCK_SUFFIX)
            for name in names_in(tmp_path / "hidden_states")
            if "/" not in name
        }
        assert (
            vllm_ascend_hsx.load(
                tmp_path / "hidden_states" / file, timeout=SECONDS
            ).token_ids.tolist()
            == PROMPT
        )
        armed.write_text(fault.launch + "\n")
        began = time.monotonic()
        answers = [right]
        with ThreadPoolExecutor(AT_A_TIME) as pool:  # each worker then owns some
            while None not in answers:
                assert time.monotonic() < began + SECONDS, "the server goes on"
                answers += pool.map(lambda _: ask(), range(AT_A_TIME))
        assert ask() is None
        assert server.process is not None
        server.process.wait(SECONDS)
    assert all(answer in (right, None) for answer in answers), "the failure has spoilt an answer"
    oracle = Oracle(Reference(float32_qwen3, 4, dtype), LAYER_IDS)
    reasons = []
    for file in {name.removesuffix(ERROR_SUFFIX) for name in names_in(tmp_path / "hidden_states")}:
        path = tmp_path / "hidden_states" / file
        if path.suffix == ".lock":
            continue
        _, reason = outcome(path)
        if reason:
            reasons.append(reason)
            # A worker whose peer has ended has another error.
            assert TEXT in reason or (
                fault.workers > 1 and reason.startswith("the engine failed: ")
            )
            assert "storage" not in reason
        else:
            own = Served(file, (*PROMPT, 0), 0, None)
            assert oracle.verdict(path, own, len(PROMPT), len(PROMPT), [own]) == ""
    assert any(TEXT in reason for reason in reasons)
