"""Hidden-state extraction for vLLM on Ascend NPUs.

Importing this package is cheap and needs neither vLLM nor torch_npu. The reader's names are
imported on first use.
"""

from __future__ import annotations

from importlib import import_module

from vllm_ascend_hsx._version import __version__

TYPE_CHECKING = False  # importing typing would take most of the time of this import
if TYPE_CHECKING:
    from vllm_ascend_hsx.reader.acknowledge import acknowledge
    from vllm_ascend_hsx.reader.dataset import HiddenStatesDataset, collate
    from vllm_ascend_hsx.reader.find import find
    from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load, open_dir, remove

# Modules of the public names. torch is imported with the first name that needs it.
_HOMES = {
    "HiddenStates": "load",
    "HiddenStatesDataset": "dataset",
    "HiddenStatesError": "load",
    "acknowledge": "acknowledge",
    "collate": "dataset",
    "find": "find",
    "load": "load",
    "open_dir": "load",
    "remove": "load",
}
__all__ = [
    "HiddenStates",
    "HiddenStatesDataset",
    "HiddenStatesError",
    "__version__",
    "acknowledge",
    "collate",
    "find",
    "load",
    "open_dir",
    "remove",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"vllm_ascend_hsx.reader.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
