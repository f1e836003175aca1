"""A mooncake_master for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import pytest

from vllm_ascend_hsx.demo.server import free_port

START_SECONDS = 30.0


def require_mooncake() -> None:
    """Skip the test if Mooncake's package is unusable; fail in continuous integration."""
    from vllm_ascend_hsx.protocol.mooncake.store import UserError, load_package

    try:
        load_package()
    except UserError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


class MooncakeMaster:
    """`mooncake_master` in a separate process. Use as a context manager.

    Args:
        directory: directory for the log.
        options: further flags.
        host: listening address; the thread that enters must be on that machine.

    Attributes:
        address: host:port.
    """

    def __init__(self, directory: Path, *options: str, host: str = "127.0.0.1") -> None:
        self._log = directory / "mooncake_master.log"
        port, metrics = free_port(), free_port()
        self.address = f"{host}:{port}"
        package = find_spec("mooncake")
        assert package is not None and package.submodule_search_locations
        # Start the program itself: the command of 0.3.11.post1 starts it as a child that outlives
        # the command.
        program = Path(package.submodule_search_locations[0], "mooncake_master")
        program.chmod(0o755)
        places = [f"-rpc_port={port}", f"-rpc_address={host}", f"-metrics_port={metrics}"]
        self._command = [str(program), *places, *options]

    def __enter__(self) -> MooncakeMaster:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        with ExitStack() as unless_it_listens:
            unless_it_listens.callback(self.kill)
            self._wait_until_it_listens()
            unless_it_listens.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        host, _, port = self.address.partition(":")
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (
                    f"it ended:\n{self._log.read_text(errors='replace')[-2000:]}"
                )
                assert time.monotonic() < deadline, "it accepts no connections"
                with suppress(
                    subprocess.TimeoutExpired
                ):  # the end of the process, if earlier, is reported above
                    self._process.wait(0.02)

    def pause(self) -> None:
        """Keep it accepting connections without answers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Stop it as if the machine had lost power. A second call does nothing."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
