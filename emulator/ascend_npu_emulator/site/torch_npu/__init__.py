"""The emulated torch_npu; everything is in ascend_npu_emulator.runtime."""

import importlib.util
import os
import sys

if importlib.util.find_spec("ascend_npu_emulator") is None:
    # A process that was started outside the environment in which the emulator is installed.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

# torch imports this package itself, as a backend, unless this package is the first one: then, as the
# real one does, it stops torch from that.
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
    """What torch calls after it has imported this package (entry point torch.backends)."""
