"""Servers and engines that are stopped: computed rows reach files, other files name the reason.

The storage is slow: it accepts rows of answered prompts only after a worker has been closing for
long.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import compare_file, tokens
from launch import FLASHCOMM, START_SECONDS, tiny_server
from session import EngineSession

import vllm_ascend_hsx
from vllm_ascend_hsx import HiddenStatesError
from vllm_ascend_hsx.demo.server import Server, group_members, wait_for_ends
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED

LAYER_IDS = (4, 1, 3)
STOP_SECONDS = 150
ROW_BYTES = len(LAYER_IDS) * 256 * 2
HELD = (40, 50, 70)  # tokens of the prompts whose rows the storage accepts late
LATE_ROWS = 20  # of a late write: a staging slot has 32, and all other prompts have fewer
EXECUTOR_SECONDS = 8  # after which vLLM's executor kills workers


def slow(seconds: float, row_bytes: int = ROW_BYTES) -> dict[str, Any]:
    return {"storage_that_answers_late": {"seconds": seconds, "bytes": LATE_ROWS * row_bytes}}


def serve(directory: Path, model: Path, seconds: float, *extra: str, **options: Any) -> Server:
    # A writer for each file: a delayed write delays no other.
    connector = {"num_writer_threads": 8, "drain_timeout_s": 60, "storage_timeout_s": 240}
    options = {"expert_parallel": False, "max_model_len": 4096, "connector": connector, **options}
    common = {"instruments": slow(seconds), "environ": FLASHCOMM, "tensor_parallel": 2}
    return tiny_server(directory, model, LAYER_IDS, extra=extra, **common, **options)


def held_prompts(server: Server, model: Path) -> dict[Path, list[int]]:
    """Have prompts computed, and return tokens by file."""
    found = {}
    for length in HELD:
        body = {"model": str(model), "prompt": tokens(length), "max_tokens": 1, "temperature": 0}
        response = (
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
            .raise_for_status()
            .json()
        )
        found[Path(response["kv_transfer_params"]["hidden_states_path"])] = tokens(length)
    assert not any(path.exists() for path in found)
    return found


class Stream:
    """A request with rows of the output, in flight when this returns.

    Attributes:
        id: id of the response.
        tokens: of the prompt, then the generated ones.
        finish_reason: None if the stream broke off.
        error: of the event that ended the stream, or None.
    """

    def __init__(self, server: Server, model: Path, prompt: Sequence[int], max_tokens: int) -> None:
        self.id, self.tokens, self.finish_reason = "", list(prompt), None
        self.error: dict[str, Any] | None = None
        self._body = {
            "model": str(model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._body |= {
            "stream": True,
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }
        self._url = f"{server.url}/v1/completions"
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.wait_for_tokens(len(prompt) + 1)

    def wait_for_tokens(self, number: int) -> None:
        """Wait until prompt and generated tokens are `number` together."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.tokens) >= number or not self._thread.is_alive(), 120
            )
        assert len(self.tokens) >= number, (self.finish_reason, self.error)

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=STOP_SECONDS) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.RemoteProtocolError:
            pass  # the server has ended: finish_reason is None
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        with self._changed:
            self.id = chunk["id"]
            for choice in chunk["choices"]:
                self.tokens += choice.get("token_ids") or []
                self.finish_reason = choice["finish_reason"]
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join(STOP_SECONDS)
        assert not self._thread.is_alive()


