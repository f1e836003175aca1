"""`hsx demo`: serve a model with extraction, and check sixteen prompts against transformers."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_ascend_hsx.cli.arguments import Parser, seconds, whole
from vllm_ascend_hsx.cli.output import INTERRUPTED, Output, ended_by_sigterm, flush, say
from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.demo.target import default_layers, reference_for, remembered
from vllm_ascend_hsx.plan.shape import read_config, text_config, whole_number
from vllm_ascend_hsx.protocol.api import PATH_OPTION
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import layer_ids

if TYPE_CHECKING:
    from vllm_ascend_hsx.demo.server import Server
    from vllm_ascend_hsx.demo.session import Check, Served
    from vllm_ascend_hsx.demo.verify import Reference

NEEDED = ("torch", "transformers", "openai", "vllm", "vllm_ascend")
HBM_BYTES = 2 << 30  # memory of one emulated NPU
NO_METRICS = "--disable-log-stats"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx demo`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx demo",
        description="Serves a model with hidden-state extraction (DP x TP, expert and sequence "
        "parallel), sends 16 prompts and compares the files with transformers on the CPU. Exit "
        "code 0 only if all match.",
    )
    add = parser.add_argument
    add(
        "--device",
        choices=("emulated", "npu"),
        default="emulated",
        help="emulated NPUs on the CPU, or real ones",
    )
    add(
        "--model",
        help=("directory of the model (default, if emulated: a tiny MiniMax-M2)"),
    )
    add(
        "--layers",
        help="comma-separated layer ids, such as 1,2,4 (default: by depth)",
    )
    add("--data-parallel-size", type=whole(1, 4096), default=2, metavar="N", help="default: 2")
    add("--tensor-parallel-size", type=whole(1, 4096), default=2, metavar="N", help="default: 2")
    add("--no-expert-parallel", action="store_true", help="for a model without experts")
    add("--no-sequence-parallel", action="store_true", help="without enable_flashcomm1")
    add(
        "--no-reference",
        action="store_true",
        help="check shapes, token ids and finiteness only; for large models",
    )
    long_steps = (
        "steps of 8,192 tokens (emulated: 512), eager and with graphs; their rows must agree"
    )
    add("--long-steps", action="store_true", help=long_steps)
    by_hand = (
        "serve until Ctrl-C, and print commands that use the server (curl, Python, hsx generate)"
    )
    add("--serve", action="store_true", help=by_hand)
    add(
        "--port",
        type=whole(1, 65535),
        metavar="N",
        help="with --serve: the server's port (default: a free one)",
    )
    add(
        "--late",
        action="store_true",
        help="emulated NPUs delay work on other streams as long as allowed",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory for log and files (default: a temporary directory)",
    )
    add(
        "--start-timeout",
        type=seconds,
        metavar="S",
        help="seconds for the start of the server (default: 600, npu: 1800)",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds for a request (default: 120)",
    )
    add(
        "serve_options",
        nargs="*",
        metavar="-- VLLM_OPTION",
        help="more options for `vllm serve`, after --",
    )
    parser.add_output("whether all is right; log, files and rows of each server")
    options = parser.parse_args(argv)
    if options.serve and (options.long_steps or options.no_reference):
        parser.error(
            "--serve sends and compares nothing: leave out --long-steps and --no-reference"
        )
    if options.port is not None and not options.serve:
        parser.error("--port is for --serve; leave it out")
    if options.device == "npu" and options.model is None:
        parser.error("--device npu needs --model PATH: the tiny model is for emulated NPUs only")
    if options.late and options.device == "npu":
        parser.error("--late is a mode of the emulated NPU; leave it out with --device npu")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code.

    The code is 0 if all match, 1 for a difference or failure, 2 for invalid input, 130 after an
    interrupt.
    """
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    try:
        with ended_by_sigterm("hsx demo"):
            return run(options, out)
    except UserError as error:
        say(f"hsx demo: {error}", error=True)
        return 2
    except DemoError as error:  # with lines of a server's log
        for line in f"hsx demo: {error}".splitlines():
            out.errors.tell(line, "red")
        return 1
    except KeyboardInterrupt:
        out.errors.tell("hsx demo: interrupted; all its processes have been stopped")
        return INTERRUPTED


