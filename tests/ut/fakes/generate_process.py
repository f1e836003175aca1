"""`hsx generate` in a separate process, killed at a chosen system call. Imports no test modules.

As a script: generate_process.py LOG SYSTEM_CALL OPTIONS
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate import files, ledger, run  # noqa: F401 (loaded before the fork)
from vllm_ascend_hsx.generate.client import Client
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.reader import load, shards, tensors

Client(Options("", Path()))  # the first client imports modules: import them before the fork
TRACED = (files, ledger, load, shards, tensors)


class DyingOs:
    """Replacement of `os`. Kills the process before system call `last` of all threads together."""

    def __init__(self, last: int | None, count: Path) -> None:
        self._last = last
        self._calls = 0
        self._mutex = threading.Lock()
        self._count = count

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(os, name)
        if not callable(attribute) or isinstance(attribute, type) or name in ("fspath", "strerror"):
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            with self._mutex:
                self._calls += 1
                if self._calls == self._last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return attribute(*arguments, **options)

        return call

    def tell(self) -> None:
        self._count.write_text(str(self._calls))


def main(arguments: Sequence[str], log: Path, last_call: int | None = None) -> None:
    """Run and exit with the exit code of the command.

    Args:
        arguments: of `hsx generate`.
        log: file for the output. The same name with .calls gets the number of calls.
        last_call: number of the system call that kills the process; None: no call.
    """
    dying = DyingOs(last_call, log.with_suffix(".calls"))
    for module in TRACED:
        if hasattr(module, "os"):
            module.os = dying
    with (
        open(log, "a", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        code = generate.main(arguments)
    dying.tell()
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[3:], Path(sys.argv[1]), int(sys.argv[2]))
