"""Answer a shell that completes a command line of `hsx`, by argcomplete.

The shell runs `hsx` without arguments at each Tab, and gives the line in variables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

ASKED = "_ARGCOMPLETE"  # set by the function that register-python-argcomplete defines


def complete(commands: Mapping[str, Callable[[Sequence[str]], int]]) -> int:
    """Print the words that may come next, and end the process.

    Args:
        commands: by name. The parser of one answers for its options; see `Parser.parse_args`.

    Returns:
        A command's exit code if it has no such parser. The shell completes files then.
    """
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in commands:
        os.environ[ASKED] = "2"  # the word at which the arguments of the parser begin
        return commands[words[1]]([])
    names = argparse.ArgumentParser("hsx")
    names.add_argument("--version", action="store_true")
    names.add_argument("command", choices=sorted(commands))
    answer(names)
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Print the words that a parser takes next, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser)
