"""Every column of a dataset is sent, refused by name, known to have no influence, or counted."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from documents import page, rows
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.generate.columns import COLUMNS, TABLE, Column, read_row
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import RowError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = {"messages": [USER]}
FUNCTION = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
SENT_TOOLS = {"tools": TOOLS, "tool_choice": "none"}
IDS = {"input_ids": [9, 10, 11, 0, 0]}


def prompt(
    record: dict[str, Any], unsent: Counter[str] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the part of a request's body that defines the prompt."""
    row = read_row(
        0, record, Options("data", Path("out"), **options), Counter() if unsent is None else unsent
    )
    return row.prompt()


def chat(*messages: dict[str, Any], ask: bool = True, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "add_generation_prompt": ask, **fields}


# By column: a record, and the part of the body that results.
SENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_ids": ({"token_ids": [3, 1]}, {"prompt": [3, 1]}),
    "input_ids": ({"input_ids": "[3, 1]"}, {"prompt": [3, 1]}),
    "messages": (CHAT, chat(USER)),
    "conversations": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        chat(USER, ANSWER, ask=False),
    ),
    "prompt": ({"prompt": "2+2?"}, {"prompt": "2+2?"}),
    "instruction": ({"instruction": "2+2?"}, chat(USER)),
    "text": ({"text": "2+2=4"}, {"prompt": "2+2=4"}),
    "input": (
        {"instruction": "Add.", "input": "2+2"},
        chat({"role": "user", "content": "Add.\n2+2"}),
    ),
    "history": (
        {"instruction": "2+2?", "history": [["Why?", "So."]]},
        chat({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}, USER),
    ),
    "output": ({"instruction": "2+2?", "output": "4"}, chat(USER, ANSWER, ask=False)),
    "completion": ({"prompt": [USER], "completion": [ANSWER]}, chat(USER, ANSWER, ask=False)),
    "system": (CHAT | {"system": "Be brief."}, chat(SYSTEM, USER)),
    "system_prompt": (CHAT | {"system_prompt": "Be brief."}, chat(SYSTEM, USER)),
    "tools": (CHAT | {"tools": TOOLS}, chat(USER, **SENT_TOOLS)),
    "functions": (CHAT | {"functions": [FUNCTION]}, chat(USER, **SENT_TOOLS)),
    "tool_choice": (
        CHAT | {"tools": TOOLS, "tool_choice": "auto"},
        chat(USER, tools=TOOLS, tool_choice="auto"),
    ),
    "documents": (
        CHAT | {"documents": [{"title": "t", "text": "x"}]},
        chat(USER, documents=[{"title": "t", "text": "x"}]),
    ),
    "chat_template_kwargs": (
        CHAT | {"chat_template_kwargs": {"enable_thinking": False}},
        chat(USER, chat_template_kwargs={"enable_thinking": False}),
    ),
    "mm_processor_kwargs": (
        CHAT | {"mm_processor_kwargs": {"fps": 1}},
        chat(USER, mm_processor_kwargs={"fps": 1}),
    ),
    "media_io_kwargs": (
        CHAT | {"media_io_kwargs": {"video": {"fps": 1}}},
        chat(USER, media_io_kwargs={"video": {"fps": 1}}),
    ),
    "chat_template": (
        CHAT | {"chat_template": "{{ messages }}"},
        chat(USER, chat_template="{{ messages }}"),
    ),
    "reasoning_effort": (CHAT | {"reasoning_effort": "low"}, chat(USER, reasoning_effort="low")),
    "add_generation_prompt": (CHAT | {"add_generation_prompt": False}, chat(USER, ask=False)),
    "continue_final_message": (
        CHAT | {"continue_final_message": True},
        chat(USER, ask=False, continue_final_message=True),
    ),
    "add_special_tokens": (
        {"prompt": "<s>2", "add_special_tokens": False},
        {"prompt": "<s>2", "add_special_tokens": False},
    ),
    "attention_mask": (IDS | {"attention_mask": [0, 1, 1, 0, 0]}, {"prompt": [10, 11]}),
}
REFUSED = (
    *("chosen", "rejected", "image", "images", "video", "videos", "audio", "audios"),
    *("pixel_values", "inputs_embeds", "prompt_embeds", "seq_lengths", "cu_seqlens"),
)
QUIET = (
    *(
        "loss_mask",
        "labels",
        "completion_mask",
        "assistant_masks",
        "position_ids",
        "token_type_ids",
        "seq_len",
        "length",
    ),
    *("id", "idx", "index", "uuid", "conversation_id", "prompt_id", "source"),
)
BESIDE_TOKENS = sorted(set(SENT) - {"token_ids", "input_ids", "attention_mask"})


