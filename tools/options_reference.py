"""Write docs/options.md from the options and parsers: `python tools/options_reference.py`.

A test compares the page with the code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from vllm_ascend_hsx.cli.arguments import Parser
from vllm_ascend_hsx.cli.main import COMMANDS, Command
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.arguments import parse_size
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions

TARGET = Path(__file__).parents[1] / "docs" / "options.md"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# Removed from the descriptions of sizes, because the head of the page has it.
SIZE_HINT = re.compile(r"(\.|;) [Bb]ytes, or a size(?: such as '\w+')?\.")
SHARED_OPTIONS = {"help", "json", "quiet"}

HEAD = """# Options and commands

`tools/options_reference.py` generates this page from the code.

The options are keys of `kv_connector_extra_config`, or of `hsx serve --option KEY=VALUE`. The server
does not start with an unknown key or a wrong type, and the error names the key, the value and the
remedy. A size is a number of bytes or text such as `"4GiB"`.

"""
MOONCAKE = """
## mooncake

The keys of the option `mooncake`, named as in the Mooncake store of hs_connectors.

"""
COMMANDS_HEAD = """
## Commands

`--json` prints one JSON object. `-q` or `--quiet` prints neither progress nor results in words. Errors
go to stderr, and the exit code shows the result.
"""


def reference() -> str:
    """Return the page in Markdown."""
    commands = "".join(command_section(name, command) for name, command in COMMANDS.items())
    options = HEAD + options_table(HsxConfig) + MOONCAKE + options_table(MooncakeOptions)
    return options + COMMANDS_HEAD + commands


def options_table(model: type[BaseModel]) -> str:
    """Return the options of a model, with an anchor for each."""
    properties = model.model_json_schema()["properties"]
    rows = [("key", "type", "default", "meaning")]
    for name, field in model.model_fields.items():
        if field.is_required():
            default = "required"
        else:
            value = size_text(field.default) if is_size(field) else field.default
            default = f"`{json.dumps(value)}`"
        rows.append(
            (
                f'<a id="{name}"></a>`{name}`',
                type_text(properties[name], is_size(field)),
                default,
                SIZE_HINT.sub(".", field.description or ""),
            )
        )
    return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown. The first row is the head."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def is_size(field: FieldInfo) -> bool:
    """Return True if an option takes text such as "4GiB"."""
    kinds = [*field.metadata, *getattr(field.annotation, "__metadata__", ())]
    return any(isinstance(each, BeforeValidator) and each.func is parse_size for each in kinds)


def size_text(size: int | None) -> int | str | None:
    """Return a number of bytes in the largest unit that divides it."""
    if not size:
        return size
    power = next(each for each in reversed(range(len(UNITS))) if size % (1 << 10 * each) == 0)
    return f"{size >> 10 * power}{UNITS[power]}" if power else size


def type_text(schema: dict[str, Any], is_size: bool) -> str:
    """Return the type of a JSON value, with the bounds."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    (schema,) = [
        each for each in schema.get("anyOf", [schema]) if each.get("type") not in ("null", "string")
    ] or [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    bounds = [
        f"{sign} {size_text(schema[key]) if is_size else schema[key]}"
        for key, sign in signs.items()
        if key in schema
    ]
    kind = "size" if is_size else schema.get("type", "object")
    return " ".join([kind, ", ".join(bounds)]).strip()


def command_section(name: str, command: Command) -> str:
    """Return the heading, the exit codes and the options of a command."""
    head = f"\n### hsx {name}\n\n{sentence(command.summary)}"
    parser = parser_of(command)
    if parser is None:
        return f"{head}\n\n```text\n{help_of(command).strip()}\n```\n"
    described = f"{parser.description or ''} {parser.epilog or ''}"
    if codes := re.search(r"Exit code\b.*", described):
        head += " " + codes[0].strip()
    rows = [("option", "meaning")]
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.dest not in SHARED_OPTIONS]
        if actions and group.title not in ("positional arguments", "options"):
            rows.append((f"**{group.title}**", ""))
        rows += [(option_text(each), help_text(each, parser)) for each in actions]
    return f"{head}\n\n{table(rows)}"


def sentence(text: str) -> str:
    """Return a summary as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def option_text(action: argparse.Action) -> str:
    """Return the names of an option and the placeholder of the value."""
    names = [f"`{name}`" for name in action.option_strings]
    value = action.metavar
    if value is None and action.choices is not None:
        value = "|".join(map(str, action.choices))
    if value is None and action.nargs != 0:
        value = action.dest.upper() if names else action.dest
    shown = " ".join(value) if isinstance(value, tuple) else value
    # A | would end the cell.
    code = f"<code>{str(shown).replace('|', '&#124;')}</code>" if shown else ""
    return " ".join([", ".join(names), code]).strip()


def help_text(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return the help of an option, with the default filled in."""
    values = {**vars(action), "prog": parser.prog}
    return ((action.help or "") % values).replace("|", "&#124;")


class _Found(Exception):
    """A command has begun to parse arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(command: Command) -> argparse.ArgumentParser | None:
    """Return the parser of a command, or None if it passes all arguments to another program."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Found(parser)

    # Variables of the emulator change the defaults of `hsx emulate`.
    environ = {key: text for key, text in os.environ.items() if "EMULATOR" not in key}
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(Parser, "parse_args", stop),
    ):
        try:
            help_of(command)
        except _Found as found:
            return found.parser
    return None


def help_of(command: Command) -> str:
    """Return the text that a command prints for --help.

    Raises RuntimeError if the command fails, such as one whose package is not installed.
    """
    with _quiet() as output:
        code = command.run(["--help"])
    if code:
        raise RuntimeError(f"{command.target}: --help ended with exit code {code}")
    return output.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        yield output


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
