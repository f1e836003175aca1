"""Hidden-state extraction for vLLM on Ascend NPUs.

Importing this package is cheap and needs neither vLLM nor torch_npu; the reader's names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_hsx.finder import find
    from vllm_ascend_hsx.reader import HiddenStates, HiddenStatesError, load, open_dir, remove

__version__ = "0.1.0.dev0"
__all__ = ["HiddenStates", "HiddenStatesError", "__version__", "find", "load", "open_dir", "remove"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from vllm_ascend_hsx import finder, reader

        return getattr(finder if name == "find" else reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
