"""How a server stops: each process waits for those below it as long as rows that were computed need to reach their files.

What vLLM 0.23.0 does by itself on SIGTERM or SIGINT, without `--shutdown-timeout`: whoever started the engine cores sends SIGTERM to them
and, in the same moment, SIGKILL to them and to all workers (v1/utils.py:571 with a timeout of 0); with a timeout, when it is over. An
engine core that gets to its end leaves its workers 4 + 4 seconds (v1/executor/multiproc_executor.py:405). Several API servers, which are
processes of their own, are stopped before the engine cores (entrypoints/cli/serve.py:380).
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vllm_ascend_hsx.compat.versions import require
from vllm_ascend_hsx.config import HsxConfigError, read_options
from vllm_ascend_hsx.protocol.arguments import LONGEST_S

ENGINE_MANAGER_MODULE = "vllm.v1.engine.utils"
EXECUTOR_MODULE = "vllm.v1.executor.multiproc_executor"
ENGINE_CORE_MODULE = "vllm.v1.engine.core"
SERVE_MODULE = "vllm.entrypoints.cli.serve"
ASYNC_ENGINE_MODULE = "vllm.v1.engine.async_llm"
COMPLETION_SERVING_MODULE = "vllm.entrypoints.openai.completion.serving"
CHAT_SERVING_MODULE = "vllm.entrypoints.openai.chat_completion.serving"

# Process.join ends in poll(), which takes milliseconds in 31 bits; this leaves room for what is added to it.
_LONGEST_SHUTDOWN_S = 20 * LONGEST_S
_VLLM_GRACE = 13.0  # seconds: the executor's 4 + 4 for its workers, and the 5 of v1/utils.py:581 for an engine core
_ANSWER_S = 5.0  # for API servers to pass on what the engine cores said last: as v1/utils.py:581
_POLL_S = 0.05


def patience(vllm_config: Any) -> float:
    """Seconds that a worker may need to stop: for storage that does not answer a step, for its rows, for its last words.

    Args:
        vllm_config: vllm.config.VllmConfig, the engine's own.

    Returns:
        0 where our connector is not configured, alone or in MultiConnector, or in a way that no engine starts with.
    """
    try:
        config = read_options(vllm_config.kv_transfer_config)
    except HsxConfigError:
        return 0.0
    return config.storage_patience_s + config.close_timeout_s


def wait_for_engines(utils_module: Any) -> None:
    """Have whoever started the engine cores wait for them before it kills them.

    Reason: `CoreEngineProcManager.shutdown` is given `--shutdown-timeout`, which is 0 unless it is set, and kills what is alive then
    (v1/engine/utils.py:217, v1/utils.py:571). That time is for requests in flight; the writing of rows comes behind it. A manager that
    is collected, or there when its process exits, gives 5 seconds. Nobody waits longer than the engine cores take.

    Args:
        utils_module: the module `vllm.v1.engine.utils`.

    Raises:
        IncompatibleVersionError: no such manager there.
    """
    manager, init = require(utils_module, ENGINE_MANAGER_MODULE, "CoreEngineProcManager", "__init__")
    _, shutdown = require(utils_module, ENGINE_MANAGER_MODULE, "CoreEngineProcManager", "shutdown")
    _, end_processes = require(utils_module, ENGINE_MANAGER_MODULE, "shutdown")
    signature = inspect.signature(init)

    @functools.wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        seconds = patience(signature.bind(self, *args, **kwargs).arguments["vllm_config"])
        self._hsx_seconds = seconds + _VLLM_GRACE if seconds else 0.0  # first: a start that fails shuts down
        init(self, *args, **kwargs)
        if seconds and self._finalizer.detach() is not None:
            self._finalizer = weakref.finalize(self, end_processes, self.processes, self._hsx_seconds)

    @functools.wraps(shutdown)
    def wait_and_shut_down(self: Any, timeout: float | None = None) -> None:
        if self._hsx_seconds:
            timeout = min(timeout or 0.0, _LONGEST_SHUTDOWN_S) + self._hsx_seconds
        shutdown(self, timeout=timeout)

    manager.__init__, manager.shutdown = initialise, wait_and_shut_down


def stop_engines_before_api_servers(serve_module: Any) -> None:
    """Have `vllm serve` with several API servers wait for the engine cores before it kills those, and leave them time to answer.

    Reason: it sends SIGTERM to the API servers first, and SIGKILL in the same moment without `--shutdown-timeout`, and only then stops
    the engine cores (entrypoints/cli/serve.py:380). Nobody is left to tell clients of the requests that these end.

    Args:
        serve_module: the module `vllm.entrypoints.cli.serve`.

    Raises:
        IncompatibleVersionError: it waits for its processes elsewhere.
    """
    _, original = require(serve_module, SERVE_MODULE, "wait_for_completion_or_failure")

    @functools.wraps(original)
    def wait(api_server_manager: Any, engine_manager: Any = None, *args: Any, **kwargs: Any) -> None:
        if getattr(engine_manager, "_hsx_seconds", 0.0):
            shut_down_api_servers = api_server_manager.shutdown

            def shut_down_both(timeout: float | None = None) -> None:
                for process in api_server_manager.processes:
                    process.terminate()  # it takes no new requests, and waits for answers: see below
                deadline = time.monotonic() + min(timeout or 0.0, _LONGEST_SHUTDOWN_S)
                engine_manager.shutdown(timeout=timeout)
                shut_down_api_servers(timeout=max(deadline - time.monotonic(), _ANSWER_S))

            api_server_manager.shutdown = shut_down_both
        original(api_server_manager, engine_manager, *args, **kwargs)

    serve_module.wait_for_completion_or_failure = wait


def answer_before_api_server_stops(async_engine_module: Any) -> None:
    """Have an API server that did not start the engine cores take no new requests when it is to stop, and wait for their last answers.

    Reason: it leaves them at once (v1/engine/core_client.py:648), and breaks off the connections of requests that they are about to end.
    What came later they would not hear of. Who started it waits no longer for it than the engine cores take.

    Args:
        async_engine_module: the module `vllm.v1.engine.async_llm`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    engine, shutdown = require(async_engine_module, ASYNC_ENGINE_MODULE, "AsyncLLM", "shutdown")

    @functools.wraps(shutdown)
    def answer_and_shut_down(self: Any, timeout: float | None = None) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()  # which runs the event loop that passes answers on
        core, seconds = getattr(self, "engine_core", None), patience(self.vllm_config)
        if in_thread and seconds and core is not None and core.resources.engine_manager is None:
            deadline = time.monotonic() + min(timeout or 0.0, _LONGEST_SHUTDOWN_S) + seconds + _VLLM_GRACE
            core.resources.engine_dead = True  # as far as new requests are concerned: they are answered by an error
            while self.output_processor.has_unfinished_requests() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        shutdown(self, timeout=timeout)

    engine.shutdown = answer_and_shut_down