def test_documentation_has_the_column_table() -> None:
    written = [
        row
        for row in rows(page("generate.md"))
        if len(row) == 4 and row[1] in ("content", "sent", "refused", "quiet")
    ]
    assert written == [cells(line) for line in TABLE]


def cells(line: Column) -> list[str]:
    beside = [f"`{each}`" if each in COLUMNS else each for each in line.beside]
    return [
        ", ".join(f"`{name}`" for name in line.names),
        line.fate,
        ", ".join(beside),
        line.meaning,
    ]


def test_every_column_is_tested() -> None:
    assert [*SENT, *REFUSED, *QUIET] == list(COLUMNS)


@pytest.mark.parametrize("name", SENT)
def test_sent_column_is_part_of_request_and_identity(name: str) -> None:
    (record, expected), unsent = SENT[name], Counter[str]()
    assert prompt(record, unsent) == expected
    assert not unsent
    if len(record) > 1:
        without = {key: value for key, value in record.items() if key != name}
        assert (
            prompt(record, ignored_columns=frozenset((name,)))
            == prompt(without)
            == prompt({**without, name: None})
            != expected
        )
        options = Options("data", Path("out"))
        rows = [read_row(0, each, options, Counter()) for each in (record, without)]
        assert rows[0].identity({}) != rows[1].identity({})


@pytest.mark.parametrize("name", [name for name, line in COLUMNS.items() if line.fate == "sent"])
def test_sent_column_is_refused_with_other_kinds_of_content(
    name: str,
) -> None:
    record, line = {name: SENT[name][0][name]}, COLUMNS[name]
    for kind, content in (("a text", {"text": "2+2=4"}), ("a chat", CHAT)):
        if kind in line.beside:
            continue
        if line.beside == ("token ids",):
            assert prompt(content | record) == prompt(content)
            continue
        with pytest.raises(
            RowError,
            match=rf"^{name} cannot be sent with {next(iter(content))}: .*--ignore-column {name}",
        ):
            prompt(content | record)


@pytest.mark.parametrize("name", BESIDE_TOKENS)
def test_text_and_chat_columns_are_ignored_with_token_ids(name: str) -> None:
    unsent = Counter[str]()
    assert prompt({"input_ids": [3, 1]} | SENT[name][0], unsent) == {"prompt": [3, 1]}
    assert not unsent


@pytest.mark.parametrize("name", REFUSED)
def test_unsendable_column_is_refused_by_name_or_ignored_on_request(name: str) -> None:
    for kind, content in (
        ("token ids", {"input_ids": [3, 1]}),
        ("a text", {"prompt": "a"}),
        ("a chat", CHAT),
    ):
        record = content | {name: ["x"]}
        if kind in COLUMNS[name].beside:
            with pytest.raises(
                RowError,
                match=rf"^{name} cannot be sent with .*: .*; or drop it with --ignore-column {name}",
            ):
                prompt(record)
        assert (
            prompt(record, ignored_columns=frozenset((name,)))
            == prompt(content | {name: []})
            == prompt(content)
        )


@pytest.mark.parametrize("name", QUIET)
def test_column_without_influence_is_silently_ignored(name: str) -> None:
    for content in ({"input_ids": [3, 1]}, {"prompt": "a"}, CHAT):
        unsent = Counter[str]()
        assert prompt(content | {name: [1]}, unsent) == prompt(content)
        assert not unsent


