"""Depth of the tests: a share with `make test`, the full depth with `make test-all` (`--long`)."""

import hashlib
import os
from pathlib import Path

VARIABLE = "HSX_TESTS_LONG"  # conftest.py sets it if `--long` is given
_ROOT = Path(__file__).parent.parent
VERIFIED = _ROOT / "emulator/tests/verified.sha256"
_EMULATOR = ("emulator/ascend_npu_emulator", "emulator/tests", "requirements")


def depth(full: int, share: int = 6) -> int:
    """Return the size of a search: `full`, or one `share`-th without `--long`, rounded up."""
    return full if is_long() else -(-full // share)


def is_long() -> bool:
    """Return True if `--long` is given."""
    return bool(os.environ.get(VARIABLE))


def emulator_is_verified() -> bool:
    """Return True if `make emulator` has tested this emulator with these tests and pins."""
    return VERIFIED.is_file() and VERIFIED.read_text().strip() == emulator_digest()


def emulator_digest() -> str:
    """Return the SHA-256 of the emulator's sources, the tests and of the pins, in hex digits."""
    digest = hashlib.sha256()
    for top in _EMULATOR:
        for path in [_ROOT / top, *sorted((_ROOT / top).rglob("*"))]:
            if path.is_file() and path != VERIFIED and "__pycache__" not in path.parts:
                digest.update(
                    f"{path.relative_to(_ROOT)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
                )
    return digest.hexdigest()


if __name__ == "__main__":
    VERIFIED.write_text(emulator_digest() + "\n")
