"""How vLLM's engine core stops with our connector, and how it answers what it leaves."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from patching import apply
from releases import installed_is
from shutdown_harness import ALONE, OTHER, OURS, PATIENCE, config, fresh, transfer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import core as core_module
from vllm.v1.engine import utils as utils_module

from vllm_ascend_hsx.compat import shutdown as patches

if installed_is("<0.30"):
    from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
else:
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata

# The modules that wrap every chat's stream, and where they keep the original.
if installed_is("<0.26"):
    from vllm_ascend.patch.platform import patch_glm_tool_call_streaming as wrapping

    ORIGINAL = "_ascend_glm_original_chat_completion_stream_generator"
elif installed_is("<0.30"):
    from vllm_ascend.patch.platform import patch_kimi_k3_parsers as wrapping

    ORIGINAL = wrapping._ORIGINAL_CHAT_STREAM_ATTR
else:  # nothing wraps it
    ORIGINAL = "chat_completion_stream_generator"

WRAPPED = ["chat that vllm-ascend wrapped first", "chat that vllm-ascend wrapped later"] if installed_is("<0.30") else []
STATE = core_module.EngineShutdownState


class Aborted(NamedTuple):
    """A pair for vllm 0.23, and for 0.26 the attributes of a request."""

    request_id: str
    client_index: int


class Scheduler:
    """The attributes of vLLM's engine core that the patch uses."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.running = ["a", "b"]

    def get_num_unfinished_requests(self) -> int:
        return len(self.running)

    def has_requests(self) -> bool:
        return bool(self.running)

    def finish_requests(self, request_ids: None, status: Any) -> list[tuple[str, int]]:
        events.append("abort")
        aborted, self.running = [(request, 0) for request in self.running], []
        return aborted


events: list[str] = []


@pytest.fixture
def engine_core() -> Iterator[Any]:
    """vLLM's EngineCoreProc, with our patches, whose scheduler has two requests."""
    real = fresh(core_module.EngineCoreProc, "_handle_shutdown", "shutdown")

    class EngineCoreProc(real):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, multi: bool = False) -> None:
            ours = SimpleNamespace(server_stops=lambda: events.append("server stops"))
            connector = SimpleNamespace(_connectors=[SimpleNamespace(), ours]) if multi else ours
            self.vllm_config, self.scheduler = vllm_config, Scheduler(connector)
            self.shutdown_state, self.engines_running, self.batch_queue = STATE.RUNNING, False, None

        def _send_abort_outputs(self, aborted: list[tuple[str, int]]) -> None:
            events.append("answer")

        def shutdown(self) -> None:
            events.append(f"shut down, SIGTERM {signal.getsignal(signal.SIGTERM)!r}")

    events.clear()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    apply(SimpleNamespace(EngineCoreProc=EngineCoreProc), patches.stop_in_order, patches.shut_down_undisturbed)
    yield EngineCoreProc
    for number, handler in handlers.items():
        signal.signal(number, handler)


SHUT_DOWN = f"shut down, SIGTERM {signal.SIG_IGN!r}"


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
def test_the_connector_is_told_of_the_stop_before_requests_are_aborted_and_the_core_shuts_down_with_signals_ignored(
    engine_core: Any, multi: bool
) -> None:
    core = engine_core(config(transfer("MultiConnector", {"connectors": [OURS]}) if multi else ALONE), multi)
    assert core._handle_shutdown() and events == []
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is False
    assert events == ["server stops", "abort", "answer", SHUT_DOWN]
    core.shutdown()  # as run_engine_core does in the end, v1/engine/core.py:1206
    assert events.count(SHUT_DOWN) == 1


