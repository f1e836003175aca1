"""Dispatch `hsx COMMAND ...` to the command's function."""

import sys

try:
    import importlib
    import os
    from collections.abc import Callable, Sequence
    from typing import NamedTuple, cast

    from vllm_ascend_hsx._version import __version__
    from vllm_ascend_hsx.cli import output  # imports rich, which is slow
except KeyboardInterrupt:
    sys.exit(130)


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        summary: description in `hsx --help`.
        target: `module:function`. The function takes the arguments after the command's name and
            returns an exit code.
        at_work: line to print if the command takes longer than a second; None for a command that
            replaces the process.
    """

    summary: str
    target: str
    at_work: str | None = None

    def run(self, argv: Sequence[str]) -> int:
        module, _, function = self.target.partition(":")
        # Imported late, so that `hsx --help` and `hsx emulate` start without torch. SIGINT is
        # deferred, because within an import of C extensions it can become any exception.
        with output.deferred_interrupt():
            imported = importlib.import_module(module)
        entry = cast(Callable[[list[str]], int | None], getattr(imported, function))
        return entry(list(argv)) or 0


def _command(name: str, summary: str, at_work: str) -> Command:
    return Command(summary, f"vllm_ascend_hsx.cli.{name}:main", at_work)


_CLEAN = (
    "remove locks without data, old errors and orphans of dead servers from a storage directory"
)
_DEMO = "serve a tiny MiniMax-M2 with DP, TP and sequence parallelism and check its hidden states"
_DOCTOR = "check whether extraction will work on this machine, and suggest fixes"
_GENERATE = "send a dataset to servers that extract, and write a file of hidden states for each row"
_HARDWARE = "run the hardware checklist on this machine's NPUs, and write a report for an issue"
_INSPECT = "show the contents of a file of hidden states, or of each file in a directory"
_READING = "reading the model's configuration"
COMMANDS: dict[str, Command] = {
    "clean": _command("clean", _CLEAN, "scanning the directory"),
    "demo": _command("demo", _DEMO, "reading the model"),
    "doctor": _command("doctor", _DOCTOR, "checking vllm, vllm-ascend and this machine"),
    "emulate": Command(
        "run a command with emulated Ascend NPUs on the CPU",
        "vllm_ascend_hsx.cli.emulate:main",
    ),
    "generate": _command("generate", _GENERATE, "reading the dataset and asking the servers"),
    "hardware-report": Command(
        _HARDWARE, "vllm_ascend_hsx.cli.hardware_report:main", "reading the model"
    ),
    "inspect": _command("inspect", _INSPECT, "reading files"),
    "plan": _command("plan", "show the cost of extraction: memory, disk and bandwidth", _READING),
    "serve": _command("serve", "start vllm serve with extraction", _READING),
    "status": _command(
        "status", "show the progress of hsx generate, over all ranks", "reading ledgers"
    ),
    "speculators": _command(
        "speculators", "run a command of speculators with the backend hsx", "starting speculators"
    ),
    "verify": _command(
        "verify", "check every file of hidden states below a directory", "reading files"
    ),
}


def usage() -> str:
    """Return the text of `hsx --help`, one line per command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hsx COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "`hsx COMMAND --help` shows the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code.

    The code is 2 for an invalid command line, 1 for a system error, 130 after an interrupt, and 141
    if the reader has closed the output.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = f"hsx {arguments[0]}" if arguments and arguments[0] in COMMANDS else "hsx"
    output.escape_unwritable()
    try:
        try:
            code = _run(arguments)
        except SystemExit:  # argparse, after --help or an error
            output.flush()
            raise
        output.flush()
        return code
    except KeyboardInterrupt:
        output.drop_full()
        output.say(f"{name}: interrupted", error=True)
        return output.INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and output.drop_unread():
            return output.UNREAD
        output.drop_full()
        output.say(f"{name}: {_problem(error)}", error=True)
        return 1


def _own(arguments: Sequence[str]) -> Sequence[str]:
    """Return the words before `--`. Later words are for another program."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _problem(error: OSError) -> str:
    """Describe an error of a file, an output or a library."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if error.errno is None else f"cannot continue or print: {error}"


def _run(arguments: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ and not arguments:
        from vllm_ascend_hsx.cli.completion import complete

        return complete({name: command.run for name, command in COMMANDS.items()})
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"hsx {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        from vllm_ascend_hsx.cli.arguments import did_you_mean

        remedy = did_you_mean(arguments[0], COMMANDS) or f"; choose one of: {', '.join(COMMANDS)}"
        output.say(f"hsx: there is no command {arguments[0]!r}{remedy}", error=True)
        return 2
    try:
        if command.at_work is None or not output.SILENT.isdisjoint(_own(arguments)):
            return command.run(arguments[1:])
        with output.sign_of_life(f"hsx {arguments[0]}: {command.at_work} ..."):
            return command.run(arguments[1:])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = "install any build of torch (no NPU needed), or vllm-ascend-hsx[reader]"
        output.say(f"hsx {arguments[0]}: torch is not installed; {remedy}", error=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