def wait_for_workers(executor_module: Any) -> None:
    """Have an executor wait for its workers before it sends them signals.

    Reason: `_ensure_worker_termination` sends SIGTERM after 4 seconds and SIGKILL after 4 more (v1/executor/multiproc_executor.py:405), and
    has no option. vllm-ascend's executor inherits it. When a start has failed there is nothing to wait for.

    Args:
        executor_module: the module `vllm.v1.executor.multiproc_executor`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    executor, terminate = require(executor_module, EXECUTOR_MODULE, "MultiprocExecutor", "_ensure_worker_termination")

    def wait_and_terminate(self: Any, worker_procs: Sequence[Any]) -> None:
        if getattr(self, "shutting_down", False):
            deadline = time.monotonic() + patience(self.vllm_config)
            for process in worker_procs:
                process.join(max(0.0, deadline - time.monotonic()))
        terminate(worker_procs)

    executor._ensure_worker_termination = wait_and_terminate


def stop_in_order(core_module: Any) -> None:
    """Have an engine core that is to stop say so to our connector, end its requests in time, and shut down where no signal can kill it.

    Reasons, all in v1/engine/core.py:
    * What it aborts (1310) looks like an abort by the client, and no file would be left that says why.
    * With `--shutdown-timeout` it waits for its requests for ever (1316) and relies on being killed. Now it aborts them when the time is
      over.
    * It gives up its signal handlers before it shuts down (1201). A Ctrl-C reaches it twice, from the terminal and from the API server,
      and the second signal would kill it, and a worker in its process, while rows are written. So it shuts down earlier, and ignores them.

    Args:
        core_module: the module `vllm.v1.engine.core`.

    Raises:
        IncompatibleVersionError: no such methods there.
    """
    core, handle = require(core_module, ENGINE_CORE_MODULE, "EngineCoreProc", "_handle_shutdown")
    _, shutdown = require(core_module, ENGINE_CORE_MODULE, "EngineCoreProc", "shutdown")
    _, requested = require(core_module, ENGINE_CORE_MODULE, "EngineShutdownState", "REQUESTED")

    @functools.wraps(handle)
    def handle_shutdown(self: Any) -> bool:
        if self.is_running() or not patience(self.vllm_config):
            return bool(handle(self))
        since = self.__dict__.setdefault("_hsx_stops_since", time.monotonic())
        limit = self.vllm_config.shutdown_timeout
        if limit and time.monotonic() - since >= limit:
            self.vllm_config.shutdown_timeout, self.shutdown_state = 0, requested
        if self.shutdown_state is requested and self.vllm_config.shutdown_timeout == 0:
            connector = self.scheduler.connector
            for each in getattr(connector, "_connectors", [connector]):  # MultiConnector's children, or the only one
                if server_stops := getattr(each, "server_stops", None):
                    server_stops()
        if handle(self):
            return True
        self.shutdown()
        self.shutdown = lambda: None
        return False

    @functools.wraps(shutdown)
    def shut_down_undisturbed(self: Any) -> None:
        if threading.current_thread() is threading.main_thread() and patience(self.vllm_config):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        shutdown(self)

    core._handle_shutdown, core.shutdown = handle_shutdown, shut_down_undisturbed


def answer_with_errors(core_module: Any) -> None:
    """Have requests that end because the engine core stops be answered by errors: HTTP 500, or an error event in a stream.

    Reason: they are told that they were aborted by their client (v1/engine/core.py:1313 and, for those that come later, 1379), which the
    API server makes 200 with `finish_reason` "abort" and without kv_transfer_params: an answer as of a server that extracts nothing.

    Args:
        core_module: the module `vllm.v1.engine.core`.

    Raises:
        IncompatibleVersionError: no such methods there.
    """
    core, send_aborts = require(core_module, ENGINE_CORE_MODULE, "EngineCoreProc", "_send_abort_outputs_to_client")
    _, send_errors = require(core_module, ENGINE_CORE_MODULE, "EngineCoreProc", "_send_error_outputs_to_client")

    @functools.wraps(send_aborts)
    def send(self: Any, req_ids: list[str], client_index: int) -> None:
        stops = not self.is_running() and patience(self.vllm_config)
        (send_errors if stops else send_aborts)(self, req_ids, client_index)

    core._send_abort_outputs_to_client = send


def end_completion_streams_with_errors(serving_module: Any) -> None:
    """Have the stream of a completion that fails before its first token end with an error.

    Reason: without text and tokens it takes the end of the request for a chunk of its prompt, and passes over it
    (entrypoints/openai/completion/serving.py:369). The stream is `[DONE]` and nothing else.

    Args:
        serving_module: the module `vllm.entrypoints.openai.completion.serving`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    serving, original = require(serving_module, COMPLETION_SERVING_MODULE, "OpenAIServingCompletion", "completion_stream_generator")
    _raise_first(serving, original, "completion_stream_generator")


