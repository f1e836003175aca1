"""Start a program, wait until it answers or ends, and stop it with all descendants."""

import contextlib
import os
import random
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx

from vllm_ascend_hsx.demo import DemoError

Self = TypeVar("Self", bound="Program")  # typing has it from Python 3.11 on
POLL_SECONDS = 0.5
STOP_SECONDS = 15.0
PORTS = range(20000, 32000)  # Linux assigns ports from 32768 on itself
KILL_SECONDS = 10.0
LOG_TAIL_LINES = 25
LAST_LINES = "the last lines of"
# Last line of a traceback, with any logger's prefix. Later tracebacks mostly come from other
# processes that lost the first one.
FIRST_ERROR = re.compile(r"^.*?\b[A-Za-z_.]*(?:Error|Exception): .+$", re.MULTILINE)


class ServerError(DemoError):
    """The server ended or did not answer. The message has the reason and the path of the log."""


def free_port() -> int:
    """Return an unused TCP port of the loopback interface.

    It is below the kernel's ephemeral ports, so it is probably still free when vLLM binds it many
    seconds later.

    Raises:
        ServerError: if all ports are in use.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(
        f"no free TCP port was found on 127.0.0.1 from {PORTS.start} to "
        f"{PORTS.stop - 1}: stop the programs that listen there"
    )


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _parent, its_group = (
                    (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                )
                if int(its_group) == group and state not in "ZX":
                    members.append(int(entry.name))
    return members


def wait_for_ends(pids: Sequence[int], timeout: float) -> None:
    """Wait until all of these processes have ended, or for timeout seconds.

    They need not be children.
    """
    deadline = time.monotonic() + timeout
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)


class Program:
    """One command in a separate session: signals reach all of its processes.

    As a context manager it stops all processes at the end.

    Args:
        command: the command line.
        log: file for the output; it is overwritten.
        environment: added to this process's environment.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.command = list(command)
        self.log = log
        self.environment = dict(environment)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self: Self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, on_wait: Callable[[], None]) -> int:
        """Wait for the end and return the exit code. Call on_wait() about twice a second."""
        assert self.process is not None
        while (code := self.process.poll()) is None:
            on_wait()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_SECONDS)
        return code

    def log_tail(self) -> str:
        """Return the first error in the log, the last lines, and the path of the log."""
        text = self.log.read_text(errors="replace")
        errors = (line for line in FIRST_ERROR.findall(text) if "WARNING" not in line)
        first = [f"the first error in the log: {line}" for line in errors][:1]
        return "\n".join(
            [*first, f"{LAST_LINES} {self.log}:", *text.splitlines()[-LOG_TAIL_LINES:]]
        )

    def stop(self, timeout: float | None = None) -> None:
        """Stop every process of the session: SIGTERM, then SIGKILL after `timeout` or STOP_SECONDS.

        May be called again.
        """
        if self.process is None:
            return
        for number, seconds in (
            (signal.SIGTERM, STOP_SECONDS if timeout is None else timeout),
            (signal.SIGKILL, KILL_SECONDS),
        ):
            deadline = time.monotonic() + seconds
            if group_members(self.process.pid):
                with contextlib.suppress(ProcessLookupError):  # the last one may have ended
                    os.killpg(self.process.pid, number)
            # Members can start other processes, hence the loop.
            while (members := group_members(self.process.pid)) and (
                left := deadline - time.monotonic()
            ) > 0:
                wait_for_ends(members, left)
        self.process.wait()


class Server(Program):
    """One `vllm serve`.

    Args:
        port: port of GET /health.
    """

    def __init__(
        self, command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(command, log=log, environment=environment)
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(
        self, timeout: float, on_wait: Callable[[float], None] = lambda elapsed: None
    ) -> float:
        """Wait until /health answers 200, and return the elapsed seconds.

        Calls on_wait(elapsed) about twice a second. Raises ServerError if the server ends or the
        timeout (seconds) expires.
        """
        started = time.monotonic()
        while not self._healthy():
            elapsed = time.monotonic() - started
            self.check_running()
            if elapsed > timeout:
                raise ServerError(
                    f"the server did not answer within {timeout:.0f} s\n{self.log_tail()}"
                )
            on_wait(elapsed)
            assert self.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):  # returns early if the server ends
                self.process.wait(POLL_SECONDS)
        return time.monotonic() - started

    def check_running(self) -> None:
        """Raise ServerError if the server has ended."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            raise ServerError(f"the server ended with exit code {code}\n{self.log_tail()}")

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False
