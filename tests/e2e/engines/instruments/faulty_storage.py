"""Make system calls of our sink fail, in the engine's process; the driver sets the rules."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
from types import ModuleType
from typing import Any

SINK_MODULES = (
    *("sinks.data_file", "sinks.request_file", "sinks.storage", "sinks.file"),
    *("protocol.files", "protocol.lock", "protocol.checksum"),
)

# {"call": function of os or fcntl, or "reserve"; "errno": name; "name": regex of file names}
rules: list[dict[str, str]] = []
hits: list[str] = []  # "call name" of every raised error


class _Faulty:
    """Replaces a module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            about = _about(args)
            for rule in rules:
                if rule["call"] == name and re.search(rule["name"], about):
                    hits.append(f"{name} {about}")
                    if name == "close":  # a close that fails still closes
                        attribute(*args, **kwargs)
                    number = getattr(errno, rule["errno"])
                    raise OSError(number, os.strerror(number))
            return attribute(*args, **kwargs)

        return call


def _about(args: tuple[Any, ...]) -> str:
    """Return the file names of a call."""
    names = []
    for arg in args[:2]:
        if isinstance(arg, str):
            names.append(arg)
        elif isinstance(arg, int):
            try:
                names.append(os.readlink(f"/proc/self/fd/{arg}"))
            except OSError:
                continue  # a number that is not a descriptor
    return " ".join(names)


def install() -> None:
    """Replace os and fcntl in the sink's modules, once."""
    from vllm_ascend_hsx.sinks import storage

    for name in SINK_MODULES:
        module = importlib.import_module(f"vllm_ascend_hsx.{name}")
        for attribute, real in (("os", os), ("fcntl", fcntl)):
            if getattr(module, attribute, None) is real:
                setattr(module, attribute, _Faulty(real))
        if getattr(module, "reserve", None) is storage.reserve:
            module.reserve = _Faulty(storage).reserve  # type: ignore[attr-defined]
