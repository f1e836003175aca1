"""How deep random searches go: a quarter in `make test`, in full with `--long`, which `make test-all` gives."""

import os

VARIABLE = "HSX_TESTS_LONG"  # set by conftest.py where `--long` was given


def depth(full: int) -> int:
    """Return how many examples, kills or requests a search takes: `full`, or a quarter of it."""
    return full if os.environ.get(VARIABLE) else -(-full // 4)
