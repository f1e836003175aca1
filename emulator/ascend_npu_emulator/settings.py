"""Settings of the emulated machine: generation, number and memory of the NPUs, and modes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

SOCS = ("a2", "a3")  # Atlas 800I A2 and A3; devices.py has the names and numbers they report
MAX_NPUS = 64  # csrc/config.h: kMaxDevices
MIN_HBM = 256 << 20  # a context takes 107 MiB (csrc/contexts.h)
_SIZE = re.compile(r"^\s*(\d{1,30}(?:\.\d{1,30})?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class SettingError(ValueError):
    """The value of an option is invalid. The message names option, value and remedy."""

    def __init__(self, option: str, value: object, remedy: str) -> None:
        shown = repr(value[:40] + "..." if isinstance(value, str) and len(value) > 40 else value)
        super().__init__(f"emulated NPU: {option}={shown} cannot be used: {remedy}")


@dataclass(frozen=True)
class Settings:
    """The emulated machine."""

    npus: int = 8
    hbm_bytes: int = 2 << 30  # of each NPU
    late: bool = False
    soc: str = SOCS[0]
    queue: bool = False
    spin: bool = False
    fail: str = ""  # the launch that fails (csrc/streams/faults.h)
    fail_file: str = ""  # a file from which ``fail`` is read once it exists

    @classmethod
    def from_environment(cls) -> Settings:
        """Read NPU_EMULATOR_NPUS, _HBM, _LATE, _SOC, _QUEUE, _SPIN, _FAIL and _FAIL_FILE.

        Raises SettingError.
        """
        environ = os.environ
        return cls(
            parse_npus("NPU_EMULATOR_NPUS", environ.get("NPU_EMULATOR_NPUS", str(cls.npus))),
            parse_size("NPU_EMULATOR_HBM", environ.get("NPU_EMULATOR_HBM", str(cls.hbm_bytes))),
            parse_flag("NPU_EMULATOR_LATE", environ.get("NPU_EMULATOR_LATE", "0")),
            parse_soc("NPU_EMULATOR_SOC", environ.get("NPU_EMULATOR_SOC", cls.soc)),
            parse_flag("NPU_EMULATOR_QUEUE", environ.get("NPU_EMULATOR_QUEUE", "0")),
            parse_flag("NPU_EMULATOR_SPIN", environ.get("NPU_EMULATOR_SPIN", "0")),
            environ.get("NPU_EMULATOR_FAIL", ""),
            environ.get("NPU_EMULATOR_FAIL_FILE", ""),
        )


def parse_npus(option: str, text: str) -> int:
    """Parse a number of NPUs, 1 to 64. Raises SettingError."""
    if not text.strip().isdecimal() or len(text) > 30 or not 1 <= int(text) <= MAX_NPUS:
        raise SettingError(option, text, f"give a number from 1 to {MAX_NPUS}")
    return int(text)


def parse_soc(option: str, text: str) -> str:
    """Parse a generation of NPUs. Raises SettingError."""
    if text not in SOCS:
        raise SettingError(option, text, f"give one of {', '.join(SOCS)}")
    return text


def parse_size(option: str, text: str) -> int:
    """Parse a size such as 1073741824, 512MiB or 1.5G (units are powers of 1024).

    Raises SettingError.
    """
    match = _SIZE.match(text)
    if match is None:
        raise SettingError(option, text, "give a size such as 512MiB or 2GiB")
    unit = (match[2] or "").upper()[:1]
    size = int(float(match[1]) * _UNITS[unit])
    if not MIN_HBM <= size <= 1 << 40:
        raise SettingError(
            option, text, "give at least 256MiB and at most 1TiB for an emulated NPU"
        )
    return size


def parse_flag(option: str, text: str) -> bool:
    """Return True for 1, False for 0 or an empty text. Raises SettingError."""
    if text.strip() not in ("", "0", "1"):
        raise SettingError(option, text, "give 0 or 1")
    return text.strip() == "1"
