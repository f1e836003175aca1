"""`hsx speculators`: run a command or a script of speculators with the backend `hsx`.

hs-connectors 0.9.0 only knows backends that have been imported, so ours is imported first.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_hsx.cli.output import say

USAGE = """\
usage: hsx speculators COMMAND [OPTIONS]
       hsx speculators PATH/TO/launch_vllm.py MODEL [OPTIONS] -- [VLLM OPTIONS]

Runs a command of speculators (such as train) or a script of its repository, for
--hidden-states-backend hsx. It prints nothing of its own: --json and -q are options of the command.
On several NPUs: torchrun --nproc-per-node 8 --no-python hsx speculators train ..."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx speculators`. Return an exit code, or exit with that of the command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    script = arguments[0].endswith(".py")
    if script and not Path(arguments[0]).is_file():
        say(
            f"hsx speculators: {arguments[0]}: no such script; give a script of speculators' "
            "repository",
            error=True,
        )
        return 2
    try:
        import vllm_ascend_hsx.integrations.speculators  # noqa: F401 - registers the backend

        if not script:
            from speculators.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("hs_connectors", "speculators"):
            raise
        say(
            f"hsx speculators: {error.name} is not installed; install "
            f"{error.name.replace('_', '-')}",
            error=True,
        )
        return 1
    if script:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        app(arguments, prog_name="hsx speculators")
    return 0
