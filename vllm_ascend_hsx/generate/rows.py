"""One row of a dataset, and the part of a request's body that defines the prompt."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown  # shortens large values
from typing import Any

from vllm_ascend_hsx.protocol.strict_json import RepeatedKeyError, parse_unique

COMPLETIONS, CHAT = "completions", "chat/completions"


__all__ = ["CHAT", "COMPLETIONS", "Row", "RowError", "parsed", "repeated_key", "shown"]


class RowError(ValueError):
    """A record cannot be sent. The message has the column and the remedy."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        index: position in the whole dataset. The row's file is hs_{index}.safetensors.
        content: token ids, messages of a chat, or text of a prompt.
        fields: further fields of the request's body that affect the prompt, such as `tools`.
    """

    index: int
    content: array[int] | list[dict[str, Any]] | str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> array[int] | None:
        """The token ids; None for text and chats, because only the server knows their ids."""
        return self.content if isinstance(self.content, array) else None

    @property
    def endpoint(self) -> str:
        return CHAT if isinstance(self.content, list) else COMPLETIONS

    def identity(self, request: Mapping[str, Any]) -> str:
        """Return 32 hexadecimal digits that differ for rows whose requests differ.

        Args:
            request: fields of all requests of the run.
        """
        content = self.content.tolist() if isinstance(self.content, array) else self.content
        text = json.dumps([content, self.fields, request], ensure_ascii=False, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def prompt(self) -> dict[str, Any]:
        """Return the part of the request's body that defines the prompt."""
        if isinstance(self.content, list):
            # A conversation that ends with an assistant's message is complete.
            return {
                "messages": self.content,
                "add_generation_prompt": self.content[-1]["role"] != "assistant",
                **self.fields,
            }
        return {
            "prompt": self.content.tolist() if isinstance(self.content, array) else self.content,
            **self.fields,
        }


def repeated_key(where: str, key: str) -> RowError:
    """Return the error for an object with a repeated key."""
    return RowError(f"{where} has the key {key!r:.100} twice; give each key once")


def parsed(where: str, value: Any, kind: Any, wanted: str) -> Any:
    """Return the value if it has a type. Parse a text as JSON if the type is not text.

    Args:
        where: name of the value, for errors.
        value: value of JSON or Arrow.
        kind: a type, or a union of types.
        wanted: description of a valid value, for errors.

    Raises:
        RowError: the value has another type.
    """
    if isinstance(value, str | bytes) and not isinstance(value, kind):
        try:
            value = parse_unique(value)
        except RepeatedKeyError as error:
            raise repeated_key(where, error.key) from error
        except (ValueError, RecursionError) as error:
            raise RowError(f"{where} is not JSON ({error}); give {wanted}") from error
    if not isinstance(value, kind):
        raise RowError(f"{where} is {shown(value)}; give {wanted}")
    return value
