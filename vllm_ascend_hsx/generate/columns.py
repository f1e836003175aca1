"""The columns of a dataset, and the conversion of a record to a row."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vllm_ascend_hsx.generate.messages import KEYS, read_chat, with_function
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row, RowError, parsed, shown

TOKENS, CHATS = ("token_ids", "input_ids"), ("messages", "conversations")
_MAX_TOKEN_ID = 2**31 - 1
_DEPTH_TO_SPARE = 200  # stack frames reserved for the callers of json.dumps
_ALPACA = ("instruction",)
_IDS, _TEXT, _CHAT = "token ids", "a text", "a chat"  # kinds of content
_TOOL = 'a tool such as {"type": "function", "function": {"name": ..., "parameters": {...}}}'
_TURNS = 'a list of pairs such as ["question", "answer"]'
_DOCUMENTS = 'a list of objects of texts, such as {"title": ..., "text": ...}'


@dataclass
class Draft:
    """A row under construction.

    Attributes:
        given: the record, without empty values.
        column: source of `content`.
        content, fields: as in `Row`.
    """

    given: Mapping[str, Any]
    column: str
    content: Any
    fields: dict[str, Any] = field(default_factory=dict)


Put = Callable[[Draft, str, Any], None]


class Column(NamedTuple):
    """A line of the table.

    Attributes:
        names: names of the columns.
        fate: content: the first such column of a row is the prompt. sent: sent with the prompt.
            refused: would change the prompt, but cannot be sent. quiet: does not affect the prompt.
        beside: columns and kinds of content with which it is sent or refused.
        meaning: meaning of the value, or reason of the refusal; used by documentation and errors.
        put: stores a value of the column in the draft. Raises RowError.
    """

    names: tuple[str, ...]
    fate: Literal["content", "sent", "refused", "quiet"]
    beside: tuple[str, ...]
    meaning: str
    put: Put | None = None


def _same_content(draft: Draft, name: str, value: Any) -> None:
    if read_content(name, value) != draft.content:
        raise RowError(f"{name} differs from {draft.column}; drop one of them with --ignore-column")


def _alpaca(draft: Draft, name: str, value: Any) -> None:
    if name == "input":
        draft.content[-1]["content"] += "\n" + parsed(name, value, str, "a text")
    elif name == "output":
        draft.content.append({"role": "assistant", "content": parsed(name, value, str, "a text")})
    else:
        turns = parsed(name, value, list, _TURNS)
        if any(not isinstance(turn, list) or list(map(type, turn)) != [str, str] for turn in turns):
            raise RowError(f"{name} is {shown(turns)}; give {_TURNS}")
        roles = ("user", "assistant")
        draft.content[:0] = [
            {"role": role, "content": each}
            for turn in turns
            for role, each in zip(roles, turn, strict=True)
        ]


def _completion(draft: Draft, name: str, value: Any) -> None:
    value = parsed(
        name, value, type(draft.content), "a text or a list of messages, as the prompt is one"
    )
    draft.content += value if isinstance(value, str) else read_chat(name, value)


def _system(draft: Draft, name: str, value: Any) -> None:
    if draft.content[0]["role"] != "system":
        draft.content.insert(0, {"role": "system", "content": parsed(name, value, str, "a text")})
    elif draft.content[0]["content"] != value:
        raise RowError(
            f"{name} differs from the system message of {draft.column}; drop it with "
            f"--ignore-column {name}"
        )


def _tools(draft: Draft, name: str, value: Any) -> None:
    tools = [
        with_function(f"{name}[{at}]", tool, _TOOL)
        for at, tool in enumerate(parsed(name, value, list, "a list of tools"))
    ]
    if draft.fields.setdefault("tools", tools) != tools:
        raise RowError(f"{name} differs from tools; drop one of them with --ignore-column")
    # Without a choice vLLM uses "auto", and refuses it without --enable-auto-tool-choice.
    draft.fields["tool_choice"] = draft.given.get("tool_choice", "none")


def _documents(draft: Draft, name: str, value: Any) -> None:
    draft.fields[name] = [
        parsed(f"{name}[{at}]", each, dict, "an object")
        for at, each in enumerate(parsed(name, value, list, _DOCUMENTS))
    ]
    if any(not isinstance(text, str) for each in draft.fields[name] for text in each.values()):
        raise RowError(f"{name} is {shown(value)}; give {_DOCUMENTS}")


def _attention_mask(draft: Draft, name: str, value: Any) -> None:
    mask = list(parsed(name, value, list | array, "a list of 0 and 1"))
    start, stop = (mask.index(1), len(mask) - mask[::-1].index(1)) if 1 in mask else (0, 0)
    if (
        len(mask) != len(draft.content)
        or mask != [0] * start + [1] * (stop - start) + [0] * (len(mask) - stop)
        or not stop
    ):
        raise RowError(
            f"{name} is {shown(mask)}; give 1 for each token id, and 0 only for padding at the "
            "beginning and end"
        )
    draft.content = draft.content[start:stop]


def _field(kind: Any, wanted: str) -> Put:
    def put(draft: Draft, name: str, value: Any) -> None:
        draft.fields[name] = parsed(name, value, kind, wanted)

    return put


TABLE = (
    Column(
        TOKENS,
        "content",
        TOKENS,
        "token ids; texts and chats beside them are their source",
        _same_content,
    ),
    Column(CHATS, "content", CHATS, "a chat, of OpenAI's or ShareGPT's form", _same_content),
    Column(("prompt",), "content", (), "a text, or TRL's list of messages"),
    Column(_ALPACA, "content", (), "the user's message, of Alpaca's and LlamaFactory's form"),
    Column(("text",), "content", (), "a text"),
    Column(
        ("input", "history", "output"),
        "content",
        _ALPACA,
        "more of the user's message, turns before it, the answer to it",
        _alpaca,
    ),
    Column(
        ("completion",),
        "sent",
        ("prompt",),
        "follows the prompt, as a text or as messages",
        _completion,
    ),
    Column(
        ("system", "system_prompt"),
        "sent",
        (_CHAT,),
        "the first message, unless the chat begins with the same",
        _system,
    ),
    Column(("tools", "functions"), "sent", (_CHAT,), "a list of tools, or of functions", _tools),
    Column(("tool_choice",), "sent", (_CHAT,), "goes with tools; without it, none is sent"),
    Column(("documents",), "sent", (_CHAT,), "a list of objects of texts", _documents),
    Column(
        ("chat_template_kwargs",),
        "sent",
        (_CHAT,),
        "an object; its keys win over the option's",
        _field(dict, "an object"),
    ),
    Column(
        ("mm_processor_kwargs", "media_io_kwargs"),
        "sent",
        (_CHAT,),
        "an object",
        _field(dict, "an object"),
    ),
    Column(
        ("chat_template",),
        "sent",
        (_CHAT,),
        "a text; the server needs `--trust-request-chat-template`",
        _field(str, "a text"),
    ),
    Column(("reasoning_effort",), "sent", (_CHAT,), "a text", _field(str, "a text")),
    Column(
        ("add_generation_prompt", "continue_final_message"),
        "sent",
        (_CHAT,),
        "true or false",
        _field(bool, "true or false"),
    ),
    Column(
        ("add_special_tokens",),
        "sent",
        (_TEXT, _CHAT),
        "true or false",
        _field(bool, "true or false"),
    ),
    Column(
        ("attention_mask",), "sent", (_IDS,), "padding at both ends is cut off", _attention_mask
    ),
    Column(
        ("chosen", "rejected"),
        "refused",
        (_TEXT, _CHAT),
        "only one can be; name it with `--column` if it is the whole chat",
    ),
    Column(
        ("image", "images", "video", "videos", "audio", "audios"),
        "refused",
        (_IDS, _TEXT, _CHAT),
        (
            'the chat API takes them in messages, as parts such as `{"type": "image_url", '
            '"image_url": {"url": ...}}`'
        ),
    ),
    Column(
        ("pixel_values", "inputs_embeds", "prompt_embeds"),
        "refused",
        (_IDS, _TEXT, _CHAT),
        "the server computes them itself",
    ),
    Column(
        ("seq_lengths", "cu_seqlens"),
        "refused",
        (_IDS,),
        "several sequences are in one row; give each a row of its own",
    ),
    Column(
        ("loss_mask", "labels", "completion_mask", "assistant_masks"),
        "quiet",
        (),
        "which tokens are trained on",
    ),
    Column(
        ("position_ids", "token_type_ids", "seq_len", "length"),
        "quiet",
        (),
        "follows from the tokens",
    ),
    Column(
        ("id", "idx", "index", "uuid", "conversation_id", "prompt_id", "source"),
        "quiet",
        (),
        "the row's name or origin",
    ),
)
COLUMNS = {name: line for line in TABLE for name in line.names}
CONTENT = tuple(
    name
    for line in TABLE
    if line.fate == "content" and line.beside != _ALPACA
    for name in line.names
)


def read_row(index: int, record: Mapping[str, Any], options: Options, unsent: Counter[str]) -> Row:
    """Convert a record to a row.

    Args:
        index: index of the row.
        record: values of JSON or Arrow by column. Empty values are ignored.
        options: options of the run.
        unsent: counts columns and keys of messages that are not sent although they might matter.

    Raises:
        RowError: the record cannot be sent.
    """
    given = {
        name: each
        for name, each in record.items()
        if name not in options.ignored_columns
        and not (each is None or (isinstance(each, str | list | dict | array) and not each))
    }
    column = _column_to_send(given, record, options)
    draft = Draft(given, column, read_content(column, given[column]))
    kind = (
        _IDS
        if isinstance(draft.content, array)
        else _TEXT
        if isinstance(draft.content, str)
        else _CHAT
    )
    left = _put_columns(draft, kind)
    if kind == _CHAT:
        left |= {f"{column}[].{key}" for message in draft.content for key in message.keys() - KEYS}
        _complete_chat(draft, options)
    if kind == _TEXT and not options.add_special_tokens:
        draft.fields.setdefault("add_special_tokens", False)
    for name, value in ((column, draft.content), *draft.fields.items()) if kind != _IDS else ():
        _require_json(name, value)
    unsent.update(left)
    return Row(index, draft.content, draft.fields)


def _column_to_send(given: Mapping[str, Any], record: Mapping[str, Any], options: Options) -> str:
    """Return the column with the content of a row. Raises RowError.

    Args:
        given: columns that have a value and are not ignored.
        record: all columns.
        options: options of the run.
    """
    column = options.column or next(
        (name for names in (given, record) for name in CONTENT if name in names), None
    )
    if options.column is None and column in TOKENS:
        # Token ids cannot carry images. speculators keeps such messages beside the token ids.
        column = next((name for name in CHATS if _has_parts(given.get(name))), column)
    if column is None or column not in record:
        missing = f"no {column!r}" if column else f"none of {', '.join(CONTENT)}"
        raise RowError(
            f"it has {missing}, only {shown(list(record))}; name the column to send with --column"
        )
    if column not in given:
        raise RowError(f"{column} is empty; remove this row")
    return column


def _put_columns(draft: Draft, kind: str) -> set[str]:
    """Add the other columns to a request, and return the columns that are not sent.

    Raises:
        RowError: a column is needed and cannot be sent.
    """
    given, column = draft.given, draft.column
    left = given.keys() - COLUMNS.keys() - {column}
    for name, line in COLUMNS.items():  # in the table's order
        if name not in given or name == column:
            continue
        fits = kind in line.beside or column in line.beside
        if fits and line.put:
            line.put(draft, name, given[name])
        elif (line.fate == "refused" and fits and column not in line.names) or (
            line.fate == "sent" and not fits and kind != _IDS and line.beside != (_IDS,)
        ):
            raise RowError(
                f"{name} cannot be sent with {column}: {line.meaning}; or drop it with "
                f"--ignore-column {name}"
            )
        elif line.fate == "content" and kind != _IDS:
            left.add(name)
    return left


def _complete_chat(draft: Draft, options: Options) -> None:
    """Add the arguments of the chat template. Raises RowError if the fields of a chat conflict."""
    own = draft.fields.get("chat_template_kwargs", {})
    if kwargs := {**options.chat_template_kwargs, **own}:
        draft.fields["chat_template_kwargs"] = kwargs
    if draft.fields.get("continue_final_message") and draft.fields.setdefault(
        "add_generation_prompt", False
    ):
        raise RowError(
            "continue_final_message and add_generation_prompt are both true; drop one of them "
            "with --ignore-column"
        )


def read_content(column: str, value: Any) -> array[int] | list[dict[str, Any]] | str:
    """Return the content of a row. The type depends on the column's name, else on the value.

    Raises:
        RowError: the value cannot be sent.
    """
    if column in (*TOKENS, *CHATS):
        value = parsed(
            column,
            value,
            list | array,
            "a list of token ids" if column in TOKENS else "a list of messages",
        )
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if column in _ALPACA else value
    value = parsed(column, value, list | array, "a text, a list of messages or token ids")
    if column in CHATS or (column not in TOKENS and isinstance(value[0], dict)):
        return read_chat(column, value)
    if (
        (isinstance(value, list) and set(map(type, value)) != {int})
        or min(value) < 0
        or max(value) > _MAX_TOKEN_ID
    ):
        at = next(
            at
            for at, each in enumerate(value)
            if type(each) is not int or not 0 <= each <= _MAX_TOKEN_ID
        )
        raise RowError(
            f"{column}[{at}] is {shown(value[at])}; token ids are whole numbers from 0 to the "
            "vocabulary's size"
        )
    return array("q", value)


def _has_parts(messages: Any) -> bool:
    return isinstance(messages, list) and any(
        isinstance(each, dict) and isinstance(each.get("content"), list) for each in messages
    )


def _require_json(name: str, value: Any) -> None:
    for _ in range(_DEPTH_TO_SPARE):
        value = [value]
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(
            f"{name} cannot be sent as JSON: {error}; fix it or remove this row"
        ) from error