def run(options: argparse.Namespace, out: Output) -> int:
    console = out.progress
    if options.output is not None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be a directory: {error.strerror}"
            raise UserError(
                "--output",
                str(options.output),
                problem,
                "Give a new or existing writable directory.",
            ) from error
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise DemoError(
            f"not installed here: {', '.join(missing)}. On a machine with NPUs install "
            "vllm-ascend; for emulated ones use `make demo`"
        )
    # Prevent downloads. transformers reads these variables at import.
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    if options.device == "emulated":
        _check_emulator(options)
    work = options.output or Path(tempfile.mkdtemp(prefix="hsx-demo-"))
    model = _model_directory(options.model, console)
    config = text_config(read_config(str(model))[1])
    num_layers, vocab_size = (
        whole_number(str(model), config, field) for field in ("num_hidden_layers", "vocab_size")
    )
    layers = (
        default_layers(num_layers)
        if options.layers is None
        else layer_ids(options.layers, num_layers)
    )
    if options.serve:
        return _serve_by_hand(options, out, work.absolute(), model, layers)
    reference = None if options.no_reference else reference_for(model)
    check = _check(options, layers, reference)
    if options.device == "emulated":
        _compile_emulator(console)
    if options.long_steps:
        return _long_steps(options, out, check, model, work.absolute(), vocab_size)

    from vllm_ascend_hsx.demo.prompts import demo_prompts
    from vllm_ascend_hsx.demo.session import Consoles, serve_and_show

    server = _server(
        options, console, work.absolute(), model, layers, extra=_device_options(options.device)
    )
    title = _title(options)
    served, good = serve_and_show(
        Consoles(out.result, console), server, title, demo_prompts(vocab_size), check
    )
    out.give({"ok": good, "servers": [_facts(title, server, served)]}, lambda console: None)
    return 0 if good else 1


def _serve_by_hand(
    options: argparse.Namespace, out: Output, work: Path, model: Path, layers: Sequence[int]
) -> int:
    from vllm_ascend_hsx.demo.hand import commands, serve_until_interrupted, show, write_prompts

    if options.device == "emulated":
        _compile_emulator(out.progress)
    write_prompts(work)
    name = "tiny-minimax-m2" if options.model is None else model.name
    extra = (*_device_options(options.device), "--served-model-name", name)
    chosen_names = {PATH_OPTION: True}  # by `hsx generate`
    server = _server(
        options, out.progress, work, model, layers, extra=extra, connector_options=chosen_names
    )
    found = commands(server.url, name, work)

    def announce() -> None:
        out.give(found._asdict(), lambda console: show(console, found))
        flush()

    serve_until_interrupted(out.progress, server, _title(options), _start_s(options), announce)
    return 0


def _facts(title: str, server: Server, served: Served) -> dict[str, Any]:
    """Return the facts about one server, for --json."""
    files = server.log.parent / "hidden_states"
    return {
        "title": title,
        "log": str(server.log),
        "files": str(files),
        "rows": [row._asdict() for row in served.rows],
    }


def _long_steps(
    options: argparse.Namespace,
    out: Output,
    check: Check,
    model: Path,
    work: Path,
    vocab_size: int,
) -> int:
    """Serve eager and with graphs; compare both with the reference, and with each other."""
    from vllm_ascend_hsx.demo.long_steps import EMULATED, REAL, Mode, agree, environment
    from vllm_ascend_hsx.demo.session import Consoles, serve_and_show

    emulated = options.device == "emulated"
    sizes, good = EMULATED if emulated else REAL, True
    answers, facts = {}, []
    for mode in Mode:
        title = f"{_title(options)}, {mode.value}"
        made = sizes.serve_options(str(model), len(check.layer_ids), mode, emulated)
        server = _server(
            options,
            out.progress,
            work / mode.value,
            model,
            check.layer_ids,
            environment(mode, emulated),
            **made,
        )
        served, right = serve_and_show(
            Consoles(out.result, out.progress), server, title, sizes.prompts(vocab_size), check
        )
        answers[mode] = served.answers
        facts.append(_facts(title, server, served))
        good &= right
    agreement = agree(answers[Mode.EAGER], answers[Mode.GRAPHS], check.layer_ids)
    out.result.tell(f"eager and with graphs: {agreement}", "green" if agreement.holds else "red")
    out.give({"ok": good and agreement.holds, "servers": facts}, lambda console: None)
    return 0 if good and agreement.holds else 1


