"""`hsx plan`: show the cost of extraction in memory, disk and bandwidth, without a server."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from vllm_ascend_hsx.cli.arguments import Parser, positive, size, whole
from vllm_ascend_hsx.cli.output import OneConsole, Output, say
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.plan.costs import Plan, Request, make_plan
from vllm_ascend_hsx.plan.presets import PRESETS, is_rotated
from vllm_ascend_hsx.plan.shape import read_shape
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import layer_ids

speed = positive(1e12)
count = whole(1, 10**9)
DEFAULTS = {
    name: HsxConfig.model_fields[name].default for name in ("staging_slots", "quantization")
}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx plan`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx plan",
        description="Shows the cost of extraction: bytes per token, staging, remaining memory of "
        "the KV cache, pinned memory, disk and write bandwidth. Needs only a model's config.json, "
        "no NPU, vLLM or torch.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"config.json, the directory with it, or one of: {', '.join(PRESETS)}",
    )
    layers = (
        "as for hsx serve: comma-separated ids, eagle3, dflash, mtp, or the directory of a draft "
        "(default: %(default)s)"
    )
    parser.add_argument("--layers", default="eagle3", metavar="IDS", help=layers)
    parser.add_argument(
        "--tp",
        type=whole(1, 4096),
        default=4,
        metavar="N",
        help="tensor-parallel size (default: 4)",
    )
    parser.add_argument(
        "--dp", type=whole(1, 4096), default=1, metavar="N", help="data-parallel size (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="as for vllm serve",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=count,
        default=2048,
        metavar="N",
        help="tokens per step, as for vllm serve (default: 2048)",
    )
    memory = (
        "memory for the KV cache of an NPU without extraction; a server logs it as 'Available KV "
        "cache memory' (default: 30GiB)"
    )
    parser.add_argument("--kv-memory", type=size, default="30GiB", metavar="SIZE", help=memory)
    ours = parser.add_argument_group("the connector's options")
    ours.add_argument(
        "--staging-slots",
        type=whole(1, 8),
        default=DEFAULTS["staging_slots"],
        metavar="N",
        help="default: %(default)s",
    )
    ours.add_argument(
        "--quantization",
        choices=("none", "fp8"),
        default=DEFAULTS["quantization"],
        help="default: %(default)s",
    )
    rotated = "the weights are rotated (QuaRot), so rows are rotated back"
    ours.add_argument("--rotated", action="store_true", help=rotated)
    ring = (
        "pinned_ring_bytes, a power of two (default: 256MiB; with --tp, as much as the slots would "
        "hold without it, plus 32MiB)"
    )
    ours.add_argument("--ring", type=size, metavar="SIZE", help=ring)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--prompts", type=count, default=1000, metavar="N", help="number of prompts (default: 1000)"
    )
    tokens = "mean length of a prompt (default: 2048)"
    files.add_argument(
        "--tokens",
        "--prompt-tokens",
        type=count,
        default=2048,
        dest="prompt_tokens",
        metavar="N",
        help=tokens,
    )
    files.add_argument(
        "--prefill-speed",
        type=speed,
        default=10_000.0,
        metavar="N",
        help="tokens/s of the whole server (default: 10000)",
    )
    parser.add_output("the plan, with sizes in bytes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Return 0, or 2 for an invalid input."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        result = plan(options)
    except UserError as error:
        say(f"hsx plan: {error}", error=True)
        return 2
    Output(options, 120).give(asdict(result), lambda console: show(console, result))
    return 0


def plan(options: argparse.Namespace) -> Plan:
    """Return the plan for a command line. Raises UserError."""
    shape = read_shape(options.model, options.dtype)
    return make_plan(
        Request(
            shape=shape,
            layer_ids=layer_ids(options.layers, shape.num_layers),
            tensor_parallel=options.tp,
            data_parallel=options.dp,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_bytes=options.kv_memory,
            staging_slots=options.staging_slots,
            ring_bytes=options.ring,
            prompts=options.prompts,
            prompt_tokens=options.prompt_tokens,
            prefill_speed=options.prefill_speed,
            quantization=options.quantization,
            rotated=options.rotated or is_rotated(options.model),
        )
    )


def show(console: OneConsole, result: Plan) -> None:
    """Print the plan as a table."""
    request, shape = result.request, result.request.shape
    ids = ", ".join(map(str, request.layer_ids))
    console.tell(
        f"{shape.name}: layers {ids} of {shape.num_layers}, TP={request.tensor_parallel} x "
        f"DP={request.data_parallel} on {result.num_npus} NPUs, {shape.dtype}",
        "bold",
    )
    stored = "" if request.quantization == "none" else f", rows as {request.quantization}"
    rate, speed_text = result.write_bytes_per_second / 2**20, f"{request.prefill_speed:,.0f}"
    turning_back = (
        "turning rows back",
        _mib(result.turn_back_bytes),
        f"per NPU; {result.turn_back_flops / 1e6:,.0f} MFLOP per token",
    )
    waiting = (
        "... of a long prompt",
        _mib(result.waiting_bytes),
        "rows beyond the slots, if one prompt fills a step; the step waits for their copy",
    )
    taken = "staging and rotation are" if request.rotated else "staging is"
    costs = Table(show_header=False, box=None, pad_edge=False)
    for row in (
        (
            "hidden states of a token",
            f"{result.row_bytes:,} bytes",
            f"{len(request.layer_ids)} layers x {shape.hidden_size:,} elements",
        ),
        (
            "... in a file",
            f"{result.stored_bytes:,} bytes",
            f"with the token's id{stored}; `hsx generate --bytes-per-token`",
        ),
        (
            "staging",
            _mib(result.staging_bytes),
            f"per NPU: {request.staging_slots} slots of {result.slot_rows:,} tokens",
        ),
        *([waiting] if result.waiting_bytes else ()),
        *([turning_back] if request.rotated else ()),
        (
            "collected layers",
            _mib(result.collected_bytes),
            "per NPU, at most: held by the target in a step, with any extraction method",
        ),
        (
            "KV cache that is kept",
            _percent(result.kept),
            f"of {request.kv_bytes / 2**30:.2f} GiB per NPU: {taken} taken from it",
        ),
        (
            "... at least",
            _percent(result.kept_at_least),
            "if the collected layers are taken from it, too",
        ),
        ("pinned ring", _mib(result.ring_bytes), "of host memory, per NPU"),
        (
            "... for batches",
            _mib(result.ring_bytes // 4),
            "part of the ring, at most: rows of generated tokens that are written together",
        ),
        (
            f"files of {request.prompts:,} prompts",
            f"{result.prompts_bytes / 2**30:,.2f} GiB",
            f"of {request.prompt_tokens:,} tokens each{stored}",
        ),
        (
            "their prefill",
            f"{result.prompts_seconds / 3600:,.1f} hours",
            f"at {speed_text} tokens/s of prefill",
        ),
        (
            "write bandwidth",
            f"{rate:,.1f} MiB/s",
            f"at {speed_text} tokens/s of prefill; {rate / result.num_npus:,.1f} MiB/s per NPU",
        ),
    ):
        costs.add_row(*row)
    console.print(costs, highlight=False)


def _percent(share: float) -> str:
    """Format a share as a percentage, rounded down."""
    return f"{math.floor(share * 10_000) / 100:.2f}%"


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"
