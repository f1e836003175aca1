"""The emulated torch_npu. ascend_npu_emulator.runtime fills it."""

import importlib.util
import os
import sys

if importlib.util.find_spec("ascend_npu_emulator") is None:
    # This process runs outside the environment in which the emulator is installed.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

# torch imports this package as a backend. If this package is imported before torch, it turns that
# off, as the real torch_npu does.
_autoload_wish = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402, F401

if _autoload_wish is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload_wish

_package = sys.modules[__name__]
if not hasattr(_package, "npu"):
    from ascend_npu_emulator import runtime

    runtime.install(_package)


def _autoload():
    """Do nothing. torch calls this after it imports the package (entry point torch.backends)."""