def test_unsent_columns_and_message_keys_are_counted() -> None:
    unsent = Counter[str]()
    told = {**USER, "emotion": "curious"}
    for _ in range(2):
        record = {
            "messages": [told, told],
            "prompt": "2+2?",
            "input": "x",
            "score": 0.5,
            "none": None,
            "empty": [],
        }
        assert prompt(record, unsent) == chat(told, told)
    assert unsent == {"messages[].emotion": 2, "prompt": 2, "input": 2, "score": 2}


def test_any_column_can_be_selected() -> None:
    both = {"chosen": [USER, ANSWER], "rejected": [USER], "note": "x"}
    assert prompt(both, column="chosen") == chat(USER, ANSWER, ask=False)
    for value, sent in (("x", "x"), ([3], [3])):
        assert prompt({"note": value}, column="note") == {"prompt": sent}
    assert prompt({"input_ids": [1]} | CHAT, column="messages") == chat(USER)
    with pytest.raises(
        RowError, match="it has no 'other', only .*'note'.*; name the column to send with --column"
    ):
        prompt(both, column="other")


def test_messages_with_parts_are_preferred_to_token_ids() -> None:
    parts = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "http://host/a.png"}}],
    }
    record, unsent = (
        {"messages": [parts], "input_ids": [3, 1], "loss_mask": [0, 1], "attention_mask": [1, 1]},
        Counter[str](),
    )
    assert prompt(record, unsent) == chat(parts)
    assert unsent == {"input_ids": 1}
    assert prompt(record, column="input_ids") == {"prompt": [3, 1]}


def test_messages_and_conversations_of_a_row_must_agree() -> None:
    said = [{"from": "human", "value": "2+2?"}]
    for empty in (None, []):
        assert (
            prompt({"messages": empty, "conversations": said})
            == prompt({"messages": [USER], "conversations": empty})
            == chat(USER)
        )
    assert prompt({"messages": [USER], "conversations": said}) == chat(USER)
    with pytest.raises(
        RowError,
        match=("conversations differs from messages; drop one of them with --ignore-column"),
    ):
        prompt({"messages": [USER, ANSWER], "conversations": said})
    with pytest.raises(RowError, match="input_ids differs from token_ids"):
        prompt({"token_ids": [1], "input_ids": [2]})


