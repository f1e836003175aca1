"""Shell completion of `hsx` with argcomplete.

The shell runs `hsx` without arguments at each Tab, with the line in environment variables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

ASKED = "_ARGCOMPLETE"  # set by the shell function of register-python-argcomplete


def complete(commands: Mapping[str, Callable[[Sequence[str]], int]]) -> int:
    """Print the words that may come next, and end the process.

    Args:
        commands: commands by name. A command's parser completes the options (`Parser.parse_args`).

    Returns:
        Exit code of a command without such a parser. The shell completes files then.
    """
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in commands:
        os.environ[ASKED] = "2"  # index of the first word for the parser
        return commands[words[1]]([])
    names = argparse.ArgumentParser("hsx")
    names.add_argument("--version", action="store_true")
    names.add_argument("command", choices=sorted(commands))
    answer(names)
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Print the words that a parser accepts next, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser)
