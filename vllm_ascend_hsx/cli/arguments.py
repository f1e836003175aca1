"""Types for argparse: paths, and numbers with bounds; errors quote the text that was typed."""

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

_NEAR = 0.6  # of 1, the similarity of a misspelt word
_SHOWN = 40  # most characters of a refused text to quote
_SIZE = re.compile(r"^(\d{1,30}(?:\.\d{1,30})?)\s*(B|[KMGT]i?B?)?$", re.ASCII | re.IGNORECASE)
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return a question about the most similar word for the end of an error; "" if none is near."""
    near = difflib.get_close_matches(typed, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors quote the user's words with control characters escaped.

    A misspelt option is named before anything else, with the one that is similar.
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
            if (
                option.startswith("-") and value == "--"
            ):  # argparse would drop it, and then miss a value
                self.error(f"argument {option}: '--' is no value; name a path of that name as ./--")
            if self._is_no_option(option) and not {"-h", "--help"} & set(own):
                self.error(
                    "there is no option "
                    f"{option}{did_you_mean(option, self._option_string_actions)}"
                )
        return super().parse_known_args(words, namespace)

    def add_output(self, result: str, quiet: tuple[str, ...] = ("-q", "--quiet")) -> None:
        """Add the options of `output.Output`. `result` describes the object that --json prints."""
        self.add_argument("--json", action="store_true", help=f"print one JSON object: {result}")
        silence = (
            "no progress and no result in words; errors still go to stderr, and the exit code "
            "tells the rest"
        )
        self.add_argument(*quiet, action="store_true", help=silence)

    def _is_no_option(self, word: str) -> bool:
        """Whether a word would be a long option, and no option begins with it or is it."""
        if (
            not word.startswith("--") or word == "--" or " " in word
        ):  # argparse takes text with blanks for a value
            return False
        return not any(
            each.startswith(word) if self.allow_abbrev else each == word
            for each in self._option_string_actions
        )

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def non_empty_path(text: str) -> Path:
    """Parse a path. An unset variable of the shell does not stand for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError(
            "it is empty; give a path, such as . for the current directory"
        )
    return Path(text)


def non_empty(text: str) -> str:
    """Parse a name. An unset variable of the shell is none."""
    if not text:
        raise argparse.ArgumentTypeError(
            "it is empty; give a path or a name, such as . for the current directory"
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
    """A number of bytes that prints as it was typed."""

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
