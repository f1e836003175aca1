"""Stop a server: each process waits for child processes until rows are in their files.

On SIGTERM or SIGINT, vLLM 0.23.0 does this: the parent of the engine cores sends them SIGTERM and,
after `--shutdown-timeout` (default: 0), SIGKILL to them and to all workers (v1/utils.py:571). An
engine core that shuts down gives the workers 4 + 4 seconds (v1/executor/multiproc_executor.py:405).

Without these patches, rows of an answered request are lost, or a client waits forever. Requests in
flight end as vLLM ends them.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from vllm_ascend_hsx.compat.engine import methods
from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23
from vllm_ascend_hsx.protocol.arguments import LONGEST_S
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.transfer_config import read_options

ENGINES = "vllm.v1.engine.utils"
ENGINE_CORE = "vllm.v1.engine.core"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
WHOLE_STEPS = "a signal to every process stops a server between steps"
WRITTEN = "rows are written when a server stops"
ANSWERED = "an API server that stops leaves no request unanswered"

# Process.join passes milliseconds to poll() in 31 bits; this bound allows additions.
_LONGEST_SHUTDOWN_S = 20 * LONGEST_S
_VLLM_GRACE_S = (
    13.0  # the executor's 4 + 4 for the workers, and 5 for an engine core (v1/utils.py:581)
)


def stop_timeout(vllm_config: Any) -> float:
    """Return the seconds a worker may need to stop: stalled storage, rows and error files.

    Args:
        vllm_config: vllm.config.VllmConfig of the engine.

    Returns:
        0 if our connector is not configured, alone or in MultiConnector, or if the options are
        invalid.
    """
    try:
        config = read_options(vllm_config.kv_transfer_config)
    except UserError:
        return 0.0
    return config.storage_timeout_s + config.close_timeout_s


uses(ENGINES, "shutdown", SINCE_0_23, takes="procs timeout", why=WRITTEN)


@patch(ENGINES, "CoreEngineProcManager.__init__", SINCE_0_23, keywords="vllm_config", why=WRITTEN)
def initialise_manager(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a manager of engine cores wait for them, also if only the finalizer stops them.

    Reason: the finalizer waits 5 seconds (v1/engine/utils.py:217).
    """
    from vllm.v1.engine.utils import shutdown

    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    seconds = stop_timeout(arguments["vllm_config"])
    # Set it first: a failed start shuts down.
    self._hsx_seconds = seconds + _VLLM_GRACE_S if seconds else 0.0
    original(self, *args, **kwargs)
    if seconds and self._finalizer.detach() is not None:
        self._finalizer = weakref.finalize(self, shutdown, self.processes, self._hsx_seconds)


@patch(ENGINES, "CoreEngineProcManager.shutdown", SINCE_0_23, why=WRITTEN)
def wait_for_engines(original: Any, self: Any, timeout: float | None = None) -> None:
    """Wait for the engine cores before they are killed.

    Reason: the timeout is `--shutdown-timeout`, by default 0, and processes that are still alive
    then are killed (v1/engine/utils.py:217, v1/utils.py:571). That time is for requests in flight;
    rows are written after it. The wait ends when the engine cores have ended.
    """
    if self._hsx_seconds:
        timeout = min(timeout or 0.0, _LONGEST_SHUTDOWN_S) + self._hsx_seconds
    original(self, timeout=timeout)


uses(
    "vllm.v1.engine.exceptions",
    "EngineDeadError",
    SINCE_0_23,
    takes="",
    keywords="suppress_context",
    why=ANSWERED,
)


