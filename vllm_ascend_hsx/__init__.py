"""Hidden-state extraction for vLLM on Ascend NPUs.

Importing this package is cheap and needs neither vLLM nor torch_npu; the reader's names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_hsx.dataset import HiddenStatesDataset, collate
    from vllm_ascend_hsx.finder import find
    from vllm_ascend_hsx.reader import HiddenStates, HiddenStatesError, load, open_dir, remove

__version__ = "0.1.0.dev0"

# Where each public name comes from; torch is imported with the first of them that needs it.
_HOMES = {
    "HiddenStates": "reader",
    "HiddenStatesDataset": "dataset",
    "HiddenStatesError": "reader",
    "collate": "dataset",
    "find": "finder",
    "load": "reader",
    "open_dir": "reader",
    "remove": "reader",
}
__all__ = [
    "HiddenStates",
    "HiddenStatesDataset",
    "HiddenStatesError",
    "__version__",
    "collate",
    "find",
    "load",
    "open_dir",
    "remove",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"vllm_ascend_hsx.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
