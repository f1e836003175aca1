"""How vLLM's processes wait for each other when a server with our connector stops; without it, nothing is changed."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from patching import apply
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import core as core_module
from vllm.v1.engine import utils as utils_module
from vllm.v1.executor import multiproc_executor
from vllm_ascend.patch.platform import patch_glm_tool_call_streaming

from vllm_ascend_hsx.compat import shutdown as patches
from vllm_ascend_hsx.compat.shutdown import stop_timeout
from vllm_ascend_hsx.config import FAILURE_REPORT_TIMEOUT_S
from vllm_ascend_hsx.protocol.arguments import LONGEST_S

OPTIONS = {"shared_storage_path": "/data", "drain_timeout_s": 100, "storage_patience_s": 20}
OURS = {"kv_connector": "AscendHiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": OPTIONS}
PATIENCE = 100 + 20 + FAILURE_REPORT_TIMEOUT_S
STATE = core_module.EngineShutdownState


def transfer(kv_connector: str, extra: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_connector=kv_connector, kv_role="kv_producer", kv_connector_extra_config=extra)


ALONE = transfer("AscendHiddenStatesConnector", OPTIONS)
OTHER = transfer("MooncakeConnector", {})
CONFIGS = {
    "alone": (ALONE, PATIENCE),
    "in MultiConnector": (transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}, OURS]}), PATIENCE),
    "MultiConnector of others": (transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}]}), 0),
    "another": (OTHER, 0),
    "none": (None, 0),
    "an option that no engine starts with": (transfer("AscendHiddenStatesConnector", {"drain_timeout": 5}), 0),
}


def config(kv_transfer_config: Any = ALONE, shutdown_timeout: int = 0) -> Any:
    parallel = SimpleNamespace(data_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=kv_transfer_config, shutdown_timeout=shutdown_timeout, parallel_config=parallel)


def fresh(real: type, *names: str) -> Any:
    """A subclass with the methods that vLLM wrote, whether or not our plugin has been loaded into this process."""
    return type(real.__name__, (real,), {name: inspect.unwrap(inspect.getattr_static(real, name)) for name in names})


@pytest.mark.parametrize(("kv_transfer_config", "seconds"), CONFIGS.values(), ids=CONFIGS)
def test_there_is_a_timeout_for_our_connector_alone(kv_transfer_config: Any, seconds: float) -> None:
    assert stop_timeout(config(kv_transfer_config)) == seconds


# Who started the engine cores


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's manager, of no engine; `ended` is what it would have given each time to its processes."""
    made = fresh(utils_module.CoreEngineProcManager, "__init__", "shutdown")
    made.ended = []

    def shutdown(procs: Any, timeout: float | None = None) -> None:
        made.ended.append(timeout)

    monkeypatch.setattr(utils_module, "shutdown", shutdown)
    apply(SimpleNamespace(CoreEngineProcManager=made), patches.initialise_manager, patches.wait_for_engines)
    return made


def start(manager: Any, vllm_config: Any) -> Any:
    return manager(0, 0, 0, vllm_config, local_client=True, handshake_address="", executor_class=object, log_stats=False)


@pytest.mark.parametrize("timeout", [0, 30, None])
def test_engine_cores_have_time_to_stop_behind_that_of_their_requests(manager: Any, timeout: float | None) -> None:
    start(manager, config()).shutdown(timeout=timeout)
    start(manager, config(OTHER)).shutdown(timeout=timeout)
    ours, others = manager.ended
    assert ours >= (timeout or 0) + PATIENCE + 4 + 4 + 5
    assert others == timeout


