"""The documentation says what the code does."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_options_reference_is_the_one_that_the_code_writes() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "options_reference.py"))
    assert tool["TARGET"].read_text() == tool["reference"](), "call `python tools/options_reference.py`"
