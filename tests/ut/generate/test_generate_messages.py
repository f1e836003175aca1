"""Messages of every form are converted to the chat API's form, or refused with the key."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.columns import CONTENT, read_row
from vllm_ascend_hsx.generate.messages import ROLES, read_chat
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row, RowError


def row_of(column: str, value: Any) -> Row:
    return read_row(0, {column: value}, Options("data", Path("out"), column=column), Counter())


def call(
    arguments: str = '{"town": "Oslo"}', name: str = "weather", call_id: str = "call00000"
) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


ASKED, TOLD = (
    {"role": "user", "content": "rain?"},
    {"role": "tool", "content": "yes", "tool_call_id": "call00000"},
)
CALLED = {"role": "assistant", "tool_calls": [call()]}
FORMS: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "a key without a value": ([{**ASKED, "tool_calls": None, "name": None}], [ASKED]),
    "an empty list of calls": ([{**ASKED, "tool_calls": []}], [{**ASKED, "tool_calls": []}]),
    "keys beside from and value": (
        [{"from": "gpt", "value": "4", "reasoning_content": "2 and 2", "name": "x", "weight": 0}],
        [
            {
                "role": "assistant",
                "content": "4",
                "reasoning_content": "2 and 2",
                "name": "x",
                "weight": 0,
            }
        ],
    ),
    "speculators' name of reasoning": (
        [{"role": "assistant", "content": "4", "thinking": "2 and 2"}],
        [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}],
    ),
    "a call of OpenAI's old form": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": '{"town": "Oslo"}'},
            },
        ],
        [ASKED, CALLED],
    ),
    "the result of a function": (
        [
            {
                "role": "assistant",
                "function_call": {"name": "weather", "arguments": {"town": "Oslo"}},
            },
            {"role": "function", "name": "weather", "content": "yes"},
        ],
        [CALLED, {**TOLD, "name": "weather"}],
    ),
    "LlamaFactory's call and observation": (
        [
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"town": "Oslo"}}',
            },
            {"from": "observation", "value": "yes"},
        ],
        [CALLED, TOLD],
    ),
    "LlamaFactory's calls": (
        [
            {
                "from": "function_call",
                "value": (
                    '[{"name": "weather", "arguments": {"town": "Oslo"}}, {"name": "sun", '
                    '"arguments": {}}]'
                ),
            },
            {"from": "observation", "value": "yes"},
            {"from": "function", "value": "no"},
            {"from": "observation", "value": "?"},
        ],
        [
            {"role": "assistant", "tool_calls": [call(), call("{}", "sun", "call00001")]},
            TOLD,
            {"role": "tool", "content": "no", "tool_call_id": "call00001"},
            {"role": "tool", "content": "?"},
        ],
    ),
    "calls of two turns": (
        [{"from": "function_call", "value": '{"name": "f"}'}, {"from": "tool", "value": "a"}] * 2,
        [
            {"role": "assistant", "tool_calls": [call("{}", "f")]},
            {"role": "tool", "content": "a", "tool_call_id": "call00000"},
            {"role": "assistant", "tool_calls": [call("{}", "f", "call00001")]},
            {"role": "tool", "content": "a", "tool_call_id": "call00001"},
        ],
    ),
    "arguments as an object": (
        [{"role": "assistant", "content": "", "tool_calls": [call({"town": "Oslo", "ü": None})]}],  # type: ignore[arg-type]
        [{"role": "assistant", "content": "", "tool_calls": [call('{"town": "Oslo", "ü": null}')]}],
    ),
    "no arguments": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [call("{}", "f")]}],
    ),
    "a call without what is around the function": (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}", "id": "x"}]}],
        [{"role": "assistant", "tool_calls": [call("{}", "f", "x")]}],
    ),
    "calls as JSON": ([{"role": "assistant", "tool_calls": json.dumps([call()])}], [CALLED]),
    "messages as JSON": ([json.dumps(ASKED)], [ASKED]),
    "reasoning without an answer": (
        [{"role": "assistant", "content": None, "reasoning": "hm"}],
        [{"role": "assistant", "reasoning": "hm"}],
    ),
    "a role that a template may know": (
        [{"role": "ipython", "content": "x"}],
        [{"role": "ipython", "content": "x"}],
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    ),
    "all roles of ShareGPT": (
        [
            {"from": role, "value": "{}" if role != "function_call" else '{"name": "f"}'}
            for role in ROLES
        ],
        [
            {"role": role, "content": "{}"}
            if said != "function_call"
            else {"role": role, "tool_calls": [call("{}", "f")]}
            for said, role in ROLES.items()
            if role != "tool"
        ],
    ),
}
FORMS["all roles of ShareGPT"][0][:] = [
    each for each in FORMS["all roles of ShareGPT"][0] if ROLES[each["from"]] != "tool"
]


@pytest.mark.parametrize("form", FORMS)
def test_messages_are_converted_to_the_form_of_the_chat_api(form: str) -> None:
    given, expected = FORMS[form]
    assert read_chat("messages", given) == expected


BAD_VALUES = [
    ("token_ids", [], "token_ids is empty"),
    ("token_ids", [1, "2"], r"token_ids\[1\] is '2'; token ids are whole numbers"),
    ("token_ids", [1, 2.0], r"token_ids\[1\] is 2.0"),
    ("input_ids", [True], r"input_ids\[0\] is True"),
    ("input_ids", [4, None], r"input_ids\[1\] is None"),
    ("input_ids", [4, -1], r"input_ids\[1\] is -1; token ids are whole numbers from 0"),
    ("input_ids", [2**31], r"input_ids\[0\] is 2147483648"),
    ("input_ids", "5 6", "input_ids is not JSON .*; give a list of token ids"),
    ("input_ids", 5, "input_ids is 5; give a list of token ids"),
    ("prompt", "", "prompt is empty"),
    ("prompt", None, "prompt is empty"),
    ("prompt", {"a": 1}, "prompt is {'a': 1}; give a text, a list of messages or token ids"),
    ("prompt", "\ud800", "prompt cannot be sent as JSON: .*; fix it or remove this row"),
    ("messages", [], "messages is empty"),
    ("messages", "hi", "messages is not JSON .*; give a list of messages"),
    ("messages", ["hi"], r"messages\[0\] is not JSON .*; give a message such as {"),
    ("messages", [{"content": "hi"}], r"messages\[0\].role is None; give system, user"),
    ("messages", [{"role": "user"}], r"messages\[0\].content is None; give the message's text"),
    ("messages", [{"role": "user", "content": 4}], r"messages\[0\].content is 4"),
    ("messages", [{"role": "assistant", "tool_calls": []}], r"messages\[0\].content is None"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": ["x"]}],
        r"messages\[0\].tool_calls\[0\] is not JSON .*; give a tool call such as",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
        r"messages\[0\].tool_calls\[0\].function.name is None; give a tool call",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [call("rain")]}],
        r"messages\[0\].tool_calls\[0\].function.arguments is not JSON .*; give an object",
    ),
    ("messages", [{"role": "user", "content": "\udfff"}], "messages cannot be sent as JSON"),
    (
        "messages",
        [{"role": "user", "content": [{"x": float("nan")}]}],
        "messages cannot be sent as JSON",
    ),
    (
        "conversations",
        [{"from": "robot", "value": "x"}],
        r"conversations\[0\].from is 'robot'; use one of human, user, gpt",
    ),
    (
        "conversations",
        [{"from": ["human"], "value": "x"}],
        r"conversations\[0\].from is \['human'\]",
    ),
    ("conversations", [{"from": "human"}], r"conversations\[0\].content is None"),
    (
        "conversations",
        [{"from": "function_call", "value": "rain"}],
        r"conversations\[0\].tool_calls is not JSON .*; give a list with a tool call",
    ),
]


@pytest.mark.parametrize(("column", "value", "message"), BAD_VALUES)
def test_unsendable_value_is_reported_with_key_and_remedy(
    column: str, value: Any, message: str
) -> None:
    with pytest.raises(RowError, match=message):
        row_of(column, value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.sampled_from(
    ["role", "from", "value", "content", "tool_calls", "function", "arguments", "name", "x"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


@given(st.sampled_from(CONTENT), VALUES)
def test_any_file_content_is_sent_or_refused_with_the_column(column: str, value: Any) -> None:
    try:
        row = row_of(column, value)
    except RowError as error:
        assert str(error).startswith(column)
    else:
        json.dumps(row.prompt(), allow_nan=False).encode()
        assert row.identity({})
