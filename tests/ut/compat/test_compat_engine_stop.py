"""Stop of vLLM's engine core with our connector, and answers to remaining requests."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from patching import apply
from shutdown_harness import ALONE, OTHER, OURS, config, fresh, transfer
from vllm.v1.engine import core as core_module

from vllm_ascend_hsx.compat import shutdown as patches

STATE = core_module.EngineShutdownState


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
    apply(
        SimpleNamespace(EngineCoreProc=EngineCoreProc),
        patches.stop_in_order,
        patches.shut_down_undisturbed,
    )
    yield EngineCoreProc
    for number, handler in handlers.items():
        signal.signal(number, handler)


SHUT_DOWN = f"shut down, SIGTERM {signal.SIG_IGN!r}"


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
def test_stop_notifies_the_connector_then_aborts_then_shuts_down_ignoring_signals(
    engine_core: Any, multi: bool
) -> None:
    core = engine_core(
        config(transfer("MultiConnector", {"connectors": [OURS]}) if multi else ALONE), multi
    )
    assert core._handle_shutdown() and events == []
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is False
    assert events == ["server stops", "abort", "answer", SHUT_DOWN]
    core.shutdown()  # as run_engine_core does at the end, v1/engine/core.py:1206
    assert events.count(SHUT_DOWN) == 1


def test_requests_in_flight_are_aborted_after_the_shutdown_timeout(
    engine_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_failed_core_ignores_signals_while_it_shuts_down(engine_core: Any) -> None:
    engine_core(config()).shutdown()
    assert events == [SHUT_DOWN]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_core_without_our_connector_stops_as_upstream(engine_core: Any) -> None:
    core = engine_core(config(OTHER, shutdown_timeout=60))
    core.shutdown_state = STATE.REQUESTED
    assert core._handle_shutdown() is True
    core.scheduler.running = []
    assert core._handle_shutdown() is False
    assert events == []
    core.shutdown()
    assert events == [f"shut down, SIGTERM {signal.getsignal(signal.SIGTERM)!r}"]
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
