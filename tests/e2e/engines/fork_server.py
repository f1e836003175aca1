"""Fork engines and servers that need not import vLLM again. Started by launch.ForkServer.

Usage: fork_server.py SOCKET_FD

Imports the modules of an engine in the order of `vllm serve`: general plugins, vllm-ascend's
patches, the worker. Then it forks a process per message on the socket. It uses no device before.

A message is a JSON object with `environ` (of the new process) and `command` (to run in it, see
`_commands`). The descriptors are: standard output, the pipe of the status, and the descriptors for
the command. The status is two lines: process id, and exit code after the end of the process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

# Read when torch is imported. With CI set, torch turns the warning that an operator of vllm-ascend
# returns an input into an error.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process: a step is then a call
    "VLLM_NO_USAGE_STATS": "1",  # one thread less, and nothing is sent
}


# Modules of `vllm serve` and of an engine; then modules imported after the plugins.
MODULES = (
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.cli.launch"),
    *("vllm.entrypoints.cli.openai", "vllm.entrypoints.cli.run_batch"),
    *("vllm.entrypoints.cli.benchmark.main", "vllm.entrypoints.cli.collect_env"),
    *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core"),
)
LATER_MODULES = ("vllm_ascend.worker.worker", "vllm.compilation.backends", "vllm.renderers.hf")
OUR_MODULES = (
    *("vllm_ascend_hsx.connector.connector", "vllm_ascend_hsx.connector.worker"),
    *("vllm_ascend_hsx.connector.scheduler", "vllm_ascend_hsx.drafter.proposer"),
)


def import_all() -> None:
    """Import the modules of engines and servers without using a device."""
    for name in MODULES:
        importlib.import_module(name)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name in (*LATER_MODULES, *(() if "VLLM_PLUGINS" in os.environ else OUR_MODULES)):
        importlib.import_module(name)
    _wait_on_sockets()


def _wait_on_sockets() -> None:
    """Let readers of vLLM's queues between processes wait on their socket immediately.

    They would call sched_yield in a loop for a second after each read (SpinCondition, vllm
    distributed/device_communicators/shm_broadcast.py:120 in 0.23.0). With more processes than cores
    they would take the time of the processes that compute. The socket is vLLM's own way to wait.
    """
    shm_broadcast = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    assert shm_broadcast.SpinCondition.__init__.__defaults__ == (1,)
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0,)


def enter(environ: dict[str, str], log_fd: int) -> None:
    """Become the first process of a session, with this environment and log."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(log_fd, descriptor)
    os.close(log_fd)
    os.environ.clear()
    os.environ.update(environ)
    gc.unfreeze = lambda: None  # the parent's imports need no garbage collection
    import hsx_test_instruments

    from ascend_npu_emulator.native import core, set_modes
    from ascend_npu_emulator.settings import Settings

    set_modes(core, Settings.from_environment())
    hsx_test_instruments.register()


def serve(driver: Any, actions: Any, answers: Any) -> None:
    for line in actions:
        action = json.loads(line)
        answer: dict[str, Any] = {"result": None, "error": None}
        try:
            answer["result"] = getattr(driver, action["action"])(
                *action.get("args", ()), **action.get("kwargs", {})
            )
        except BaseException:  # noqa: BLE001 - the test judges the failure
            answer["error"] = traceback.format_exc()
        answer["events"], driver.events = driver.events, []
        answer["preemptions"], driver.preemptions = driver.preemptions, []
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run_engine(read_fd: int, write_fd: int) -> None:
    """Answer actions until the pipe is closed. Returns only if the engine was not shut down.

    An action is a line, {"action": name, "args": [...], "kwargs": {...}}; the name is a method of
    Driver. The answer is {"result": ..., "error": traceback or null, "events": [...],
    "preemptions": [...]}, with all events since the last answer.
    """
    os.environ.update(ENVIRON)
    from driver import Driver
    from hsx_test_instruments.writes import release_writers

    driver = Driver()
    with os.fdopen(read_fd) as actions, os.fdopen(write_fd, "w") as answers:
        for pipe in (actions, answers):
            # Otherwise workers that outlive this process would hide the end.
            os.set_inheritable(pipe.fileno(), False)
            os.register_at_fork(after_in_child=pipe.close)
        serve(driver, actions, answers)
    # Threads held by an instrument would keep this process from ending.
    release_writers.set()
    if driver.engine is None:
        end(0)


def run_module(name: str, *arguments: str) -> None:
    """Run a module like `python -m NAME ARGUMENTS`."""
    module = importlib.import_module(name)
    sys.argv[:] = [str(module.__file__), *arguments]
    try:
        code = module.main()
    except SystemExit as exit_:
        code = exit_.code
    end(int(code or 0))


def end(code: int) -> None:
    """End the process like an interpreter, without destroying 7,000 modules one by one."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork(message: dict[str, Any], descriptors: Sequence[int], requests: socket.socket) -> None:
    """Fork a process that waits for a second process. The second process runs the command."""
    log_fd, status_fd, *others = descriptors
    if os.fork():
        return
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        for descriptor in (log_fd, *others):
            os.close(descriptor)
        os.write(status_fd, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(status_fd, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(status_fd)
    enter(message["environ"], log_fd)
    function, *arguments = message["command"]
    {"engine": run_engine, "module": run_module}[function](*arguments, *others)
    sys.exit()


def main() -> None:
    import_all()
    gc.collect()
    gc.freeze()  # collections in each engine then skip all of this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the first of the two processes
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                return
            fork(json.loads(message), descriptors, requests)
            for descriptor in descriptors:
                os.close(descriptor)


if __name__ == "__main__":
    main()
