"""`hsx serve`: print and start a `vllm serve` command with extraction."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path
from vllm_ascend_hsx.cli.output import Output, flush, say
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.serve.command import build
from vllm_ascend_hsx.serve.machine import check_machine

_OURS = ("--layers", "--out", "--option")  # options with a value
_LONG_FLAGS = ("--dry-run", "--json", "--quiet")  # -q is vLLM's --quantization
_FLAGS = (*_LONG_FLAGS, "-h", "--help")
# No option of vllm serve 0.23.0 is that similar to one of ours (--port and --out: 0.73).
_NEAR = 0.75


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx serve`, without vLLM's.

    Exits with code 2 and one line for an invalid one.
    """
    parser = Parser(
        prog="hsx serve",
        usage=(
            "hsx serve MODEL [--layers IDS] [--out DIR] [--option KEY=VALUE ...] [--dry-run] "
            "[--json] [--quiet] [VLLM OPTIONS]"
        ),
        description="Starts `vllm serve MODEL VLLM OPTIONS` with the two JSON options that "
        "enable extraction, and prints the command. The server refuses unsupported settings "
        "before it loads weights.",
        epilog="Other options, and all arguments after --, are passed to vllm serve.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory or repository of a model")
    parser.add_argument(
        "--layers",
        default="eagle3",
        metavar="IDS",
        help="comma-separated ids, in the order of the files; id i is the residual stream after i "
        "layers; or eagle3 or dflash (2, L/2, L-3 and L of L layers), or mtp (L); or the "
        "directory of a draft, for the layers that it reads and L (default: eagle3)",
    )
    out = "directory for the files (default: %(default)s)"
    parser.add_argument(
        "--out", type=non_empty_path, default=Path("hidden_states"), metavar="DIR", help=out
    )
    option = (
        "another key of kv_connector_extra_config, such as io=direct or "
        "include_output_tokens=true; may be repeated"
    )
    parser.add_argument(
        "--option", action="append", default=[], type=_option, metavar="KEY=VALUE", help=option
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command but do not start it"
    )
    parser.add_output(
        "arguments, environ and notes of the command; without --dry-run the server's log follows",
        ("--quiet",),
    )
    own, vllm = _split(argv, parser)
    options = parser.parse_args(own)
    keys = [key for key, _ in options.option]
    if "shared_storage_path" in keys:
        parser.error("--option shared_storage_path: give the directory with --out")
    if twice := [key for key in keys if keys.count(key) > 1]:
        parser.error(f"--option {twice[0]} is given twice; give it once")
    options.vllm = vllm
    return options


def _split(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split our arguments from vLLM's: unknown options with values, and all words after `--`."""
    own: list[str] = []
    vllm: list[str] = []
    rest, has_model = list(argv), False
    while rest and (word := rest.pop(0)) != "--":
        name, equals, _ = word.partition("=")
        if name in _OURS:
            own.append(word)
            if not equals and rest:
                own.append(rest.pop(0))
        elif name in _FLAGS:
            own.append(word)
        elif not word.startswith("-"):
            own.append(word)
            has_model = True
        else:
            near = [
                each
                for each in (*_OURS, *_LONG_FLAGS)
                if each.startswith(name) or name.startswith(each)
            ]
            if near := near or difflib.get_close_matches(
                name, (*_OURS, *_LONG_FLAGS), n=1, cutoff=_NEAR
            ):
                parser.error(f"{name}: did you mean {near[0]}? Options of vllm serve go after --")
            if not has_model:
                parser.error(f"give MODEL first, before {word}")
            vllm.append(word)
            while rest and not rest[0].startswith("-"):
                vllm.append(rest.pop(0))
    return own, vllm + rest


def _option(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. The value is JSON, or else text.

    Options of type text keep the text, such as the digits of file_mode.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE; give an option and a value, such as io=direct"
        )
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return key, value
    field = HsxConfig.model_fields.get(key)
    return key, value if field is not None and field.annotation is str and not isinstance(
        parsed, str
    ) else parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process with the server.

    Returns:
        0 after --dry-run, 1 if vLLM is not installed, 2 if an argument is invalid, the model cannot
        be served, or port or directory cannot be used.
    """
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        command = build(
            options.model,
            options.layers,
            options.out,
            dict(options.option),
            options.vllm,
            os.environ,
        )
        if not options.dry_run:
            check_machine(command.config, command.given)
    except UserError as error:
        say(f"hsx serve: {error}", error=True)
        return 2
    out = Output(options)
    for note in command.notes:
        out.progress.tell(f"hsx serve: {note}")
    facts = {"arguments": command.arguments, "environ": command.environ, "notes": command.notes}
    out.give(facts, lambda console: console.tell(str(command)))
    flush()
    if options.dry_run:
        return 0
    beside = Path(sys.executable).parent
    program = shutil.which(
        command.arguments[0],
        path=os.pathsep.join((str(beside), os.environ.get("PATH", os.defpath))),
    )
    if program is None:
        say("hsx serve: vllm is not installed; install vllm and vllm-ascend", error=True)
        return 1
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the server inherits that
    os.execve(program, command.arguments, {**os.environ, **command.environ})