@patch(
    "vllm.v1.engine.async_llm", "AsyncLLM.shutdown", SINCE_0_23, takes="self timeout", why=ANSWERED
)
def fail_unanswered_requests(
    original: Any,
    self: Any,
    timeout: float | None = None,
    *,
    at_exit: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Make a stopping API server refuse new requests and fail unanswered ones.

    Reason: it accepts requests until the engine cores have ended. The last ones would get no
    answer, and the HTTP server waits for them forever (entrypoints/launcher.py:148).

    `at_exit` is bound here because `AsyncLLM.__del__` may call this after Python has cleared our
    globals. An engine whose start failed has no core, or not even a configuration.
    """
    core = getattr(self, "engine_core", None)
    if (
        at_exit()
        or core is None
        # The main thread runs the event loop that forwards answers.
        or threading.current_thread() is threading.main_thread()
        or not stop_timeout(self.vllm_config)
    ):
        return original(self, timeout=timeout)
    core.resources.engine_dead = True  # for new requests only: they are answered with an error
    handler = getattr(self, "output_handler", None)  # missing after a failed start
    original(self, timeout=timeout)
    if handler is not None:
        from vllm.v1.engine.exceptions import EngineDeadError

        error = EngineDeadError(suppress_context=True)
        handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, error)


@patch(
    EXECUTOR,
    "MultiprocExecutor._ensure_worker_termination",
    SINCE_0_23,
    takes="worker_procs",  # a static method called on the executor
    why=WRITTEN,
)
def wait_for_workers(original: Any, self: Any, worker_procs: Sequence[Any]) -> None:
    """Wait for the workers before the executor sends them signals.

    Reason: the original sends SIGTERM after 4 seconds and SIGKILL after 4 more
    (v1/executor/multiproc_executor.py:405), without an option. vllm-ascend's executor inherits it.
    After a failed start there is nothing to wait for.
    """
    if getattr(self, "shutting_down", False):
        deadline = time.monotonic() + stop_timeout(self.vllm_config)
        for process in worker_procs:
            process.join(max(0.0, deadline - time.monotonic()))
    original(worker_procs)


@patch(EXECUTOR, "WorkerProc.worker_busy_loop", SINCE_0_23, why=WHOLE_STEPS)
def leave_signals_to_the_engine_core(original: Any, self: Any) -> None:
    """Make a worker ignore SIGINT and SIGTERM as long as the engine core lives.

    Reason: Ctrl-C, and systemd's default, reach every process. vLLM's handler stops a worker in the
    middle of a step (v1/executor/multiproc_executor.py:816). Other ranks then wait for it in a
    collective, and the engine core fails instead of ending requests. The engine core gets the
    signal too, and stops the workers between steps through a pipe that they watch (781).
    """
    if stop_timeout(self.worker.vllm_config):
        signal.set_wakeup_fd(
            -1
        )  # set by the API server's event loop, inherited by a forked process
        parent = os.getppid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(_end_an_orphan, parent, signal.getsignal(number)))
    original(self)


def _end_an_orphan(parent: int, handler: Any, number: int, frame: FrameType | None) -> None:
    if os.getppid() != parent:
        handler(number, frame)


@patch(ENGINES, "SignalCallback.trigger", SINCE_0_23, takes="self", why=WRITTEN)
def trigger_once(original: Any, self: Any) -> None:
    """Handle only the first signal to an engine core.

    Reason: the handler sets a threading.Event (v1/engine/utils.py:276). A signal that arrives
    within Event.set waits for a lock held by the same thread, so the engine core never stops. A
    server passes SIGTERM on, so engine cores get two signals if every process gets one.
    """
    if not getattr(self, "_hsx_triggered", False):
        self._hsx_triggered = True
        original(self)


uses(ENGINE_CORE, "EngineShutdownState.REQUESTED", SINCE_0_23, why=WRITTEN)


@patch(
    ENGINE_CORE,
    "EngineCoreProc._handle_shutdown",
    SINCE_0_23,
    why="a file names the stop of the server as the reason",
)
def stop_in_order(original: Any, self: Any) -> bool:
    """Make a stopping engine core notify our connector, end requests in time, and shut down.

    Reasons, all in v1/engine/core.py:
    * A request that it aborts (1310) looks aborted by the client, so no file would name the reason.
    * With `--shutdown-timeout` it waits for requests forever (1316) and relies on being killed. Now
      it aborts them after the timeout.
    * It removes the signal handlers before it shuts down (1201); see `shut_down_undisturbed`. So it
      now shuts down earlier.
    """
    from vllm.v1.engine.core import EngineShutdownState

    if self.is_running() or not stop_timeout(self.vllm_config):
        return bool(original(self))
    since = self.__dict__.setdefault("_hsx_stops_since", time.monotonic())
    limit, requested = self.vllm_config.shutdown_timeout, EngineShutdownState.REQUESTED
    if limit and time.monotonic() - since >= limit:
        self.vllm_config.shutdown_timeout, self.shutdown_state = 0, requested
    if self.shutdown_state is requested and self.vllm_config.shutdown_timeout == 0:
        for server_stops in methods(self.scheduler.connector, "server_stops"):
            server_stops()
    if original(self):
        return True
    self.shutdown()
    self.shutdown = lambda: None
    return False


@patch(ENGINE_CORE, "EngineCoreProc.shutdown", SINCE_0_23, why=WRITTEN)
def shut_down_undisturbed(original: Any, self: Any) -> None:
    """Make an engine core ignore signals while it shuts down.

    Reason: Ctrl-C reaches it twice, from the terminal and from the API server. The second signal
    would kill it, and a worker in the same process, while rows are written.
    """
    if threading.current_thread() is threading.main_thread() and stop_timeout(self.vllm_config):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    original(self)
