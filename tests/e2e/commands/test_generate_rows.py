"""Rows of downloaded data sets have the same tokens as the server's own rendering."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from releases import installed_is
from test_generate import Serving, serve

from tests.ut.generate.test_generate_messages import FORMS
from vllm_ascend_hsx import load
from vllm_ascend_hsx.cli.generate import main
from vllm_ascend_hsx.generate.dataset import BadRow
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row

# Shows everything that the chat API can pass to a template.
TEMPLATE = """\
{%- if tools %}T{{ tools | tojson }}{% endif %}{% if documents %}D{{ documents | tojson }}{% endif -%}
{%- if enable_thinking is defined %}K{{ enable_thinking }}{% endif %}{% if date is defined %}K{{ date }}{% endif -%}
{%- for message in messages -%}
[{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]
{%- if message.reasoning_content %}R{{ message.reasoning_content }}{% endif -%}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}C{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor -%}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif -%}
"""
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "default": None}},
    "required": ["town"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a town", "parameters": SCHEMA},
    }
]
DOCUMENTS = [{"title": "Sums", "text": "Two and two are four."}]
WITH_TOOLS = {"tools": TOOLS, "tool_choice": "none"}


def called(arguments: Any, number: int = 1, name: str = "weather") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call(arguments, f"c{number}", name)],
    }


def _call(arguments: Any, call_id: str, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*messages: dict[str, Any], ask: bool = False, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "add_generation_prompt": ask, **fields}


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pretty(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=2))


def packed(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def separated(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows(
            [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
            for row in rows
        )


class Case(NamedTuple):
    """A data set, and for each row the equivalent request body, or the start of the refusal."""

    file: str
    write: Callable[[Path, list[dict[str, Any]]], None]
    rows: list[dict[str, Any]]
    expected: list[dict[str, Any] | str]


IN_OSLO, SUM = {"town": "Oslo"}, {"a": 17, "b": 3}
ARGUMENTS = [
    {"messages": [USER, called(IN_OSLO)]},
    {"messages": [USER, called(SUM, 2, "multiply")]},
]
ARGUMENTS_SENT = [
    chat(USER, called(json.dumps(IN_OSLO))),
    chat(USER, called(json.dumps(SUM), 2, "multiply")),
]
TALK = [
    USER,
    called('{"town": "Oslo"}'),
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ANSWER,
]
OLD_CALL = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "weather", "arguments": '{"town": "Oslo"}'},
}
OLD_RESULT = {"role": "function", "name": "weather", "content": "rain"}
NOW_CALLED = {"role": "assistant", "tool_calls": [_call('{"town": "Oslo"}', "call00000")]}
NOW_RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "rain"}
SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
CASES = {
    "tools": Case(
        "d.jsonl", lines, [{"messages": TALK, "tools": TOOLS}], [chat(*TALK, **WITH_TOOLS)]
    ),
    "tools as JSON": Case(
        "d.jsonl",
        lines,
        [{"messages": TALK, "tools": json.dumps(TOOLS)}],
        [chat(*TALK, **WITH_TOOLS)],
    ),
    "functions": Case(
        "d.jsonl",
        lines,
        [{"messages": TALK, "functions": [TOOLS[0]["function"]]}],
        [chat(*TALK, **WITH_TOOLS)],
    ),
    "kwargs": Case(
        "d.jsonl",
        lines,
        [{"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "date": "today"}}],
        [chat(USER, ask=True, chat_template_kwargs={"enable_thinking": False, "date": "today"})],
    ),
    "system and documents": Case(
        "d.jsonl",
        lines,
        [{"messages": [USER, ANSWER], "system": "Be brief.", "documents": DOCUMENTS}],
        [chat(SYSTEM, USER, ANSWER, documents=DOCUMENTS)],
    ),
    "reasoning": Case(
        "d.jsonl",
        lines,
        [{"conversations": [SHAREGPT[0], {**SHAREGPT[1], "reasoning_content": "two and two"}]}],
        [chat(USER, {**ANSWER, "reasoning_content": "two and two"})],
    ),
    "arguments as objects": Case("d.jsonl", lines, ARGUMENTS, ARGUMENTS_SENT),
    "arguments of Arrow": Case("d.parquet", parquet, ARGUMENTS, ARGUMENTS_SENT),
    "roles of functions": Case(
        "d.jsonl",
        lines,
        [
            {"messages": [USER, OLD_CALL, OLD_RESULT, ANSWER]},
            {
                "conversations": [
                    SHAREGPT[0],
                    {
                        "from": "function_call",
                        "value": '{"name": "weather", "arguments": {"town": "Oslo"}}',
                    },
                    {"from": "observation", "value": "rain"},
                    SHAREGPT[1],
                ]
            },
        ],
        [
            chat(USER, NOW_CALLED, {**NOW_RESULT, "name": "weather"}, ANSWER),
            chat(USER, NOW_CALLED, NOW_RESULT, ANSWER),
        ],
    ),
    "padding": Case(
        "d.jsonl",
        lines,
        [
            {
                "input_ids": [9, 10, 11, 0, 0, 0],
                "attention_mask": [1, 1, 1, 0, 0, 0],
                "loss_mask": [0, 0, 1, 0, 0, 0],
            }
        ],
        [{"prompt": [9, 10, 11]}],
    ),
    "ShareGPT": Case(
        "d.jsonl",
        lines,
        [
            {"id": "a", "conversations": SHAREGPT},
            {"id": "b", "conversations": []},
            {"conversations": [SHAREGPT[0], {"from": "bing", "value": "4"}]},
        ],
        [chat(USER, ANSWER), "conversations is empty", chat(USER, ANSWER)],
    ),
    "a pretty list": Case(
        "d.json", pretty, [{"id": "a", "conversations": SHAREGPT}], [chat(USER, ANSWER)]
    ),
    "TRL": Case(
        "d.jsonl.gz",
        packed,
        [
            {"prompt": "2+2=", "completion": "4"},
            {"prompt": [USER], "completion": [ANSWER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]},
            {"messages": [USER], "images": ["a.png"]},
        ],
        [{"prompt": "2+2=4"}, chat(USER, ANSWER), "chosen cannot be sent", "images cannot be sent"],
    ),
    "Alpaca": Case(
        "d.jsonl",
        lines,
        [
            {
                "instruction": "Add.",
                "input": "2+2",
                "output": "4",
                "history": [["2+2?", "4"]],
                "system": "Be brief.",
            },
            {"instruction": "2+2?", "input": ""},
        ],
        [
            chat(SYSTEM, USER, ANSWER, {"role": "user", "content": "Add.\n2+2"}, ANSWER),
            chat(USER, ask=True),
        ],
    ),
    "CSV": Case(
        "d.csv", separated, [{"messages": TALK, "tools": TOOLS}], [chat(*TALK, **WITH_TOOLS)]
    ),
    "messages and conversations": Case(
        "d.parquet",
        parquet,
        [
            {"messages": [USER, ANSWER], "conversations": None},
            {"messages": None, "conversations": SHAREGPT},
        ],
        [chat(USER, ANSWER), chat(USER, ANSWER)],
    ),
}


@pytest.fixture(scope="module")
def serving(tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("rows")
    (directory / "template.jinja").write_text(TEMPLATE)
    options = [
        "--chat-template",
        str(directory / "template.jinja"),
        *(["--enable-scale-out"] if installed_is(">=0.30") else []),
    ]
    with serve(tiny_minimax_m2, directory / "hidden_states", directory, *options) as started:
        yield started


def rendered(serving: Serving, body: dict[str, Any]) -> list[int]:
    """Return the server's tokens for a body."""
    path = "chat/completions" if "messages" in body else "completions"
    answer = httpx.post(
        f"{serving.server.url}/v1/{path}/render",
        json={"model": str(serving.model), **body},
        timeout=120,
    )
    assert answer.is_success, (answer.text, body)
    found = answer.json()
    return (found if "messages" in body else found[0])["token_ids"]


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_tokens_of_the_whole_row_or_its_refusal_names_the_column(
    name: str, serving: Serving, tmp_path: Path
) -> None:
    case = CASES[name]
    data, output = tmp_path / case.file, serving.storage / name
    case.write(data, case.rows)
    read = list(open_dataset(Options(str(data), output)).records(lambda row: True))
    expected = [
        each if isinstance(each, str) else rendered(serving, each) for each in case.expected
    ]
    for row, right in zip(read, expected, strict=True):
        if isinstance(right, str):
            assert isinstance(row, BadRow) and row.problem.startswith(right)
        else:
            assert isinstance(row, Row) and rendered(serving, row.prompt()) == right
    assert (
        main(
            [
                "--data",
                str(data),
                "--output",
                str(output),
                "--endpoint",
                serving.server.url,
                "--skip-invalid",
                "--validate",
            ]
        )
        == 0
    )
    stored = {
        index: load(serving.path(name, index)).token_ids.tolist()
        for index, right in enumerate(expected)
        if not isinstance(right, str)
    }
    assert stored == {
        index: right for index, right in enumerate(expected) if not isinstance(right, str)
    }
    assert len(serving.left(name)) == len(stored) + len(
        [each for each in serving.left(name) if not each.startswith("hs_")]
    )


