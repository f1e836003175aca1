"""What the emulator does not have: an error with the full name, at the access for a name nobody knows, at the call for a known one."""

from __future__ import annotations

from typing import Any, NoReturn


class UnknownName(AttributeError, NotImplementedError):
    """A name the emulated torch_npu does not have. An AttributeError too, so that hasattr() answers truthfully."""


def unknown(module: str, name: str) -> NoReturn:
    """Raises UnknownName for ``module.name``."""
    raise UnknownName(f"{module}.{name} does not exist in the emulated NPU")


class NotEmulated:
    """Stands for a function or class that hardware has and the emulator has not: may be imported, raises when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not implemented by the emulated NPU")

    def __getattr__(self, name: str) -> NotEmulated:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotEmulated(f"{self._name}.{name}")

    def __or__(self, _: Any) -> Any:  # stands in annotations: X | None
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._name}, not implemented by the emulated NPU>"