def end_chat_streams_with_errors(serving_module: Any) -> None:
    """Have the stream of a chat, or of a message, that fails before its first token end with an error.

    Reason: as that of a completion (entrypoints/openai/chat_completion/serving.py:649). `/v1/messages`, which reads this stream, says
    `end_turn` then.

    Args:
        serving_module: the module `vllm.entrypoints.openai.chat_completion.serving`.

    Raises:
        IncompatibleVersionError: no such method there.
    """
    serving, original = require(serving_module, CHAT_SERVING_MODULE, "OpenAIServingChat", "chat_completion_stream_generator")
    _raise_first(serving, original, "chat_completion_stream_generator")


def _raise_first(serving: Any, original: Any, name: str) -> None:
    # vllm-ascend replaces some of these generators by wrappers of other names that take *args, before or after this: so the attribute's
    # name is said, and the results are found by what they are.
    async def without_errors(serving: Any, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            output = result[1] if isinstance(result, tuple) else result  # a completion's comes with the number of its prompt
            for each in output.outputs:
                serving._raise_if_error(each.finish_reason, output.request_id)
            yield result

    @functools.wraps(original)
    def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        def checked(value: Any) -> Any:
            return without_errors(self, value) if isinstance(value, AsyncIterator) else value

        chunks: AsyncIterator[Any] = original(self, *map(checked, args), **{key: checked(value) for key, value in kwargs.items()})
        return chunks

    setattr(serving, name, stream)