def test_the_template_shows_every_part_of_a_row(serving: Serving) -> None:
    """Otherwise the comparisons would prove nothing about a part."""
    whole = (
        CASES["tools"].expected[0],
        CASES["kwargs"].expected[0],
        CASES["system and documents"].expected[0],
        CASES["reasoning"].expected[0],
    )
    for body in whole:
        assert isinstance(body, dict)
        for key in body.keys() - {"messages", "tool_choice", "add_generation_prompt"}:
            assert rendered(serving, body) != rendered(
                serving,
                {name: value for name, value in body.items() if name != key}
                | {"tool_choice": "none"},
            )
        for number, message in enumerate(body["messages"]):
            for key in message.keys() - {"role", "content"}:
                less = [dict(each) for each in body["messages"]]
                del less[number][key]
                assert rendered(serving, body) != rendered(serving, {**body, "messages": less})


@pytest.mark.parametrize("form", FORMS)
def test_the_server_accepts_messages_of_every_form(
    form: str, serving: Serving, tmp_path: Path
) -> None:
    given, expected = FORMS[form]
    data = tmp_path / "d.jsonl"
    lines(data, [{"messages": given}])
    (row,) = open_dataset(Options(str(data), tmp_path)).rows()
    assert rendered(serving, row.prompt()) == rendered(
        serving,
        {"messages": expected, "add_generation_prompt": row.prompt()["add_generation_prompt"]},
    )
