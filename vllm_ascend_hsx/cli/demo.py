"""`hsx demo`: serves a model with extraction on, sends it sixteen prompts, checks every file against transformers, shows the metrics."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from vllm_ascend_hsx.cli.numbers import seconds, whole
from vllm_ascend_hsx.cli.output import make_console
from vllm_ascend_hsx.emulator.settings import MAX_NPUS
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import validate_layer_ids

NEEDED = ("torch", "transformers", "openai", "vllm", "vllm_ascend")
HBM_BYTES = 2 << 30  # of one emulated NPU
NO_METRICS = "--disable-log-stats"


class DemoError(Exception):
    """The demo cannot run; the message says why and what to do."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options of `hsx demo`; exits with code 2 and one line for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="hsx demo",
        description="Serves a model with hidden-state extraction (DP x TP, expert and sequence parallel), sends 16 prompts and compares "
        "what comes out with transformers on the CPU. Exit code 0 only if all match.",
    )
    parser.add_argument("--device", choices=("emulated", "npu"), default="emulated", help="emulated NPUs on the CPU, or real ones")
    parser.add_argument("--model", help="directory of the model (default: a tiny MiniMax-M2 built here; needed with --device npu)")
    parser.add_argument("--layers", help="comma-separated ids of the residual streams to extract, such as 1,2,4 (default: by depth)")
    parser.add_argument("--data-parallel-size", type=whole(1, 4096), default=2, metavar="N", help="default: 2")
    parser.add_argument("--tensor-parallel-size", type=whole(1, 4096), default=2, metavar="N", help="default: 2")
    parser.add_argument("--no-expert-parallel", action="store_true", help="for a model without experts")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="do not set VLLM_ASCEND_ENABLE_FLASHCOMM1=1")
    parser.add_argument("--no-reference", action="store_true", help="check shapes, token ids and finiteness only; for large models")
    parser.add_argument("--late", action="store_true", help="emulated NPUs run work on other streams as late as allowed")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where log and hidden states go (default: a new temporary directory)")
    parser.add_argument("--start-timeout", type=seconds, metavar="S", help="seconds for the server's start (default: 600, npu: 1800)")
    parser.add_argument("--request-timeout", type=seconds, default=120.0, metavar="S", help="seconds for one request (default: 120)")
    parser.add_argument("serve_options", nargs="*", metavar="-- VLLM_OPTION", help="more options for `vllm serve`, after --")
    options = parser.parse_args(argv)
    if options.device == "npu" and options.model is None:
        parser.error("--device npu needs --model PATH: the tiny model is for emulated NPUs only")
    if options.device == "emulated" and options.data_parallel_size * options.tensor_parallel_size > MAX_NPUS:
        sizes = f"--data-parallel-size {options.data_parallel_size} x --tensor-parallel-size {options.tensor_parallel_size}"
        parser.error(f"{sizes}: an emulated machine has at most {MAX_NPUS} NPUs")
    if options.late and options.device == "npu":
        parser.error("--late is a mode of the emulated NPU; leave it out with --device npu")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code: 0 all match, 1 a difference or a failure, 2 bad input, 130 interrupted."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    console = make_console()
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return run(options, console)
    except (DemoError, UserError) as error:
        console.print(f"hsx demo: {error}", style="red", markup=False, highlight=False)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        console.print("hsx demo: interrupted; everything it started has been stopped")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def run(options: argparse.Namespace, console: Console) -> int:
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise DemoError(
            f"not installed here: {', '.join(missing)}. On a machine with NPUs install vllm-ascend; for emulated ones use `make demo`"
        )
    # Nothing here may ask the network for a model. Set before transformers is imported, which reads them once.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    from openai import OpenAIError

    from vllm_ascend_hsx.demo.client import AnswerError, send_all
    from vllm_ascend_hsx.demo.metrics import collect
    from vllm_ascend_hsx.demo.options import ServeOptions
    from vllm_ascend_hsx.demo.prompts import demo_prompts
    from vllm_ascend_hsx.demo.report import StartProgress, show_metrics, show_rows
    from vllm_ascend_hsx.demo.server import STOP_SECONDS, Server, ServerError, free_port
    from vllm_ascend_hsx.demo.verify import verify

    model = _model_directory(options, console)
    config = _model_config(model)
    layer_ids = _layer_ids(options.layers, config["num_hidden_layers"])
    reference = None if options.no_reference else _reference(model)
    try:
        port = free_port()
    except ServerError as error:
        raise DemoError(str(error)) from error
    work = options.output or Path(tempfile.mkdtemp(prefix="hsx-demo-"))
    serve = ServeOptions(
        model=str(model),
        storage=work.absolute() / "hidden_states",
        layer_ids=layer_ids,
        port=port,
        data_parallel_size=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
        expert_parallel=not options.no_expert_parallel,
        extra=(*_device_options(options.device), *options.serve_options),
    )
    title = f"vllm serve, DP={options.data_parallel_size} x TP={options.tensor_parallel_size} on {options.device} NPUs"
    server = Server(serve.command(), port=serve.port, log=work / "server.log", environment=_environment(options))
    console.print(f"model {model}\nlog   {server.log}\nfiles {serve.storage}", highlight=False, soft_wrap=True)
    prompts = demo_prompts(config["vocab_size"])
    if options.device == "emulated":
        _compile_emulator(console)
    try:
        with server:
            try:
                with StartProgress(console, server.log, title) as progress:
                    seconds = server.wait_ready(options.start_timeout or (1800.0 if options.device == "npu" else 600.0), progress)
                console.print(f"{title}: answers after {seconds:.0f} s", highlight=False)
                with console.status(f"sending {len(prompts)} prompts"):
                    answers = send_all(server.url, prompts, timeout=options.request_timeout)
                with console.status("comparing with transformers"):
                    rows = [verify(answer, layer_ids, reference) for answer in answers]
                metrics = None if NO_METRICS in options.serve_options else collect(server.url, options.request_timeout)
            except (OpenAIError, AnswerError, OSError) as error:
                raise DemoError(f"a request failed: {error}\n{server.log_tail()}") from error
            finally:
                with console.status(f"stopping the server (up to {STOP_SECONDS:.0f} s)"):
                    server.stop()
    except ServerError as error:
        raise DemoError(str(error)) from error
    show_rows(console, rows, layer_ids)
    published = len(answers)
    if metrics is not None:
        show_metrics(console, metrics)
        published = round(metrics.total("vllm:hsx_files_total", outcome="published"))
        if published != len(answers):
            console.print(f"/metrics counts {published} published files, {len(answers)} requests were answered", style="red")
    passed = sum(row.passed for row in rows)
    good = "match" if reference else "are finite and complete (not compared)"
    console.print(f"{passed} of {len(rows)} requests {good}", style="green" if passed == len(rows) else "red", highlight=False)
    return 0 if passed == len(rows) and published == len(answers) else 1


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What the server's environment gets on top of ours."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if not options.no_sequence_parallel:
        environment["VLLM_ASCEND_ENABLE_FLASHCOMM1"] = "1"
    if options.device == "emulated":
        from vllm_ascend_hsx.emulator.launch import environment as emulated

        npus = options.data_parallel_size * options.tensor_parallel_size
        # One thread per emulated NPU: the cores are shared by all of them.
        environment |= {"OMP_NUM_THREADS": "1", **emulated(npus=npus, hbm_bytes=HBM_BYTES, late=options.late)}
    return environment


