"""Changes inside the engine's processes for tests: a vLLM plugin, found on PYTHONPATH.

HSX_TEST_INSTRUMENTS is a JSON object: names of functions in INSTRUMENTS, and their arguments.
"""

from __future__ import annotations

import json
import os

from hsx_test_instruments.replacements import another_method, importable_mooncake, unfixed_proposer
from hsx_test_instruments.traces import (
    trace_collectives,
    trace_contexts,
    trace_experts,
    trace_files,
    trace_graph_mode,
)
from hsx_test_instruments.writes import (
    die_in_a_copy,
    gated_writes,
    held_writers,
    storage_that_answers_late,
)

VARIABLE = "HSX_TEST_INSTRUMENTS"
INSTRUMENTS = {
    function.__name__: function
    for function in (
        trace_collectives,
        trace_contexts,
        trace_experts,
        another_method,
        trace_files,
        trace_graph_mode,
        unfixed_proposer,
        held_writers,
        gated_writes,
        die_in_a_copy,
        storage_that_answers_late,
        importable_mooncake,
    )
}
_applied: set[str] = set()


def register() -> None:
    """Apply every instrument named in the environment, once per process."""
    for name, argument in json.loads(os.environ.get(VARIABLE, "{}")).items():
        if name not in _applied:
            _applied.add(name)
            INSTRUMENTS[name](argument)