@pytest.mark.parametrize("timeout", [0, 2**31, 10**400])
def test_no_process_is_waited_for_longer_than_the_system_can_wait(manager: Any, timeout: int) -> None:
    longest = {**OPTIONS, "drain_timeout_s": LONGEST_S, "storage_patience_s": LONGEST_S}
    start(manager, config(transfer("AscendHiddenStatesConnector", longest))).shutdown(timeout=timeout)
    (given,) = manager.ended
    assert given >= 2 * LONGEST_S
    readable, writable = os.pipe()
    try:
        os.write(writable, b"x")
        assert wait([readable], given) == [readable], "Process.join waits in the same way"
    finally:
        os.close(readable)
        os.close(writable)


def test_a_manager_that_nobody_has_shut_down_gives_the_time_too_and_only_once(manager: Any) -> None:
    """When it is collected, or at the exit of its process."""
    for kv_transfer_config in (ALONE, OTHER):
        made = start(manager, config(kv_transfer_config))
        assert made._finalizer.atexit
        made._finalizer()
        made.shutdown(timeout=3)
    ours, others = manager.ended
    assert ours >= PATIENCE
    assert others is None


# Several API servers


@pytest.mark.parametrize("timeout", [0, 30, None, 10**400])
@pytest.mark.parametrize("kv_transfer_config", [ALONE, OTHER], ids=["ours", "another"])
def test_api_servers_are_stopped_behind_the_engine_cores_and_have_time_to_answer(
    manager: Any, kv_transfer_config: Any, timeout: float | None
) -> None:
    process = SimpleNamespace(terminate=lambda: manager.ended.append("SIGTERM"))
    api_servers = SimpleNamespace(processes=[process], shutdown=lambda timeout=None: manager.ended.append(("API servers", timeout)))
    waited: list[Any] = []
    serve_module = SimpleNamespace(wait_for_completion_or_failure=lambda *args, **kwargs: waited.append((args, kwargs)))
    apply(serve_module, patches.stop_engines_before_api_servers)
    engines = start(manager, config(kv_transfer_config))
    serve_module.wait_for_completion_or_failure(api_server_manager=api_servers, engine_manager=engines, coordinator=None)
    assert waited == [((api_servers, engines), {"coordinator": None})]
    api_servers.shutdown(timeout=timeout)
    engines.shutdown(timeout=timeout)
    if kv_transfer_config is OTHER:
        assert manager.ended == [("API servers", timeout), timeout]
        return
    signalled, given_to_engines, (_, given_to_api_servers) = manager.ended
    assert signalled == "SIGTERM", "before they wait for the engine cores"
    assert given_to_engines > PATIENCE
    assert given_to_api_servers >= max(5, min(timeout or 0, LONGEST_S) - 5)


def test_engines_of_other_machines_change_nothing_for_api_servers() -> None:
    serve_module = SimpleNamespace(wait_for_completion_or_failure=lambda *args: None)
    apply(serve_module, patches.stop_engines_before_api_servers)
    api_servers = SimpleNamespace(shutdown=(shutdown := object()))
    serve_module.wait_for_completion_or_failure(api_servers, None)
    assert api_servers.shutdown is shutdown


@pytest.mark.parametrize(
    ("kv_transfer_config", "engine_manager", "in_thread", "waits"),
    [(ALONE, None, True, True), (ALONE, None, False, False), (ALONE, object(), True, False), (OTHER, None, True, False)],
    ids=["engines of another process", "in the event loop's thread", "engines of its own", "another connector"],
)
def test_an_api_server_that_stops_passes_on_the_last_answers_of_engines_that_are_not_its_own(
    kv_transfer_config: Any, engine_manager: Any, in_thread: bool, waits: bool
) -> None:
    unfinished, asked = [True, True, False], []

    class AsyncLLM:
        def __init__(self) -> None:
            self.vllm_config = config(kv_transfer_config)
            self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=engine_manager, engine_dead=False))
            self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: unfinished.pop(0))

        def shutdown(self, timeout: float | None = None) -> None:
            asked.append((timeout, len(unfinished), self.engine_core.resources.engine_dead))

    apply(SimpleNamespace(AsyncLLM=AsyncLLM), patches.answer_and_shut_down)
    if in_thread:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(AsyncLLM().shutdown, 7).result()
    else:
        AsyncLLM().shutdown(timeout=7)
    assert asked == [(7, 0 if waits else 3, waits)], "new requests are refused"


