"""Patch modules right after they are imported, and replace a missing torchvision."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ascend_npu_emulator.missing import NotEmulated

Patch = Callable[[ModuleType], None]

# Names that torchvision has removed (io/__init__.py, 0.29.2). datasets tries to import them for
# type comparisons.
REMOVED = frozenset({"torchvision.io.VideoReader"})


class _PatchingLoader(Loader):
    """A loader that runs another loader, then a patch."""

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
    """A finder for modules that have a patch. The other finders locate them."""

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
    """Run each patch right after its module is imported, or now if the module is already imported.

    Raises:
        ValueError: if a module already has a patch.
    """
    for name, patch in patches.items():
        if name in _finder.patches:
            raise ValueError(f"emulated NPU: module {name} already has a patch")
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


def pil_to_tensor(pic: Any) -> torch.Tensor:
    """Return a PIL image as uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(pic))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def resize(
    inpt: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool = True,
) -> torch.Tensor:
    """Resize images [..., channels, height, width].

    The result is that of torchvision 0.28.0 with PyTorch's interpolation
    (transforms/v2/functional/_geometry.py).

    Raises:
        NotImplementedError: if the interpolation is neither bilinear nor bicubic, or ``size`` has
            one number for both dimensions.
    """
    smooth = interpolation in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
    if not smooth or len(size) != 2 or max_size is not None:
        raise NotImplementedError(
            f"torchvision's resize to {size} by {interpolation} is not implemented by the "
            "emulated NPU"
        )
    if tuple(inpt.shape[-2:]) == tuple(size):
        return inpt
    images = inpt.reshape(-1, *inpt.shape[-3:]).float()
    resized = torch.nn.functional.interpolate(
        images, tuple(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    if not inpt.is_floating_point():
        resized = resized.round().clamp(0, 255)
    return resized.to(inpt.dtype).reshape(*inpt.shape[:-2], *size)


def normalize(
    inpt: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> torch.Tensor:
    """Return (image - mean) / std for images [..., channels, height, width]."""
    center, scale = (torch.as_tensor(each, dtype=inpt.dtype).view(-1, 1, 1) for each in (mean, std))
    normal = (inpt - center) / scale
    return inpt.copy_(normal) if inplace else normal


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> NotEmulated:
        if name.startswith("__") or f"{self.__name__}.{name}" in REMOVED:
            raise AttributeError(name)
        return NotEmulated(f"{self.__name__}.{name}")


_IMAGES = "torchvision.transforms.v2.functional"


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
        if module.__name__ == "torchvision.transforms.v2":
            vars(module).update(functional=importlib.import_module(_IMAGES))
        elif module.__name__ == _IMAGES:
            vars(module).update(pil_to_tensor=pil_to_tensor, resize=resize, normalize=normalize)


def stand_in_for_torchvision() -> None:
    """Provide a ``torchvision`` with few functions if the real package is not installed.

    transformers and vLLM import torchvision even for text-only models, and a torchvision built for
    another torch would break these imports. The functions that transformers' image processors call
    work. All other names raise an error when they are used.
    """
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_TorchvisionFinder())
