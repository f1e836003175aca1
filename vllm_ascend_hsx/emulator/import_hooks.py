"""Apply a function to a module right after its import, before the importer reads from it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Patch = Callable[[ModuleType], None]


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
