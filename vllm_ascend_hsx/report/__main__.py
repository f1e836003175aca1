"""Run one step of `hsx hardware-report`: `python -m vllm_ascend_hsx.report STEP CONTEXT TOLD`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import Teller
from vllm_ascend_hsx.report.steps import STEPS


def main(name: str, context: str, told: str) -> None:
    """Run a step and append results to `told`. An error becomes the reason for missing lines."""
    tell = Teller(Path(told))

    def explain(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        tell.failed(f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = explain
    # `with` blocks then stop servers. Nothing may be downloaded.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    step = next(each for each in STEPS if each.name == name)
    module, _, function = step.work.partition(":")
    getattr(importlib.import_module(f"vllm_ascend_hsx.report.{module}"), function)(
        Context.read(Path(context)), tell
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
