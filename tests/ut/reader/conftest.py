"""Fixtures of the reader's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sink_harness import join_sleepers


@pytest.fixture(autouse=True)
def no_sleeper_outlives_its_test() -> Iterator[None]:
    yield
    join_sleepers()
