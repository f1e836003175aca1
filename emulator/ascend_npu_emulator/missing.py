"""Errors for missing names. Unknown names fail on access, known ones when they are called."""

from __future__ import annotations

from typing import Any, NoReturn


class UnknownName(AttributeError, NotImplementedError):
    """The emulated torch_npu lacks a name. An AttributeError too, so that hasattr() works."""


def unknown(module: str, name: str) -> NoReturn:
    """Raise UnknownName for ``module.name``."""
    raise UnknownName(f"{module}.{name} does not exist in the emulated NPU")


class NotEmulated:
    """A function or class of torch_npu that is not emulated.

    It can be imported but raises when used.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not implemented by the emulated NPU")

    def __getattr__(self, name: str) -> NotEmulated:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotEmulated(f"{self._name}.{name}")

    def __or__(self, _: Any) -> Any:  # used in annotations: X | None
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, not implemented by the emulated NPU>"
