"""The versions that the touches were checked against, and the error for any other that lacks what is touched."""

from __future__ import annotations

from typing import Any

CHECKED_VERSIONS = {"vllm": "0.23.0", "vllm-ascend": "0.23.0"}


class IncompatibleVersionError(RuntimeError):
    """Something that we rely on in vLLM or vllm-ascend is not there."""

    def __init__(self, what: str) -> None:
        checked = ", ".join(f"{name} {version}" for name, version in CHECKED_VERSIONS.items())
        super().__init__(f"vllm-ascend-hsx needs {what}. It was checked against {checked}; install these versions.")


def require(module: Any, module_name: str, *path: str) -> tuple[Any, Any]:
    """Something in a module of vLLM or vllm-ascend that is to be replaced.

    Args:
        module: the imported module.
        module_name: its name, for the message.
        path: the attribute's name, or a class's and its attribute's.

    Returns:
        What holds it, and itself.

    Raises:
        IncompatibleVersionError: it is not there.
    """
    owner, found = None, module
    for name in path:
        owner, found = found, getattr(found, name, None)
        if found is None:
            raise IncompatibleVersionError(".".join((module_name, *path)))
    return owner, found
