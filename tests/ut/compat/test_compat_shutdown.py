"""vLLM's processes wait for each other when a server with our connector stops, and only then."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest
from patching import apply
from shutdown_harness import ALONE, OPTIONS, OTHER, OURS, PATIENCE, config, fresh, transfer
from vllm.v1.engine import utils as utils_module
from vllm.v1.executor import multiproc_executor

from vllm_ascend_hsx.compat import shutdown as patches
from vllm_ascend_hsx.compat.shutdown import stop_timeout
from vllm_ascend_hsx.config import LONGEST_WAIT_S
from vllm_ascend_hsx.protocol.arguments import LONGEST_S

CONFIGS = {
    "alone": (ALONE, PATIENCE),
    "in MultiConnector": (transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}, OURS]}), PATIENCE),
    "MultiConnector of others": (transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}]}), 0),
    "another": (OTHER, 0),
    "none": (None, 0),
    "an option that no engine starts with": (transfer("AscendHiddenStatesConnector", {"drain_timeout": 5}), 0),
}


@pytest.mark.parametrize(("kv_transfer_config", "seconds"), CONFIGS.values(), ids=CONFIGS)
def test_there_is_a_timeout_for_our_connector_alone(kv_transfer_config: Any, seconds: float) -> None:
    assert stop_timeout(config(kv_transfer_config)) == seconds


# Who started the engine cores


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's manager without an engine; `ended` collects the timeouts of its shutdowns."""
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
    longest = {**OPTIONS, "drain_timeout_s": LONGEST_S, "storage_timeout_s": LONGEST_WAIT_S}
    start(manager, config(transfer("AscendHiddenStatesConnector", longest))).shutdown(timeout=timeout)
    (given,) = manager.ended
    assert given >= LONGEST_S + LONGEST_WAIT_S
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
    ("kv_transfer_config", "engine_manager", "in_thread", "waits", "answers"),
    [
        (ALONE, None, True, True, True),
        (ALONE, None, False, False, False),
        (ALONE, object(), True, False, True),
        (OTHER, None, True, False, False),
    ],
    ids=["engines of another process", "in the event loop's thread", "engines of its own", "another connector"],
)
def test_an_api_server_that_stops_answers_all_that_it_has_and_waits_for_engines_that_are_not_its_own(
    kv_transfer_config: Any, engine_manager: Any, in_thread: bool, waits: bool, answers: bool
) -> None:
    unfinished, asked, told = [True, True, False], [], []
    loop = SimpleNamespace(call_soon_threadsafe=lambda call, error: call(error))

    class AsyncLLM:
        def __init__(self) -> None:
            self.vllm_config = config(kv_transfer_config)
            self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=engine_manager, engine_dead=False))
            self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: unfinished.pop(0), propagate_error=told.append)
            self.output_handler = SimpleNamespace(get_loop=lambda: loop)

        def shutdown(self, timeout: float | None = None) -> None:
            assert not told, "the engines' own answers come first"
            asked.append((timeout, len(unfinished), self.engine_core.resources.engine_dead))

    apply(SimpleNamespace(AsyncLLM=AsyncLLM), patches.answer_and_shut_down)
    if in_thread:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(AsyncLLM().shutdown, 7).result()
    else:
        AsyncLLM().shutdown(timeout=7)
    assert asked == [(7, 0 if waits else 3, answers)], "new requests are refused"
    assert [type(error).__name__ for error in told] == ["EngineDeadError"] * answers


AT_EXIT = """
import sys
from types import SimpleNamespace
from patching import apply
from shutdown_harness import config
from vllm_ascend_hsx.compat import shutdown
from vllm_ascend_hsx import transfer_config

class AsyncLLM:
    vllm_config = config()
    engine_core = SimpleNamespace(resources=None)
    def shutdown(self, timeout=None, write=sys.stdout.write):
        write("upstream's")
    def __del__(self):
        self.shutdown()

apply(SimpleNamespace(AsyncLLM=AsyncLLM), shutdown.answer_and_shut_down)
# As by a traceback of a start that failed. Python clears modules that something still refers to,
# and sys last.
sys.kept = (AsyncLLM(), shutdown, transfer_config)
"""


def test_an_engine_that_outlives_our_modules_at_exit_is_shut_down_without_an_error() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "upstream's", "")


@pytest.mark.parametrize("attributes", [{}, {"vllm_config": config()}], ids=["before its configuration", "before its client"])
def test_an_api_server_that_fails_as_it_starts_is_shut_down_as_upstream_does(attributes: dict[str, Any]) -> None:
    seen: list[float | None] = []
    made = SimpleNamespace(AsyncLLM=type("AsyncLLM", (), {"shutdown": lambda self, timeout=None: seen.append(timeout), **attributes}))
    apply(made, patches.answer_and_shut_down)
    made.AsyncLLM().shutdown(timeout=3)
    assert seen == [3]


def test_an_api_server_does_not_wait_for_answers_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    AsyncLLM = type("AsyncLLM", (), {"shutdown": lambda self, timeout=None: None})
    apply(SimpleNamespace(AsyncLLM=AsyncLLM), patches.answer_and_shut_down)
    made: Any = AsyncLLM()
    made.vllm_config = config()
    made.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    made.output_processor = SimpleNamespace(has_unfinished_requests=lambda: True)
    made.output_handler = None  # no request has come
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


# Workers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("kv_transfer_config", "orphan", "ends"), [(ALONE, False, False), (ALONE, True, True), (OTHER, False, True)])
def test_a_worker_leaves_signals_to_the_engine_core_that_lives(
    kv_transfer_config: Any, orphan: bool, ends: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vllms_handler(number: int, frame: Any) -> None:
        raise SystemExit

    class WorkerProc:
        worker = SimpleNamespace(vllm_config=config(kv_transfer_config))

        def worker_busy_loop(self) -> None:
            if orphan:
                monkeypatch.setattr(os, "getppid", lambda: 1)
            signal.raise_signal(number)

    apply(SimpleNamespace(WorkerProc=WorkerProc), patches.leave_signals_to_the_engine_core)
    before = signal.signal(number, vllms_handler)
    try:
        with pytest.raises(SystemExit) if ends else nullcontext():
            WorkerProc().worker_busy_loop()
    finally:
        signal.signal(number, before)
