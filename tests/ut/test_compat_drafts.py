"""The engine asks for draft tokens whatever their number is, and must have an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_hsx.compat.drafts import have_no_drafts_to_take
from vllm_ascend_hsx.compat.versions import IncompatibleVersionError


class Runner:
    def __init__(self, method: str) -> None:
        self.speculative_config = SimpleNamespace(method=method)

    def take_draft_token_ids(self) -> Any:
        return None


def runner(method: str) -> Any:
    module = SimpleNamespace(NPUModelRunner=type("NPUModelRunner", (Runner,), {}))
    have_no_drafts_to_take(module)
    return module.NPUModelRunner(method)


def test_a_runner_that_extracts_says_that_there_are_none() -> None:
    # vllm/v1/engine/core.py:583 stops the engine otherwise, when a request with structured outputs comes.
    drafts = runner("extract_hidden_states").take_draft_token_ids()
    assert drafts.req_ids == drafts.draft_token_ids == []


def test_other_methods_are_left_alone() -> None:
    assert runner("ngram").take_draft_token_ids() is None


def test_a_runner_that_is_asked_in_another_way_is_refused() -> None:
    with pytest.raises(IncompatibleVersionError, match="take_draft_token_ids"):
        have_no_drafts_to_take(SimpleNamespace(NPUModelRunner=object))
