"""Convert the messages of a chat to the form of vLLM's chat API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from vllm_ascend_hsx.generate.rows import RowError, parsed, shown

# ShareGPT's `from` by the API's role. ShareGPT itself also has conversations with bing and bard.
# LlamaFactory's function_call is a call of a tool, and observation is the result.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
    "developer": "developer",
}
# Keys that vLLM passes to the chat template (parse_chat_messages). It drops all others.
KEYS = frozenset(
    (
        "role",
        "content",
        "name",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "tools",
        "task",
    )
)
_MESSAGE = 'a message such as {"role": ..., "content": ...} or {"from": ..., "value": ...}'
_CALL = 'a tool call such as {"function": {"name": ..., "arguments": {...}}}'


def read_chat(column: str, value: Iterable[Any]) -> list[dict[str, Any]]:
    """Convert messages of OpenAI's or ShareGPT's form.

    Function calls and results of the old API become tool calls and results. A call without an id
    and the result of the call get the same new id.

    Raises:
        RowError: a message cannot be sent.
    """
    called: list[str] = []  # new ids of calls without a result so far
    numbers = count()
    return [
        _message(f"{column}[{at}]", message, called, numbers) for at, message in enumerate(value)
    ]


def with_function(where: str, value: Any, wanted: str) -> dict[str, Any]:
    """Return a tool or a tool call. Add `type` and `function` if only the function was given.

    Raises:
        RowError: there is no function with a name.
    """
    value = parsed(where, value, dict, wanted)
    if "function" not in value:
        outside = {key: value[key] for key in ("type", "id") if key in value}
        value = {
            **outside,
            "function": {key: each for key, each in value.items() if key not in outside},
        }
    function = parsed(f"{where}.function", value["function"], dict, wanted)
    parsed(f"{where}.function.name", function.get("name"), str, wanted)
    return {"type": "function", **value, "function": dict(function)}


def _message(where: str, value: Any, called: list[str], numbers: Iterator[int]) -> dict[str, Any]:
    message = {
        key: each for key, each in parsed(where, value, dict, _MESSAGE).items() if each is not None
    }
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if str(sender) not in ROLES:
            raise RowError(f"{where}.from is {shown(sender)}; use one of {', '.join(ROLES)}")
        key = "tool_calls" if sender == "function_call" else "content"
        message = {
            "role": ROLES[sender],
            **({key: message.pop("value")} if "value" in message else {}),
            **message,
        }
    parsed(f"{where}.role", message.get("role"), str, "system, user, assistant or tool")
    if "thinking" in message and "reasoning_content" not in message:
        message["reasoning_content"] = message.pop("thinking")  # as speculators does
    if "function_call" in message:
        message["tool_calls"] = {"function": message.pop("function_call")}
    if message.get("tool_calls"):
        calls = parsed(
            f"{where}.tool_calls", message["tool_calls"], list | dict, f"a list with {_CALL}"
        )
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [
            _call(f"{where}.tool_calls[{at}]", call, called, numbers)
            for at, call in enumerate(calls)
        ]
    if message["role"] == "function":
        message["role"] = "tool"
    if message["role"] == "tool" and called:
        message.setdefault("tool_call_id", called.pop(0))
    if "content" in message or not any(
        map(message.get, ("tool_calls", "reasoning", "reasoning_content"))
    ):
        parsed(
            f"{where}.content",
            message.get("content"),
            str | list,
            "the message's text, or a list of parts",
        )
    return message


def _call(where: str, value: Any, called: list[str], numbers: Iterator[int]) -> dict[str, Any]:
    call = with_function(where, value, _CALL)
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        parsed(f"{where}.function.arguments", arguments, dict | list, "an object")  # as vLLM does
    call["function"]["arguments"] = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    if not call.get("id"):
        # Mistral's tokenizers require nine letters and digits.
        call["id"] = f"call{next(numbers):05d}"
        called.append(call["id"])
    return call
