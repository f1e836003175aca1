"""A value of a dataset can be sent, or it is refused with its key and a remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.rows import COLUMNS, RowError, read_row

BAD_VALUES = [
    ("token_ids", [], "token_ids is empty"),
    ("token_ids", [1, "2"], r"token_ids\[1\] is a text; token ids are whole numbers"),
    ("token_ids", [1, 2.0], r"token_ids\[1\] is the number 2.0"),
    ("input_ids", [True], r"input_ids\[0\] is true"),
    ("input_ids", [4, None], r"input_ids\[1\] is missing or null"),
    ("input_ids", [4, -1], r"input_ids\[1\] is -1; token ids are numbers from 0"),
    ("input_ids", [2**31], r"input_ids\[0\] is 2147483648"),
    ("input_ids", [10**5000], r"input_ids\[0\] is a number of 16610 bits"),
    ("input_ids", "5 6", "input_ids is a text; give a list"),
    ("input_ids", 5, "input_ids is the number 5; give a list of token ids"),
    ("prompt", "", "prompt is empty"),
    ("prompt", None, "prompt is missing or null; give a text"),
    ("prompt", {"a": 1}, "prompt is an object; give a text"),
    ("prompt", "\ud800", r"prompt is no valid Unicode text \(character 0\)"),
    ("messages", [], "messages is empty"),
    ("messages", ["hi"], r"messages\[0\] is a text; give {"),
    ("messages", [{"content": "hi"}], r"messages\[0\].role is missing or null; use system, user"),
    ("messages", [{"role": "user"}], r"messages\[0\].content is missing or null; give the message's text"),
    ("messages", [{"role": "user", "content": 4}], r"messages\[0\].content is the number 4"),
    ("messages", [{"role": "user", "content": "\udfff"}], "messages cannot be sent as JSON"),
    ("messages", [{"role": "user", "content": [{"x": float("nan")}]}], "messages cannot be sent as JSON"),
    ("conversations", [{"from": "robot", "value": "x"}], r"conversations\[0\].from is 'robot'; use one of human, user, gpt"),
    ("conversations", [{"from": "human"}], r"conversations\[0\].value is missing or null"),
]


@pytest.mark.parametrize(("column", "value", "message"), BAD_VALUES)
def test_a_value_that_cannot_be_sent_is_named_with_its_key_and_remedy(column: str, value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        read_row(0, column, value)


def test_the_message_of_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert read_row(0, "messages", [call]).content == [{"role": "assistant", "tool_calls": [{"id": "1"}]}]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.sampled_from(["role", "from", "value", "content", "x"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.sampled_from(COLUMNS), VALUES)
def test_whatever_a_file_holds_can_be_sent_or_is_refused_with_its_column(column: str, value: Any) -> None:
    try:
        row = read_row(0, column, value)
    except RowError as error:
        assert str(error).startswith(column)
    else:
        json.dumps(row.body("m", 1, False, "p"), allow_nan=False).encode()
        assert row.identity()
