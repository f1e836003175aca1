"""`hsx serve`: the `vllm serve` that extracts, shown and started."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.config import HsxConfigError
from vllm_ascend_hsx.serve.command import build
from vllm_ascend_hsx.serve.errors import ServeError


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options of `hsx serve`, those of vLLM apart; exits with code 2 and one line for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="hsx serve",
        usage="hsx serve MODEL [--layers IDS] [--out DIR] [--option KEY=VALUE ...] [--dry-run] [-- VLLM OPTIONS]",
        description="Starts `vllm serve MODEL VLLM OPTIONS` with the two JSON options that make it extract, and shows the whole command. "
        "What the server cannot do it refuses with the reason, before it loads weights.",
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a repository's name")
    parser.add_argument(
        "--layers",
        default="eagle3",
        metavar="IDS",
        help="comma-separated ids in the order that the files have: i is the residual stream after i layers; or eagle3 or dflash (2, half "
        "of the L layers, L-3 and L), or mtp (L) (default: eagle3)",
    )
    where = Path("hidden_states")
    parser.add_argument("--out", type=Path, default=where, metavar="DIR", help="receives files (default: %(default)s)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="a further key of kv_connector_extra_config, such as io=direct or include_output_tokens=true; may be given again",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the command and do not start it")
    own, *vllm = _split(argv)
    options = parser.parse_args(own)
    options.vllm = [argument for part in vllm for argument in part]
    return options


def _split(argv: Sequence[str]) -> list[list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return [list(argv[:at]), list(argv[at + 1 :])]


def _option(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is JSON, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; give an option and its value, such as io=direct")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main(argv: Sequence[str] | None = None) -> int:
    """Becomes the server; returns 0 after --dry-run, 1 if vLLM is not installed, 2 for what cannot be served."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        command = build(options.model, options.layers, options.out, dict(options.option), options.vllm, os.environ)
    except (ServeError, HsxConfigError) as error:
        print(f"hsx serve: {error}", file=sys.stderr)
        return 2
    for note in command.notes:
        print(f"hsx serve: {note}", file=sys.stderr)
    print(command, flush=True)
    if options.dry_run:
        return 0
    beside = Path(sys.executable).parent
    program = shutil.which(command.arguments[0], path=os.pathsep.join((str(beside), os.environ.get("PATH", os.defpath))))
    if program is None:
        print("hsx serve: vllm is not installed here; install vllm and vllm-ascend", file=sys.stderr)
        return 1
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what this becomes would inherit that
    os.execve(program, command.arguments, {**os.environ, **command.environ})
