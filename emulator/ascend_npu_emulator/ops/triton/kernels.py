"""The emulated ``triton``: ``jit`` and related decorators, and the launch of kernels.

The emulated stack has no Triton package, so vLLM's HAS_TRITON would be False and vllm-ascend would
take other paths than on hardware (MiniMax-M2 would not run: vllm::split_qkv_tp_rmsnorm_rope exists
only with Triton). With this module HAS_TRITON is True and all paths are the same as on hardware. A
launch runs the unmodified source of the kernel in the language of language.py, or a reference in
plain torch from references.py.

Unlike on hardware, the programs of a grid run one after the other, autotuning takes the first
configuration, and nothing is compiled. A kernel that exceeds the device's scratch memory therefore
runs here. torch.compile does not know these kernels: tracing a launch raises an error, but a launch
inside a custom operator works.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ascend_npu_emulator.ops.recording import record_launch
from ascend_npu_emulator.ops.triton.language import tl
from ascend_npu_emulator.ops.triton.pointers import PROGRAM, Pointer

Arguments = dict[str, Any]
# Launch options that affect only compilation (triton-ascend adds the last two).
_LAUNCH_OPTIONS = frozenset(
    {
        "num_warps",
        "num_stages",
        "num_ctas",
        "maxnreg",
        "multibuffer",
        "has_auto_blockify_blacklist_op",
    }
)
REFERENCES: dict[str, Callable[[tuple[int, ...], Arguments], None]] = {}


class Kernel:
    """A function decorated with ``triton.jit``.

    ``kernel[grid](arguments)`` launches the kernel. A kernel calls another kernel directly.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        self.configuration: Arguments = {}
        self.heuristics: dict[str, Callable[[Arguments], Any]] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not PROGRAM.kernel:
            raise RuntimeError(f"Triton kernel {self.name} must be launched as kernel[grid](...)")
        return self.fn(*arguments, **named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def bind(self, *arguments: Any, **named: Any) -> Arguments:
        """Return every parameter of the kernel by name, without launch options.

        Raises TypeError for an unknown name.
        """
        passed = {
            name: value
            for name, value in named.items()
            if name in self.signature.parameters or name not in _LAUNCH_OPTIONS
        }
        bound = self.signature.bind_partial(*arguments, **{**self.configuration, **passed})
        for name, value in self.heuristics.items():
            bound.arguments[name] = value(dict(bound.arguments))
        bound = self.signature.bind(*bound.args, **bound.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _launch(self, grid: Any, *arguments: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"Triton kernel {self.name} in torch.compile is not implemented by the emulated NPU"
            )
        bound = self.bind(*arguments, **named)
        sizes = grid(bound) if callable(grid) else grid
        sizes = (sizes,) if isinstance(sizes, int) else tuple(int(size) for size in sizes)
        if not 1 <= len(sizes) <= 3 or any(size < 0 for size in sizes):
            raise ValueError(
                f"Triton kernel {self.name}: grid {sizes} must have one to three sizes"
            )
        if any(size > 65535 for size in sizes):
            raise ValueError(
                f"Triton kernel {self.name}: grid {sizes} exceeds the 65535 programs that the "
                "device launches at once"
            )
        run = REFERENCES.get(self.name, self.interpret)
        if not record_launch(self.name, sizes, bound, run):
            run(sizes, bound)

    def interpret(self, grid: tuple[int, ...], bound: Arguments) -> None:
        """Run the kernel's own source for every program of ``grid``."""
        inside = {
            name: Pointer(value, name)
            if isinstance(value, torch.Tensor)
            else self._scalar(name, value)
            for name, value in bound.items()
        }
        width, height, depth = (*grid, 1, 1)[:3]
        whole = (width, height, depth)
        before = PROGRAM.index, PROGRAM.grid, PROGRAM.kernel
        try:
            for z in range(depth):
                for y in range(height):
                    for x in range(width):
                        PROGRAM.index, PROGRAM.grid, PROGRAM.kernel = (x, y, z), whole, self.name
                        self.fn(**inside)
        finally:
            PROGRAM.index, PROGRAM.grid, PROGRAM.kernel = before

    def _scalar(self, name: str, value: Any) -> Any:
        """Convert a number to a scalar that has ``.to``; return a constexpr unchanged."""
        constant = "constexpr" in str(self.fn.__annotations__.get(name, ""))
        if constant or self.fn.__annotations__.get(name) == tl.constexpr or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return torch.tensor(
                value, dtype=torch.int32 if -(2**31) <= value < 2**31 else torch.int64
            )
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float32)
        return value


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``@triton.jit``, with or without options. Options affect only compilation."""
    return Kernel(function) if function is not None else Kernel


class Config:
    """``triton.Config``: one choice of constexpr arguments."""

    def __init__(self, kwargs: Mapping[str, Any], **options: Any) -> None:
        self.kwargs = dict(kwargs)
        self.options = options


class Autotuner(Kernel):
    """A kernel decorated with ``triton.autotune``. It runs with the first configuration."""

    def __init__(self, kernel: Kernel, configs: Sequence[Config]) -> None:
        super().__init__(kernel.fn)
        self.heuristics = kernel.heuristics
        self.configuration = configs[0].kwargs if configs else {}


def autotune(configs: Sequence[Config], **options: Any) -> Callable[[Kernel], Autotuner]:
    """``@triton.autotune``: use the first of ``configs``."""
    return functools.partial(Autotuner, configs=configs)


def heuristics(values: Mapping[str, Callable[[Arguments], Any]]) -> Callable[[Kernel], Kernel]:
    """``@triton.heuristics``: constexpr arguments computed from the others at launch."""

    def attach(kernel: Kernel) -> Kernel:
        kernel.heuristics = {**kernel.heuristics, **values}
        return kernel

    return attach


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _device_properties(device: int) -> dict[str, int]:
    """Return a 910B3's core counts, for vllm-ascend's grid sizes (ops/triton/triton_utils.py)."""
    return {"num_aicore": 20, "num_vectorcore": 40}


class Triton(SimpleNamespace):
    """The namespace ``triton``. An unknown name raises an AttributeError that names it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"triton.{name} is not part of the emulated Triton")


def make_triton() -> Triton:
    """Return a new ``triton`` namespace with the language."""
    active = SimpleNamespace(utils=SimpleNamespace(get_device_properties=_device_properties))
    return Triton(
        __name__="triton",
        __version__="3.2.0",
        jit=jit,
        autotune=autotune,
        heuristics=heuristics,
        Config=Config,
        next_power_of_2=next_power_of_2,
        cdiv=cdiv,
        language=tl,
        runtime=SimpleNamespace(
            driver=SimpleNamespace(active=active),
            autotuner=SimpleNamespace(Autotuner=Autotuner),
            jit=SimpleNamespace(JITFunction=Kernel),
        ),
    )
