"""A substitute for torchvision, which transformers and vLLM import even for text-only models.

A torchvision built for another torch would break those imports, and the emulated stack has no image
models. So its names can be imported, and raise NotImplementedError when used.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_ascend_hsx.emulator.missing import NotEmulated

# Names that torchvision no longer has (io/__init__.py, 0.29.2). datasets tries to import them for
# type comparisons.
REMOVED = frozenset({"torchvision.io.VideoReader"})


class InterpolationMode(enum.Enum):
    """The enumeration that transformers reads when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> NotEmulated:
        if name.startswith("__") or f"{self.__name__}.{name}" in REMOVED:
            raise AttributeError(name)
        return NotEmulated(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision" and name not in REMOVED
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="0.0.0", InterpolationMode=InterpolationMode)


def install() -> None:
    """Provide ``torchvision`` if it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