def test_requests_in_flight_have_the_time_that_was_given_and_are_then_aborted(engine_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    core = engine_core(config(shutdown_timeout=60))
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is True
    now += 59
    core.shutdown_state = STATE.REQUESTED  # a second signal gives no more time
    assert core._handle_shutdown() is True
    assert events == []
    now += 1
    assert core._handle_shutdown() is False
    assert events == ["server stops", "abort", "answer", SHUT_DOWN]


def test_requests_that_end_in_time_are_not_aborted(engine_core: Any) -> None:
    core = engine_core(config(shutdown_timeout=60))
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is True
    core.scheduler.running = []
    assert core._handle_shutdown() is False
    assert events == [SHUT_DOWN]


def test_a_core_that_failed_ignores_signals_while_it_shuts_down(engine_core: Any) -> None:
    engine_core(config()).shutdown()
    assert events == [SHUT_DOWN]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_core_without_our_connector_stops_as_it_did(engine_core: Any) -> None:
    core = engine_core(config(OTHER, shutdown_timeout=60))
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is True
    core.scheduler.running = []
    assert core._handle_shutdown() is False
    assert events == []
    core.shutdown()
    assert events == [f"shut down, SIGTERM {signal.getsignal(signal.SIGTERM)!r}"]
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


@pytest.mark.parametrize(
    ("kv_transfer_config", "state", "reason"),
    [(ALONE, STATE.RUNNING, "abort"), (ALONE, STATE.SHUTTING_DOWN, "error"), (OTHER, STATE.SHUTTING_DOWN, "abort")],
    ids=["running", "stopping", "another connector"],
)
def test_what_a_stopping_core_leaves_unanswered_or_refuses_is_answered_by_an_error(
    kv_transfer_config: Any, state: Any, reason: str
) -> None:
    real = fresh(core_module.EngineCoreProc, "_send_abort_outputs_to_client", "_send_error_outputs_to_client")

    class EngineCoreProc(real):  # type: ignore[misc]
        def __init__(self) -> None:
            self.vllm_config, self.shutdown_state, self.output_queue = config(kv_transfer_config), state, Queue()

    apply(SimpleNamespace(EngineCoreProc=EngineCoreProc), patches.answer_with_errors)
    core = EngineCoreProc()
    core._send_abort_outputs([Aborted("a", 0), Aborted("b", 1)])
    core._reject_add_in_shutdown(SimpleNamespace(request_id="late", client_index=0))
    answers = [(client, each.request_id, str(each.finish_reason)) for client, out in list(core.output_queue.queue) for each in out.outputs]
    assert answers == [(0, "a", reason), (1, "b", reason)] + [(0, "late", reason)] * (state is not STATE.RUNNING)


@pytest.mark.parametrize("generated", [0, 1], ids=["before its first token", "after its first token"])
@pytest.mark.parametrize("kind", ["completion", "chat", *WRAPPED])
def test_a_stream_that_the_end_of_the_server_cuts_off_ends_with_an_error(kind: str, generated: int) -> None:
    if kind == "completion":
        serving_class = fresh(OpenAIServingCompletion, "completion_stream_generator")
    else:
        serving_class = fresh(OpenAIServingChat)
        serving_class.chat_completion_stream_generator = inspect.unwrap(getattr(OpenAIServingChat, ORIGINAL))

    def wrap() -> None:
        setattr(serving_class, ORIGINAL, serving_class.chat_completion_stream_generator)
        serving_class.chat_completion_stream_generator = wrapping._wrapped_chat_completion_stream_generator

    if kind.endswith("first"):
        wrap()
    apply(SimpleNamespace(**{serving_class.__name__: serving_class}), patches.end_stream_with_error)
    if kind.endswith("later"):
        wrap()
    serving = serving_class.__new__(serving_class)
    vars(serving).update(
        enable_force_include_usage=False,
        request_logger=None,
        log_error_stack=False,
        response_role="assistant",
        tool_parser=None,
        enable_auto_tools=False,
        parser_cls=None,
        enable_log_outputs=False,
        use_harmony=False,
        reasoning_parser_cls=None,
        system_fingerprint=None,
        tool_call_id_type="random",
        enable_prompt_tokens_details=False,
        model_config=SimpleNamespace(max_model_len=9, is_encoder_decoder=False),
    )

    async def results() -> AsyncIterator[Any]:
        for ids, text, finish_reason in [((7,), "x", None)] * generated + [((), "", "error")]:
            output = CompletionOutput(0, text, ids, None, None, finish_reason=finish_reason)
            result = RequestOutput("r", None, [1], None, [output], finish_reason is not None)
            yield (0, result) if kind == "completion" else result

    async def read() -> str:
        metadata = RequestResponseMetadata(request_id="r")
        said: dict[str, Any] = {"model": "m", "stream": True}
        if kind == "completion":
            request, prompt = CompletionRequest(prompt=[1], **said), {"type": "token", "prompt_token_ids": [1]}
            stream = serving.completion_stream_generator(request, [prompt], results(), "r", 0, "m", 1, None, metadata)
        else:
            request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **said)
            stream = serving.chat_completion_stream_generator(request, results(), "r", "m", [], None, metadata)
        return "".join([chunk async for chunk in stream])

    events = [line.removeprefix("data: ") for line in asyncio.run(read()).splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "Internal server error", events


def test_a_signal_within_the_handling_of_another_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()
    made = fresh(utils_module.SignalCallback, "trigger")
    apply(SimpleNamespace(SignalCallback=made), patches.trigger_once)
    callback = made(called.set)
    set_event, lock = callback._event.set, threading.Lock()

    def interrupted() -> None:
        assert lock.acquire(blocking=False), "the second signal would wait for the first, and that for the second"
        callback.trigger()
        set_event()
        lock.release()

    monkeypatch.setattr(callback._event, "set", interrupted)
    callback.trigger()
    assert called.wait(PATIENCE)