class Answer:
    """A request without streaming, with rows of the output. In flight when this returns.

    Attributes:
        path: path of the file.
        status, body: HTTP response; None if the connection broke off.
    """

    def __init__(self, server: Server, model: Path, endpoint: str, storage: Path) -> None:
        self.status: int | None = None
        self.body: dict[str, Any] = {}
        said = (
            {"messages": [{"role": "user", "content": "Go on."}]}
            if "chat" in endpoint
            else {"prompt": tokens(13)}
        )
        self._request = {
            "model": str(model),
            "max_tokens": 3500,
            "temperature": 0,
            "ignore_eos": True,
            **said,
        }
        self._request["kv_transfer_params"] = {"include_output_tokens": True}
        self._url = f"{server.url}/v1/{endpoint}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.path = self._wait_for_file(
            storage, f"{'chatcmpl' if 'chat' in endpoint else 'cmpl'}-unanswered"
        )

    def _wait_for_file(self, storage: Path, response_id: str) -> Path:
        deadline = time.monotonic() + 120
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                return vllm_ascend_hsx.find(storage, response_id)
            self._thread.join(0.05)
        raise AssertionError(f"{response_id} was not begun: {self.status} {self.body}")

    def _run(self) -> None:
        with suppress(httpx.RemoteProtocolError, httpx.ReadError):
            response = httpx.post(
                self._url,
                json=self._request,
                headers={"X-Request-Id": "unanswered"},
                timeout=STOP_SECONDS,
            )
            self.status = response.status_code
            with suppress(ValueError):  # an HTTP 500 of the web framework itself is text
                self.body = response.json()

    def join(self) -> None:
        self._thread.join(STOP_SECONDS)
        assert not self._thread.is_alive()


def send_until_it_stops(server: Server, model: Path) -> None:
    """Send requests over one connection; an unanswered request would keep the server alive."""
    body = {
        "model": str(model),
        "prompt": tokens(13),
        "max_tokens": 1,
        "kv_transfer_params": {"hidden_states": False},
    }
    with httpx.Client(timeout=None) as client, suppress(httpx.TransportError):
        while client.post(f"{server.url}/v1/completions", json=body).status_code == 200:
            pass


def wait_for_the_end(server: Server) -> None:
    """Wait until no process of the server is left, and check the exit code."""
    assert server.process is not None
    try:
        assert server.process.wait(STOP_SECONDS) == 0, server.log_tail()
    except subprocess.TimeoutExpired:
        raise AssertionError(
            f"processes {group_members(server.process.pid)} run on:\n{server.log_tail()}"
        ) from None
    deadline = time.monotonic() + 30
    while left := group_members(server.process.pid):
        assert time.monotonic() < deadline, left
        wait_for_ends(left, deadline - time.monotonic())


def assert_they_are_right(
    found: dict[Path, list[int]], model: Path, layer_ids: Sequence[int] = LAYER_IDS
) -> None:
    for path, prompt in found.items():
        vllm_ascend_hsx.load(path, timeout=0)  # the lock is free
        comparison = compare_file(path, model, prompt, layer_ids)
        assert comparison.matches, comparison


def assert_the_reason_is_there(path: Path, log: str) -> None:
    with pytest.raises(HiddenStatesError, match=SERVER_STOPPED):
        vllm_ascend_hsx.load(path, timeout=0)
    lines = [line for line in log.splitlines() if "stopping without the files of" in line]
    assert [line for line in lines if path.name.removesuffix(".safetensors") in line], lines


def assert_nothing_else_is_there(storage: Path, *groups: Sequence[Path]) -> None:
    expected = {path.name for group in groups for path in group}
    visible = {name.removesuffix(".lock").removesuffix(".error") for name in os.listdir(storage)}
    assert visible == expected


def assert_no_file_is_named(answer: Answer) -> None:
    """Check the answer of a request that the server's end cut off."""
    assert answer.status in (None, 200, 500), answer.body
    assert not answer.body.get("kv_transfer_params")
    if answer.status == 200:
        assert [choice["finish_reason"] for choice in answer.body["choices"]] == ["abort"]