def _compile_emulator(console: Console) -> None:
    """Compiles the emulated NPU if the cache does not have it, so that the server's start is not charged with it."""
    from vllm_ascend_hsx.emulator.build import BuildError, library

    with console.status("compiling the emulated NPU, once (about a minute)"):
        try:
            library()
        except BuildError as error:
            raise DemoError(str(error)) from error


def _device_options(device: str) -> tuple[str, ...]:
    # There are no graphs to capture on an emulated NPU.
    return ("--enforce-eager", "--gpu-memory-utilization", "0.3") if device == "emulated" else ()


def _model_directory(options: argparse.Namespace, console: Console) -> Path:
    if options.model is not None:
        path = Path(options.model).expanduser().absolute()
        if not (path / "config.json").is_file():
            raise UserError("--model", str(options.model), "has no config.json", "Give the directory of a downloaded model.")
        return path
    from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ascend-hsx" / "tiny-minimax-m2"
    with console.status("building a tiny MiniMax-M2"):
        return build_minimax_m2(cache)


def _model_config(model: Path) -> dict[str, Any]:
    from vllm_ascend_hsx.serve.model import read_model

    read_model(str(model))
    content = json.loads((model / "config.json").read_text())
    text: dict[str, Any] = content.get("text_config") or content
    if not isinstance(text.get("vocab_size"), int):
        raise UserError("MODEL", str(model), "has no vocab_size in its config.json", "Give a language model.")
    return text


def _layer_ids(text: str | None, layers: int) -> tuple[int, ...]:
    """The ids of --layers, or for none a spread over the depth that ends with the last layer."""
    if text is None:
        spread = (2, layers // 2, layers - 3, layers) if layers > 8 else (1, layers // 2, layers)
        return tuple(sorted(set(spread)))
    try:
        return validate_layer_ids([int(part) for part in text.split(",")], layers)
    except UserError as error:
        raise UserError("--layers", text, error.problem, f"Give distinct ids from 0 to {layers}.") from None
    except ValueError:
        remedy = f"Give comma-separated numbers such as 1,{layers // 2},{layers}."
        raise UserError("--layers", text, "is not a list of layer ids", remedy) from None


def _reference(model: Path) -> Any:
    """The function that computes the expected states; refuses a model that does not fit in this machine's memory."""
    import torch

    from vllm_ascend_hsx.demo.reference import reference_hidden_states

    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    available = _available_memory()
    if stored > available:
        raise DemoError(
            f"the reference needs about {stored >> 30} GiB of memory and {available >> 30} GiB are free; "
            "call again with --no-reference to check shapes, token ids and finiteness only"
        )
    # float32 has next to no rounding of its own, but takes twice the memory of the weights as they are stored.
    dtype = torch.float32 if 2 * stored <= available else torch.bfloat16

    def reference(token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        return reference_hidden_states(model, token_ids, layer_ids, dtype)

    return reference


def _available_memory() -> int:
    """Bytes that this machine can give to new processes without swapping, caches included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Turns SIGTERM into an exception, so that the server is stopped on the way out."""
    raise SystemExit(128 + number)
