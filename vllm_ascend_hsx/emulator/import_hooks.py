"""What happens on imports: modules are patched right after theirs; torchvision is a stand-in."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_ascend_hsx.emulator.missing import NotEmulated

Patch = Callable[[ModuleType], None]

# Names that torchvision no longer has (io/__init__.py, 0.29.2). datasets tries to import them for
# type comparisons.
REMOVED = frozenset({"torchvision.io.VideoReader"})


class _PatchingLoader(Loader):
    """Run another loader, then a function."""

    def __init__(self, loader: Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name: str) -> object:  # get_source, get_filename, is_package, ...
        return getattr(self._loader, name)


class PatchingFinder(MetaPathFinder):
    """Find the modules that have a patch, using the other finders."""

    def __init__(self) -> None:
        self.patches: dict[str, Patch] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.patches or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if (
            spec is not None
            and spec.loader is not None
            and not isinstance(spec.loader, _PatchingLoader)
        ):
            spec.loader = _PatchingLoader(spec.loader, self.patches[name])
        return spec


_finder = PatchingFinder()


def install(patches: Mapping[str, Patch]) -> None:
    """Run each module's patch after its import, or at once if the module is already imported.

    Raises:
        ValueError: if a module already has a patch.
    """
    for name, patch in patches.items():
        if name in _finder.patches:
            raise ValueError(f"emulated NPU: two patches for module {name}")
        _finder.patches[name] = patch
        if name in sys.modules:
            patch(sys.modules[name])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


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


class _TorchvisionFinder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision" and name not in REMOVED
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="0.0.0", InterpolationMode=InterpolationMode)


def stand_in_for_torchvision() -> None:
    """Provide ``torchvision`` if it is not installed; its names raise errors when they are used.

    transformers and vLLM import it even for text-only models, and a torchvision built for another
    torch would break those imports.
    """
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_TorchvisionFinder())