@pytest.mark.long
@pytest.mark.parametrize("api_servers", [1, 2])
def test_sigterm_to_a_server_with_several_engines_leaves_rows_or_reasons(
    api_servers: int, tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    """The storage needs more time than the executor gives the workers.

    With one API server, requests have --shutdown-timeout. vLLM disconnects several API servers from
    the engines at once.
    """
    options = {"data_parallel": 2, "expert_parallel": True}
    extra = ("--shutdown-timeout", "10", "--api-server-count", str(api_servers))
    with serve(tmp_path, tiny_minimax_m2, EXECUTOR_SECONDS + 2, *extra, **options) as server:
        server.wait_ready(START_SECONDS)
        long = Stream(server, tiny_minimax_m2, tokens(9), 4000)
        held = held_prompts(server, tiny_minimax_m2)
        short = Stream(server, tiny_minimax_m2, tokens(11), 4)
        storage = tmp_path / "hidden_states"
        unanswered = [
            Answer(server, tiny_minimax_m2, each, storage)
            for each in ("completions", "chat/completions")
        ]
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        wait_for_the_end(server)
        for each in (short, long, *unanswered):
            each.join()
    log = server.log.read_text(errors="replace")
    assert log.count(" extracts layers ") == 1
    paths = {stream: vllm_ascend_hsx.find(storage, stream.id) for stream in (short, long)}
    assert_they_are_right(held, tiny_minimax_m2)
    if api_servers == 1:
        assert (short.finish_reason, short.error) == ("length", None)
        assert_they_are_right({paths[short]: short.tokens[:-1]}, tiny_minimax_m2)
    else:
        vllm_ascend_hsx.load(paths[short], timeout=0)
    assert long.finish_reason in (None, "abort")
    for each in unanswered:
        assert_no_file_is_named(each)
    failed = [paths[long], *(each.path for each in unanswered)]
    for path in failed:
        assert_the_reason_is_there(path, log)
    assert_nothing_else_is_there(storage, [*held], [paths[short]], failed)


def test_two_ctrl_c_to_every_process_leave_rows_or_reasons(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, tiny_qwen3, 3) as server:
        server.wait_ready(START_SECONDS)
        long = Stream(server, tiny_qwen3, tokens(9), 4000)
        held = held_prompts(server, tiny_qwen3)
        storage = tmp_path / "hidden_states"
        unanswered = Answer(server, tiny_qwen3, "completions", storage)
        busy = [
            threading.Thread(target=send_until_it_stops, args=(server, tiny_qwen3))
            for _ in range(6)
        ]
        for thread in busy:
            thread.start()
        assert server.process is not None
        # It reaches some processes earlier than others.
        for worker in set(
            re.findall(r"Worker_TP\d pid=(\d+)", server.log.read_text(errors="replace"))
        ):
            os.kill(int(worker), signal.SIGINT)
        long.wait_for_tokens(len(long.tokens) + 20)
        os.killpg(server.process.pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        while "the server stops after" not in server.log.read_text(errors="replace"):
            assert time.monotonic() < deadline
            server.check_running()
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(0.1)
        os.killpg(server.process.pid, signal.SIGINT)
        wait_for_the_end(server)
        long.join()
        unanswered.join()
        for thread in busy:
            thread.join(STOP_SECONDS)
            assert not thread.is_alive()
    log = server.log.read_text(errors="replace")
    assert not re.findall(r"^\((?:EngineCore|Worker).*Traceback.*", log, re.MULTILINE), log
    failed = [vllm_ascend_hsx.find(storage, long.id), unanswered.path]
    assert long.finish_reason in (None, "abort")
    assert_no_file_is_named(unanswered)
    assert_they_are_right(held, tiny_qwen3)
    for path in failed:
        assert_the_reason_is_there(path, log)
    assert_nothing_else_is_there(storage, [*held], failed)


def test_process_end_without_engine_shutdown_leaves_rows_or_reasons(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """With VLLM_ENABLE_V1_MULTIPROCESSING=0 the user's process does not shut the engine down."""
    options = {"num_writer_threads": 8, "drain_timeout_s": 60}
    session = EngineSession(
        tmp_path, tiny_qwen3, layer_ids=LAYER_IDS, instruments=slow(1), connector_options=options
    )
    session.__enter__()
    try:
        long = session.add(
            tokens(9),
            {
                "max_tokens": 400,
                "extra_args": {"kv_transfer_params": {"include_output_tokens": True}},
            },
        )
        held = [session.add(tokens(length), {"max_tokens": 1}) for length in HELD]
        while not all(request.finished for request in held):
            session.step()
    finally:
        session.close()
    assert not long.finished
    (path,) = session.paths(long)
    expected = {session.paths(request)[0]: request.prompt for request in held}
    assert_they_are_right(expected, tiny_qwen3)
    assert_the_reason_is_there(path, session.log)
    assert_nothing_else_is_there(session.storage, [*expected], [path])