def test_system_prompt_is_prepended_unless_present() -> None:
    assert prompt({"messages": [SYSTEM, USER], "system": "Be brief."}) == chat(SYSTEM, USER)
    with pytest.raises(
        RowError,
        match=(
            "system differs from the system message of messages; drop it with "
            "--ignore-column system"
        ),
    ):
        prompt({"messages": [SYSTEM, USER], "system": "Be long."})
    history = {
        "instruction": "2+2?",
        "history": [["Why?", "So."]],
        "system": "Be brief.",
        "output": "4",
    }
    assert [each["role"] for each in prompt(history)["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_tools_are_normalised_and_tool_choice_defaults_to_none() -> None:
    forms: list[Any] = [
        json.dumps(TOOLS),
        [FUNCTION],
        json.dumps([FUNCTION]),
        [json.dumps(TOOLS[0])],
        [{"type": "function", **FUNCTION}],
    ]
    for tools in forms:
        assert prompt(CHAT | {"tools": tools}) == chat(USER, **SENT_TOOLS)
    assert prompt(CHAT | {"tools": TOOLS, "functions": [FUNCTION]}) == chat(USER, **SENT_TOOLS)
    assert prompt(CHAT | {"tool_choice": "auto", "tools": []}) == chat(USER)
    with pytest.raises(RowError, match="functions differs from tools"):
        prompt(CHAT | {"tools": TOOLS, "functions": [{"name": "other"}]})


def test_row_kwargs_override_the_option_and_texts_have_none() -> None:
    kwargs = {"enable_thinking": True, "date": "today"}
    sent = prompt(
        CHAT | {"chat_template_kwargs": '{"enable_thinking": false}'}, chat_template_kwargs=kwargs
    )
    assert sent == chat(USER, chat_template_kwargs={"enable_thinking": False, "date": "today"})
    assert prompt(CHAT, chat_template_kwargs=kwargs) == chat(USER, chat_template_kwargs=kwargs)
    assert prompt({"prompt": "a"}, chat_template_kwargs=kwargs) == {"prompt": "a"}


def test_rendered_texts_get_no_special_tokens_with_the_option() -> None:
    assert prompt({"prompt": "<s>a"}, add_special_tokens=False) == {
        "prompt": "<s>a",
        "add_special_tokens": False,
    }
    assert prompt({"prompt": "a", "add_special_tokens": True}, add_special_tokens=False) == {
        "prompt": "a",
        "add_special_tokens": True,
    }
    assert prompt(CHAT, add_special_tokens=False) == chat(USER)
    assert prompt({"token_ids": [1]}, add_special_tokens=False) == {"prompt": [1]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            IDS | {"attention_mask": [1, 0, 1, 0, 0]},
            r"attention_mask is \[1, 0, 1, 0, 0\]; give 1 for each token id, and 0 only for padding",
        ),
        (IDS | {"attention_mask": [1, 1]}, r"attention_mask is \[1, 1\]"),
        (IDS | {"attention_mask": [0] * 5}, "attention_mask is "),
        (IDS | {"attention_mask": [1, 2, 2, 0, 0]}, "attention_mask is "),
        (IDS | {"attention_mask": array("q", [1, 1, 0, 1, 0])}, "attention_mask is "),
        (CHAT | {"tools": "weather"}, "tools is not JSON .*; give a list of tools"),
        (CHAT | {"tools": ["weather"]}, r"tools\[0\] is not JSON .*; give a tool such as"),
        (
            CHAT | {"tools": [{"type": "function"}]},
            r"tools\[0\].function.name is None; give a tool such as",
        ),
        (CHAT | {"documents": ["text"]}, r"documents\[0\] is not JSON .*; give an object"),
        (CHAT | {"documents": [{"text": 5}]}, r"documents is .*; give a list of objects of texts"),
        (
            CHAT | {"chat_template_kwargs": "low"},
            "chat_template_kwargs is not JSON .*; give an object",
        ),
        (
            CHAT | {"add_generation_prompt": "yes"},
            "add_generation_prompt is not JSON .*; give true or false",
        ),
        (
            CHAT | {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message and add_generation_prompt are both true",
        ),
        (CHAT | {"system": 5}, "system is 5; give a text"),
        (
            {"prompt": "a", "completion": [ANSWER]},
            r"completion is \[.*; give a text or a list of messages, as the prompt is one",
        ),
        (
            {"prompt": [USER], "completion": "a"},
            "completion is not JSON .*; give a text or a list of messages",
        ),
        ({"instruction": "a", "history": [["b"]]}, r"history is \[\['b'\]\]; give a list of pairs"),
        ({"instruction": "a", "history": ["bc"]}, r"history is \['bc'\]; give a list of pairs"),
    ],
)
def test_unsendable_value_is_reported_with_column_and_remedy(
    record: dict[str, Any], message: str
) -> None:
    with pytest.raises(RowError, match=f"^{message}"):
        prompt(record)


# A grammar of rows. All texts and numbers in a row differ, so that each can be searched for.
def leaves(value: Any) -> list[Any]:
    """Return all values in lists and objects, including objects in JSON texts."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        value = json.loads(value)
    if isinstance(value, dict):
        return [each for item in value.values() for each in leaves(item)]
    return [each for item in value for each in leaves(item)] if isinstance(value, list) else [value]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a record of columns that are sent together, without empty columns."""
    number = iter(range(10**6))

    def text() -> str:
        end = draw(st.sampled_from(["", " ", "ü", '"', "\n"]))
        return f"t{next(number)}{end}"

    def objects(depth: int = 2) -> dict[str, Any]:
        kinds = st.sampled_from(
            ["text", "number", "list", "object"] if depth else ["text", "number"]
        )
        made: dict[str, Any] = {}
        for _ in range(draw(st.integers(1, 3))):
            kind = draw(kinds)
            made[f"k{next(number)}"] = (
                text()
                if kind == "text"
                else next(number)
                if kind == "number"
                else [text()]
                if kind == "list"
                else objects(depth - 1)
            )
        return made

    def either(value: Any) -> Any:
        return json.dumps(value) if draw(st.booleans()) else value

    def call() -> dict[str, Any]:
        return {
            "id": text(),
            "type": "function",
            "function": {"name": text(), "arguments": either(objects())},
        }

    def message(names: tuple[str, str], roles: list[str]) -> dict[str, Any]:
        made: dict[str, Any] = {names[0]: draw(st.sampled_from(roles)), names[1]: text()}
        for key in draw(
            st.sets(
                st.sampled_from(
                    [
                        "name",
                        "reasoning_content",
                        "thinking",
                        "tool_calls",
                        "tool_call_id",
                        "weight",
                    ]
                )
            )
        ):
            made[key] = (
                [call() for _ in range(draw(st.integers(1, 2)))] if key == "tool_calls" else text()
            )
        return made

    def chat_of(names: tuple[str, str], roles: list[str]) -> list[dict[str, Any]]:
        return [message(names, roles) for _ in range(draw(st.integers(1, 3)))]

    openai = ("role", "content"), ["user", "assistant", "tool", "developer"]
    contents: dict[str, Any] = {
        "messages": lambda: chat_of(*openai),
        "conversations": lambda: chat_of(
            ("from", "value"), ["human", "gpt", "observation", "bing"]
        ),
        "prompt": lambda: chat_of(*openai),
        "instruction": text,
    }
    column = draw(st.sampled_from(list(contents)))
    made = {column: contents[column]()}
    fields: dict[str, Any] = {
        "system": text,
        "tools": lambda: either(
            [{"type": "function", "function": {"name": text(), "parameters": objects()}}]
        ),
        "documents": lambda: [{"title": text(), "text": text()}],
        "chat_template_kwargs": lambda: either(objects()),
        "mm_processor_kwargs": lambda: either(objects()),
        "chat_template": text,
        "reasoning_effort": text,
        **({"completion": lambda: chat_of(*openai)} if column == "prompt" else {}),
        **(
            {"input": text, "output": text, "history": lambda: [[text(), text()]]}
            if column == "instruction"
            else {}
        ),
    }
    for name in draw(st.sets(st.sampled_from(sorted(fields)))):
        made[name] = fields[name]()
    return made


ROLE_NAMES = {"human", "gpt", "observation", "bing"}


@given(records(), st.data())
def test_every_value_of_a_row_is_sent_and_part_of_the_identity(
    record: dict[str, Any], data: st.DataObject
) -> None:
    options = Options("data", Path("out"))
    row = read_row(0, record, options, Counter())
    sent = leaves(row.prompt())
    given = [each for each in leaves(record) if each not in ROLE_NAMES]
    alpaca = "instruction" in record and "input" in record
    for each in given:
        assert each in sent or (
            alpaca and any(isinstance(said, str) and each in said for said in sent)
        ), each
    unused = {"loss_mask": [1], "id": "x", "extra": {"a": 1}, "source": None}
    assert read_row(1, record | unused, options, Counter()).identity({}) == row.identity({})
    changed = data.draw(st.sampled_from(given))
    other = json.loads(json.dumps(record), object_hook=lambda item: item)
    other = _replaced(other, changed)
    assert read_row(0, other, options, Counter()).identity({}) != row.identity({})


def _replaced(value: Any, leaf: Any) -> Any:
    """Return the value with one leaf changed."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        return json.dumps(_replaced(json.loads(value), leaf))
    if isinstance(value, dict):
        return {key: _replaced(each, leaf) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, leaf) for each in value]
    return (f"{value}x" if isinstance(value, str) else value + 10**7) if value == leaf else value
