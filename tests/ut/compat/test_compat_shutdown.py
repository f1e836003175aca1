"""vLLM's processes wait for each other when a server with our connector stops, and only then."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
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
    "in MultiConnector": (
        transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}, OURS]}),
        PATIENCE,
    ),
    "MultiConnector of others": (
        transfer("MultiConnector", {"connectors": [{"kv_connector": "Other"}]}),
        0,
    ),
    "another": (OTHER, 0),
    "none": (None, 0),
    "an option that no engine starts with": (
        transfer("AscendHiddenStatesConnector", {"drain_timeout": 5}),
        0,
    ),
}


@pytest.mark.parametrize(("kv_transfer_config", "seconds"), CONFIGS.values(), ids=CONFIGS)
def test_only_our_connector_has_a_stop_timeout(kv_transfer_config: Any, seconds: float) -> None:
    assert stop_timeout(config(kv_transfer_config)) == seconds


# Processes that start engine cores


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's manager without an engine. `ended` collects the timeouts of shutdowns."""
    made = fresh(utils_module.CoreEngineProcManager, "__init__", "shutdown")
    made.ended = []

    def shutdown(procs: Any, timeout: float | None = None) -> None:
        made.ended.append(timeout)

    monkeypatch.setattr(utils_module, "shutdown", shutdown)
    apply(
        SimpleNamespace(CoreEngineProcManager=made),
        patches.initialise_manager,
        patches.wait_for_engines,
    )
    return made


def start(manager: Any, vllm_config: Any) -> Any:
    return manager(
        0,
        0,
        0,
        vllm_config,
        local_client=True,
        handshake_address="",
        executor_class=object,
        log_stats=False,
    )


@pytest.mark.parametrize("timeout", [0, 30, None])
def test_engine_cores_get_stop_time_after_the_requests_time(
    manager: Any, timeout: float | None
) -> None:
    start(manager, config()).shutdown(timeout=timeout)
    start(manager, config(OTHER)).shutdown(timeout=timeout)
    ours, others = manager.ended
    assert ours >= (timeout or 0) + PATIENCE + 4 + 4 + 5
    assert others == timeout


@pytest.mark.parametrize("timeout", [0, 2**31, 10**400])
def test_shutdown_timeout_is_capped_at_the_system_limit(manager: Any, timeout: int) -> None:
    longest = {**OPTIONS, "drain_timeout_s": LONGEST_S, "storage_timeout_s": LONGEST_WAIT_S}
    start(manager, config(transfer("AscendHiddenStatesConnector", longest))).shutdown(
        timeout=timeout
    )
    (given,) = manager.ended
    assert given >= LONGEST_S + LONGEST_WAIT_S
    readable, writable = os.pipe()
    try:
        os.write(writable, b"x")
        assert wait([readable], given) == [readable], "Process.join waits in the same way"
    finally:
        os.close(readable)
        os.close(writable)


def test_finalizer_of_a_manager_waits_exactly_once(manager: Any) -> None:
    """The finalizer runs at garbage collection, or at the exit of the process."""
    for kv_transfer_config in (ALONE, OTHER):
        made = start(manager, config(kv_transfer_config))
        assert made._finalizer.atexit
        made._finalizer()
        made.shutdown(timeout=3)
    ours, others = manager.ended
    assert ours >= PATIENCE
    assert others is None


# API servers


@pytest.mark.parametrize(
    ("kv_transfer_config", "in_thread", "is_ours"),
    [(ALONE, True, True), (ALONE, False, False), (OTHER, True, False)],
    ids=["ours", "in the event loop's thread", "another connector"],
)
def test_api_server_that_stops_refuses_new_requests_and_fails_the_rest(
    kv_transfer_config: Any, in_thread: bool, is_ours: bool
) -> None:
    asked, errors = [], []
    loop = SimpleNamespace(call_soon_threadsafe=lambda call, error: call(error))

    class AsyncLLM:
        def __init__(self) -> None:
            self.vllm_config = config(kv_transfer_config)
            self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
            self.output_processor = SimpleNamespace(propagate_error=errors.append)
            self.output_handler = SimpleNamespace(get_loop=lambda: loop)

        def shutdown(self, timeout: float | None = None) -> None:
            assert not errors, "the engines' own answers come first"
            asked.append((timeout, self.engine_core.resources.engine_dead))

    apply(SimpleNamespace(AsyncLLM=AsyncLLM), patches.fail_unanswered_requests)
    if in_thread:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(AsyncLLM().shutdown, 7).result()
    else:
        AsyncLLM().shutdown(timeout=7)
    assert asked == [(7, is_ours)], "new requests are refused"
    assert [type(error).__name__ for error in errors] == ["EngineDeadError"] * is_ours


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

apply(SimpleNamespace(AsyncLLM=AsyncLLM), shutdown.fail_unanswered_requests)
# As by a traceback of a start that failed. Python clears modules that something still refers to,
# and sys last.
sys.kept = (AsyncLLM(), shutdown, transfer_config)
"""


def test_shutdown_at_exit_without_our_globals_raises_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "upstream's", "")


@pytest.mark.parametrize(
    "attributes",
    [{}, {"vllm_config": config()}],
    ids=["before its configuration", "before its client"],
)
def test_api_server_with_a_failed_start_shuts_down_as_upstream(
    attributes: dict[str, Any],
) -> None:
    seen: list[float | None] = []
    made = SimpleNamespace(
        AsyncLLM=type(
            "AsyncLLM",
            (),
            {"shutdown": lambda self, timeout=None: seen.append(timeout), **attributes},
        )
    )
    apply(made, patches.fail_unanswered_requests)
    made.AsyncLLM().shutdown(timeout=3)
    assert seen == [3]


# The executor


@pytest.mark.parametrize(
    ("kv_transfer_config", "shutting_down", "waits"),
    [(ALONE, True, True), (ALONE, False, False), (OTHER, True, False)],
)
def test_executor_waits_for_workers_before_it_sends_signals(
    kv_transfer_config: Any, shutting_down: bool, waits: bool
) -> None:
    calls: list[Any] = []

    class Process:
        def join(self, timeout: float) -> None:
            calls.append(timeout)

    class MultiprocExecutor:
        _ensure_worker_termination = staticmethod(
            lambda worker_procs: calls.append(len(worker_procs))
        )

        def __init__(self) -> None:
            self.vllm_config, self.shutting_down = config(kv_transfer_config), shutting_down

    apply(SimpleNamespace(MultiprocExecutor=MultiprocExecutor), patches.wait_for_workers)
    MultiprocExecutor()._ensure_worker_termination([Process(), Process()])
    *joined, terminated = calls
    assert terminated == 2
    if waits:
        assert PATIENCE - 10 < joined[1] <= joined[0] <= PATIENCE, (
            "together no longer than one of them"
        )
    else:
        assert sum(joined) == 0


def test_vllms_executor_calls_the_termination_method_on_itself() -> None:
    """The class has a static method; ours needs the executor's configuration."""
    for method in ("shutdown", "_init_executor"):
        assert "self._ensure_worker_termination(" in inspect.getsource(
            getattr(multiproc_executor.MultiprocExecutor, method)
        )


# Workers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("kv_transfer_config", "orphan", "ends"),
    [(ALONE, False, False), (ALONE, True, True), (OTHER, False, True)],
)
def test_worker_ignores_signals_while_its_engine_core_lives(
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