def test_an_api_server_does_not_wait_for_answers_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    AsyncLLM = type("AsyncLLM", (), {"shutdown": lambda self, timeout=None: None})
    apply(SimpleNamespace(AsyncLLM=AsyncLLM), patches.answer_and_shut_down)
    made: Any = AsyncLLM()
    made.vllm_config = config()
    made.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    made.output_processor = SimpleNamespace(has_unfinished_requests=lambda: True)
    clock = itertools.count(step=10)
    passed: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: passed.append(now := next(clock)) or float(now))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    thread = threading.Thread(target=made.shutdown, args=(30,))
    thread.start()
    threading.Thread.join(thread)
    assert PATIENCE + 30 < passed[-1] < PATIENCE + 30 + 40


# The executor


@pytest.mark.parametrize(
    ("kv_transfer_config", "shutting_down", "waits"), [(ALONE, True, True), (ALONE, False, False), (OTHER, True, False)]
)
def test_an_executor_waits_for_workers_that_it_shuts_down_before_it_sends_signals(
    kv_transfer_config: Any, shutting_down: bool, waits: bool
) -> None:
    calls: list[Any] = []

    class Process:
        def join(self, timeout: float) -> None:
            calls.append(timeout)

    class MultiprocExecutor:
        _ensure_worker_termination = staticmethod(lambda worker_procs: calls.append(len(worker_procs)))

        def __init__(self) -> None:
            self.vllm_config, self.shutting_down = config(kv_transfer_config), shutting_down

    apply(SimpleNamespace(MultiprocExecutor=MultiprocExecutor), patches.wait_for_workers)
    MultiprocExecutor()._ensure_worker_termination([Process(), Process()])
    *joined, terminated = calls
    assert terminated == 2
    if waits:
        assert PATIENCE - 10 < joined[1] <= joined[0] <= PATIENCE, "together no longer than one of them"
    else:
        assert sum(joined) == 0


def test_vllms_executor_calls_it_on_itself() -> None:
    """The class has a static method; ours needs the executor's configuration."""
    for method in ("shutdown", "_init_executor"):
        assert "self._ensure_worker_termination(" in inspect.getsource(getattr(multiproc_executor.MultiprocExecutor, method))


# The engine core


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
    core._send_abort_outputs([("a", 0), ("b", 1)])
    core._reject_add_in_shutdown(SimpleNamespace(request_id="late", client_index=0))
    answers = [(client, each.request_id, str(each.finish_reason)) for client, out in list(core.output_queue.queue) for each in out.outputs]
    assert answers == [(0, "a", reason), (1, "b", reason)] + [(0, "late", reason)] * (state is not STATE.RUNNING)


@pytest.mark.parametrize("generated", [0, 1], ids=["before its first token", "behind its first token"])
@pytest.mark.parametrize("kind", ["completion", "chat", "chat that vllm-ascend wrapped first", "chat that vllm-ascend wrapped later"])
def test_a_stream_that_the_end_of_the_server_cuts_off_ends_with_an_error(kind: str, generated: int) -> None:
    if kind == "completion":
        serving_class = fresh(OpenAIServingCompletion, "completion_stream_generator")
    else:
        serving_class = fresh(OpenAIServingChat)
        kept = "_ascend_glm_original_chat_completion_stream_generator"
        serving_class.chat_completion_stream_generator = inspect.unwrap(getattr(OpenAIServingChat, kept))

    def wrap() -> None:
        setattr(serving_class, kept, serving_class.chat_completion_stream_generator)
        serving_class.chat_completion_stream_generator = patch_glm_tool_call_streaming._wrapped_chat_completion_stream_generator

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
