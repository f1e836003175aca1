"""Types for argparse: paths and numbers with bounds. Errors quote the user's text."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm_ascend_hsx.cli import completion
from vllm_ascend_hsx.protocol.arguments import LARGEST, LONGEST_S
from vllm_ascend_hsx.protocol.names import printable
from vllm_ascend_hsx.protocol.strict_json import parse

_NEAR = 0.6  # similarity of a misspelt word, from 0 to 1
_SHOWN = 40  # longest part of a refused text to quote
_SIZE = re.compile(r"^(\d{1,30}(?:\.\d{1,30})?)\s*(B|[KMGT]i?B?)?$", re.ASCII | re.IGNORECASE)
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return a suggestion of the most similar word, to append to an error; "" if there is none."""
    near = difflib.get_close_matches(typed, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser that escapes control characters in errors and suggests similar options.

    A misspelt option is reported before other errors.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if completion.ASKED in os.environ:
            completion.answer(self)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        own = words[: words.index("--") if "--" in words else None]
        for word in own:
            option, _, value = word.partition("=")
            # argparse would drop the --, and then miss a value.
            if option.startswith("-") and value == "--":
                self.error(f"argument {option}: '--' is not a value; write such a path as ./--")
            if self._is_no_option(option) and not {"-h", "--help"} & set(own):
                self.error(
                    "there is no option "
                    f"{option}{did_you_mean(option, self._option_string_actions)}"
                )
        return super().parse_known_args(words, namespace)

    def add_output(self, result: str, quiet: tuple[str, ...] = ("-q", "--quiet")) -> None:
        """Add the options of `output.Output`. `result` describes the object that --json prints."""
        self.add_argument("--json", action="store_true", help=f"print one JSON object: {result}")
        silence = "print no progress and no text result, only errors (to stderr)"
        self.add_argument(*quiet, action="store_true", help=silence)

    def _is_no_option(self, word: str) -> bool:
        """Return True if a word looks like a long option but no option matches it."""
        # argparse takes text with blanks as a value.
        if not word.startswith("--") or word == "--" or " " in word:
            return False
        return not any(
            each.startswith(word) if self.allow_abbrev else each == word
            for each in self._option_string_actions
        )

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def non_empty_path(text: str) -> Path:
    """Parse a path. Refuse "", which may come from an unset variable of the shell."""
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty; give a path, such as . for the current directory"
        )
    return Path(text)


def non_empty(text: str) -> str:
    """Parse a name. Refuse "", which may come from an unset variable of the shell."""
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty; give a path or a name, such as . for the current directory"
        )
    return text


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,30}", text, re.ASCII) or not least <= int(text) <= most:
            raise _refusal(text, f"a whole number from {least} to {most}")
        return int(text)

    return parse


def positive(most: float) -> Callable[[str], float]:
    """Return a type for numbers above 0 and at most `most`."""

    def parse(text: str) -> float:
        if not 0 < (value := _number(text)) <= most:  # false for NaN too
            raise _refusal(text, f"a number above 0 and at most {most:.15g}")
        return value

    return parse


def number_from(least: float, most: float) -> Callable[[str], float]:
    """Return a type for numbers from `least` to `most`."""

    def parse(text: str) -> float:
        if not least <= (value := _number(text)) <= most:
            raise _refusal(text, f"a number from {least:g} to {most:g}")
        return value

    return parse


def _number(text: str) -> float:
    try:
        # float() accepts Python's notation
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = parse(text.encode())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _refusal(text, 'a JSON object, such as {"enable_thinking": false}')
    return value


seconds = positive(LONGEST_S)


class Size(int):
    """A number of bytes that prints as the user's text."""

    text: str

    def __str__(self) -> str:
        return self.text


def size(text: str) -> Size:
    """Parse a size such as 64GiB, 1.5G or 1073741824 (units are powers of 1024)."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise _refusal(
            text, "a size; give bytes, or a number with KiB, MiB, GiB or TiB, such as 64GiB"
        )
    number = float(match[1]) * _UNITS[(match[2] or "B")[0].upper()]
    if number > LARGEST:
        raise _refusal(text, f"a size of at most {LARGEST >> 30}GiB")
    found = Size(number)
    found.text = text
    return found


def _refusal(text: str, wanted: str) -> argparse.ArgumentTypeError:
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return argparse.ArgumentTypeError(f"{shown!r} is not {wanted}")
