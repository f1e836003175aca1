"""`hsx generate` in its own process, killed at a chosen system call. Imports nothing of the tests.

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

Client(Options("", Path()))  # loads before the fork what a first client loads
TRACED = (files, ledger, load, shards, tensors)


class DyingOs:
    """Replacement of `os`: kill the process before system call `last`, counted over all threads."""

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
    """Run; return the exit code. `log` receives the output, `log`.calls the number of calls."""
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
