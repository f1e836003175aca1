"""One row of a dataset: the part of a request that its prompt is made of."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown  # an excerpt of what may be large
from typing import Any

from vllm_ascend_hsx.protocol.strict_json import RepeatedKeyError, parse_unique

COMPLETIONS, CHAT = "completions", "chat/completions"


__all__ = ["CHAT", "COMPLETIONS", "Row", "RowError", "parsed", "repeated_key", "shown"]


class RowError(ValueError):
    """A record cannot be sent; the message names the column and the remedy."""


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
    """Return the error for an object that has a key twice."""
    return RowError(f"{where} has the key {key!r:.100} twice; give each key once")


def parsed(where: str, value: Any, kind: Any, wanted: str) -> Any:
    """Return a value of a type. A text, where no text is wanted, is read as JSON.

    Args:
        where: the value is.
        value: of JSON or Arrow.
        kind: a type, or a union of types.
        wanted: describes a right value.

    Raises:
        RowError: it is something else.
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
