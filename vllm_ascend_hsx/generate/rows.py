"""One row of a dataset: read from a record, validated, and turned into a request."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "completions", "chat/completions"
# Token ids first: a preprocessed dataset has them beside the conversation they were made from.
TOKEN_COLUMNS, MESSAGE_COLUMNS, PROMPT_COLUMN = ("token_ids", "input_ids"), ("messages", "conversations"), "prompt"
COLUMNS = (*TOKEN_COLUMNS, *MESSAGE_COLUMNS, PROMPT_COLUMN)
# ShareGPT's and the API's names of roles, as values of `from`, and the API's role.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "developer": "developer",
}
_MAX_TOKEN_ID = 2**31 - 1
_DEPTH_TO_SPARE = 200  # stack frames of json's callers, which count against the same recursion limit


class RowError(ValueError):
    """A record cannot be sent; the message names the key and the remedy."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        index: position in the whole dataset; the row's file is hs_{index}.safetensors.
        content: token ids, the messages of a chat, or the text of a prompt.
        fields: further fields of the request's body that shape the prompt, such as `tools`.
    """

    index: int
    content: array[int] | list[dict[str, Any]] | str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> array[int] | None:
        """The token ids, or None for text, whose ids only the server knows."""
        return self.content if isinstance(self.content, array) else None

    @property
    def endpoint(self) -> str:
        return CHAT if isinstance(self.content, list) else COMPLETIONS

    def identity(self, request: Mapping[str, Any]) -> str:
        """Return 32 hexadecimal digits that differ for rows whose requests differ.

        Args:
            request: fields that all requests of the run have.
        """
        content = self.content.tolist() if isinstance(self.content, array) else self.content
        text = json.dumps([content, self.fields, request], ensure_ascii=False, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def prompt(self) -> dict[str, Any]:
        """Return the part of the request's body that the prompt is made of."""
        if isinstance(self.content, list):
            # A conversation that ends with the assistant's message is complete.
            return {"messages": self.content, "add_generation_prompt": self.content[-1]["role"] != "assistant", **self.fields}
        return {"prompt": self.content.tolist() if isinstance(self.content, array) else self.content, **self.fields}


def choose_column(available: Sequence[str] | Mapping[str, Any], wanted: str | None) -> str:
    """Return the wanted column, or the first of COLUMNS that exists. Raises RowError."""
    if wanted is not None:
        if wanted not in available:
            raise RowError(f"there is no {wanted!r} here, only {_listed(available)}; give --column the name of one that there is")
        return wanted
    for column in COLUMNS:
        if column in available:
            return column
    raise RowError(f"it has none of {', '.join(COLUMNS)}, only {_listed(available)}; name the column with --column")


def read_row(index: int, column: str, value: Any) -> Row:
    """Validate a value of JSON or Arrow and return it as a row.

    Args:
        index: of the row.
        column: whose name decides the type; for other names than COLUMNS the value decides.
        value: to validate.

    Raises:
        RowError: the value cannot be sent.
    """
    if isinstance(value, str):
        if column in (*TOKEN_COLUMNS, *MESSAGE_COLUMNS):
            raise RowError(f"{column} is a text; give a list, or call a text {PROMPT_COLUMN!r}")
        return Row(index, _text(column, value))
    if not isinstance(value, list | array):
        raise RowError(f"{column} is {_named(value)}; give {_wanted(column)}")
    if not value:
        raise RowError(f"{column} is empty; there is nothing to compute for it: leave this row out")
    if column in MESSAGE_COLUMNS or (column not in TOKEN_COLUMNS and isinstance(value[0], dict)):
        return Row(index, _messages(column, value))
    return Row(index, _token_ids(column, value))


def _token_ids(column: str, value: list[Any] | array[int]) -> array[int]:
    if isinstance(value, list) and set(map(type, value)) != {int}:
        at, wrong = next((at, each) for at, each in enumerate(value) if type(each) is not int)
        raise RowError(f"{column}[{at}] is {_named(wrong)}; token ids are whole numbers")
    if min(value) < 0 or max(value) > _MAX_TOKEN_ID:
        at = next(at for at, each in enumerate(value) if not 0 <= each <= _MAX_TOKEN_ID)
        raise RowError(f"{column}[{at}] is {_number(value[at])}; token ids are numbers from 0 to the vocabulary's size")
    return array("q", value)


def _text(column: str, value: str) -> str:
    if not value:
        raise RowError(f"{column} is empty; there is nothing to compute for it: leave this row out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{column} is no valid Unicode text (character {error.start}); mend it, it cannot be sent") from error
    return value


def _messages(column: str, value: list[Any] | array[int]) -> list[dict[str, Any]]:
    messages = [_message(f"{column}[{at}]", message) for at, message in enumerate(value)]
    nested: Any = messages
    for _ in range(_DEPTH_TO_SPARE):
        nested = [nested]
    try:
        json.dumps(nested, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RowError(f"{column} cannot be sent as JSON: {error}") from error
    except RecursionError:
        raise RowError(f"{column} nests too deep to be sent as JSON; leave this row out") from None
    return messages


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f'{where} is {_named(message)}; give {{"role": ..., "content": ...}} or {{"from": ..., "value": ...}}')
    # In Arrow every message has every key, with None for missing values.
    message = {key: each for key, each in message.items() if each is not None}
    if "role" not in message and "from" in message:
        said = message["from"]
        role = ROLES.get(said) if isinstance(said, str) else None
        if role is None:
            raise RowError(f"{where}.from is {_shown(said)}; use one of {', '.join(ROLES)}")
        if not isinstance(message.get("value"), str):
            raise RowError(f"{where}.value is {_named(message.get('value'))}; give the message's text")
        return {"role": role, "content": message["value"]}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RowError(f"{where}.role is {_shown(message.get('role'))}; use system, user, assistant or tool")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise RowError(f"{where}.content is {_named(content)}; give the message's text, or a list of parts")
    return message


def _wanted(column: str) -> str:
    if column in TOKEN_COLUMNS:
        return "a list of token ids"
    return "a list of messages" if column in MESSAGE_COLUMNS else "a text"


def _named(value: Any) -> str:
    """Describe a value in JSON's terms."""
    if value is None:
        return "missing or null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {_number(value)}"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, str):
        return "a text"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def _number(value: int) -> str:
    return str(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"


def _shown(value: Any) -> str:
    return repr(value[:40]) if isinstance(value, str) else _named(value)


def _listed(available: Sequence[str] | Mapping[str, Any]) -> str:
    names = list(available)
    return (", ".join(map(repr, names[:12])) + (" and more" if len(names) > 12 else "")) if names else "nothing"