def _check(
    options: argparse.Namespace, layers: tuple[int, ...], reference: Reference | None
) -> Check:
    from vllm_ascend_hsx.demo.session import Check

    return Check(
        layers,
        remembered(reference) if reference and options.long_steps else reference,
        _start_s(options),
        options.request_timeout,
        NO_METRICS not in options.serve_options,
    )


def _server(
    options: argparse.Namespace,
    console: Console,
    work: Path,
    model: Path,
    layers: Sequence[int],
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    extra: tuple[str, ...],
    **sizes: Any,
) -> Server:
    """Create the server, and print the paths of log and files.

    Args:
        work: directory of log and files.
        environment: additional variables.
        extra: additional words of the command line.
        sizes: further fields of ServeOptions.
    """
    from vllm_ascend_hsx.demo.options import ServeOptions
    from vllm_ascend_hsx.demo.server import Server, free_port

    serve = ServeOptions(
        model=str(model),
        storage=work / "hidden_states",
        layer_ids=tuple(layers),
        port=options.port or free_port(),
        data_parallel_size=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
        expert_parallel=not options.no_expert_parallel,
        sequence_parallel=not options.no_sequence_parallel,
        extra=(*extra, *options.serve_options),
        **sizes,
    )
    server = Server(
        serve.command(),
        port=serve.port,
        log=work / "server.log",
        environment={**_environment(options), **environment},
    )
    console.print(
        f"model {model}\nlog   {server.log}\nfiles {serve.storage}", highlight=False, soft_wrap=True
    )
    return server


def _start_s(options: argparse.Namespace) -> float:
    return float(options.start_timeout or (1800.0 if options.device == "npu" else 600.0))


def _title(options: argparse.Namespace) -> str:
    dp, tp = options.data_parallel_size, options.tensor_parallel_size
    return f"vllm serve, DP={dp} x TP={tp} on {_npus(options)}"


def _npus(options: argparse.Namespace) -> str:
    return "emulated NPUs" if options.device == "emulated" else "NPUs"


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables to add to the server's environment."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if options.device == "emulated":
        from ascend_npu_emulator.launch import environment as emulated

        # One thread per emulated NPU, because they share the cores.
        environment |= {
            "OMP_NUM_THREADS": "1",
            **emulated(_number_of_npus(options), HBM_BYTES, options.late),
        }
    return environment


def _number_of_npus(options: argparse.Namespace) -> int:
    return int(options.data_parallel_size * options.tensor_parallel_size)


def _check_emulator(options: argparse.Namespace) -> None:
    """Check that the emulator is installed and supports the number of NPUs.

    Raises DemoError or UserError.
    """
    if find_spec("ascend_npu_emulator") is None:
        raise DemoError(
            "the emulated NPUs are not installed here. Install vllm-ascend-hsx[demo], or use "
            "--device npu --model PATH on a machine with NPUs"
        )
    from ascend_npu_emulator.settings import MAX_NPUS

    if (npus := _number_of_npus(options)) > MAX_NPUS:
        raise UserError(
            "--data-parallel-size x --tensor-parallel-size",
            npus,
            f"is more than the {MAX_NPUS} NPUs of an emulated machine",
            "Use smaller sizes.",
        )


def _compile_emulator(console: Console) -> None:
    """Compile the emulated NPU if it is not cached. This does not count as server start."""
    from ascend_npu_emulator.build import BuildError, library

    with console.status("compiling the emulated NPU, once (about a minute)"):
        try:
            library()
        except BuildError as error:
            raise DemoError(str(error)) from error


def _device_options(device: str) -> tuple[str, ...]:
    # An emulated NPU has no graphs to capture.
    return ("--enforce-eager", "--gpu-memory-utilization", "0.3") if device == "emulated" else ()


def _model_directory(model: str | None, console: Console) -> Path:
    if model is not None:
        path = Path(model).expanduser().absolute()
        if not (path / "config.json").is_file():
            raise UserError(
                "--model", model, "has no config.json", "Give the directory of a downloaded model."
            )
        return path
    from vllm_ascend_hsx.demo.tiny_models import cached_minimax_m2

    with console.status("building a tiny MiniMax-M2"):
        return cached_minimax_m2()
