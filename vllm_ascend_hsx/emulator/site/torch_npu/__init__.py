"""The emulated torch_npu; everything is in vllm_ascend_hsx.emulator.runtime."""

import importlib.util
import os
import sys

if importlib.util.find_spec("vllm_ascend_hsx") is None:
    # A process that was started outside the environment in which vllm_ascend_hsx is installed.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4)))

import torch  # noqa: F401  (torch comes first, and imports this package itself: its backends autoload)

_package = sys.modules[__name__]
if not hasattr(_package, "npu"):
    from vllm_ascend_hsx.emulator import runtime

    runtime.install(_package)


def _autoload():
    """What torch calls after it has imported this package (entry point torch.backends)."""
