"""`hsx plan`: what extraction from a model costs, before a server is started: memory, KV cache, disk, bandwidth."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from vllm_ascend_hsx.cli.numbers import positive, size, whole
from vllm_ascend_hsx.cli.output import make_console
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.plan.errors import PlanError, PlannerMissingError
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.plan.shape import read_shape

if TYPE_CHECKING:
    from vllm_ascend_hsx.plan.capacity import NpuMemory, Plan

speed = positive(1e12)
count = whole(1, 10**9)
KV_MEMORY = 30 << 30
DEFAULTS = {name: HsxConfig.model_fields[name].default for name in ("staging_slots", "pinned_ring_bytes", "quantization")}


def layer_ids(text: str) -> tuple[int, ...]:
    """Comma-separated ids."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids; give comma-separated numbers, such as 2,31,59,62") from None


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options of `hsx plan`; exits with code 2 and one line for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="hsx plan",
        description="Shows what extraction costs: bytes per token, staging, pinned memory, KV cache with no extraction, with hsx and "
        "with vLLM's own layout (computed by vLLM's planner with vllm-ascend's patches), disk and write bandwidth. Needs no NPU.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"a directory with config.json, that file, or one of: {', '.join(PRESETS)}")
    parser.add_argument("--layers", type=layer_ids, metavar="IDS", help="comma-separated ids to extract (default: 2, L/2, L-3, L)")
    parser.add_argument("--tp", type=whole(1, 4096), default=4, metavar="N", help="tensor-parallel size (default: 4)")
    parser.add_argument("--dp", type=whole(1, 4096), default=1, metavar="N", help="data-parallel size (default: 1)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="as for vllm serve")
    parser.add_argument("--max-model-len", type=count, default=8192, metavar="N", help="default: 8192; capacity is for requests that long")
    parser.add_argument("--max-num-batched-tokens", type=count, default=2048, metavar="N", help="default: 2048, as vllm serve's")
    parser.add_argument("--block-size", type=count, metavar="N", help="default: vLLM's choice, which mostly overrides this option too")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, help="default: vLLM's; on, but off for hybrid models")
    memory = parser.add_argument_group("memory of an NPU", "either what is left for the KV cache, or what it is reckoned from")
    memory.add_argument(
        "--kv-memory", type=size, metavar="SIZE", help="for the KV cache; a server logs it as 'Available KV cache memory' (default: 30GiB)"
    )
    memory.add_argument("--memory", type=size, metavar="SIZE", help="of the NPU, such as 64GiB")
    memory.add_argument("--gpu-memory-utilization", type=positive(1.0), default=0.92, metavar="SHARE", help="default: 0.92, as vLLM's")
    memory.add_argument("--weights", type=size, metavar="SIZE", help="on one NPU (default: reckoned from config.json, not quantized)")
    memory.add_argument("--reserve", type=size, default=4 << 30, metavar="SIZE", help="activations, buffers, graphs (default: 4GiB)")
    ours = parser.add_argument_group("the connector's options")
    ours.add_argument("--staging-slots", type=whole(1, 8), default=DEFAULTS["staging_slots"], metavar="N", help="default: %(default)s")
    ours.add_argument("--quantization", choices=("none", "fp8"), default=DEFAULTS["quantization"], help="default: %(default)s")
    ours.add_argument("--ring", type=size, default=DEFAULTS["pinned_ring_bytes"], metavar="SIZE", help="pinned_ring_bytes (default: 32MiB)")
    files = parser.add_argument_group("files")
    files.add_argument("--prompt-tokens", type=count, default=2048, metavar="N", help="length of a prompt (default: 2048)")
    files.add_argument("--prefill-speed", type=speed, default=10_000.0, metavar="N", help="tokens/s of the whole server (default: 10000)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; sizes are in bytes")
    options = parser.parse_args(argv)
    if options.kv_memory is not None and options.memory is not None:
        parser.error("--kv-memory and --memory say the same thing twice; give one of them")
    if options.weights is not None and options.memory is None:
        parser.error("--weights is for reckoning with --memory; give the memory of an NPU, such as --memory 64GiB")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Shows a plan; returns 0, 1 if vLLM is not installed, or 2 for an input that cannot be planned with."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        result = plan(options)
    except PlannerMissingError as error:
        print(f"hsx plan: {error}", file=sys.stderr)
        return 1
    except PlanError as error:
        print(f"hsx plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        show(make_console(120), result)
    return 0


def plan(options: argparse.Namespace) -> Plan:
    """The plan for a command line.

    Raises:
        PlanError, PlannerMissingError.
    """
    from vllm_ascend_hsx.plan import vllm_planner
    from vllm_ascend_hsx.plan.server_config import EngineOptions

    shape = read_shape(options.model, options.dtype)
    vllm_planner.load()
    from vllm_ascend_hsx.plan import capacity

    npu = None
    if options.memory is not None:
        npu = capacity.memory_per_npu(
            shape,
            options.tp,
            options.dp,
            total=options.memory,
            utilization=options.gpu_memory_utilization,
            weights=options.weights,
            reserve=options.reserve,
        )
    return capacity.make_plan(
        capacity.Request(
            shape=shape,
            layer_ids=options.layers or default_layers(shape.num_layers),
            engine=EngineOptions(
                tensor_parallel=options.tp,
                max_model_len=options.max_model_len,
                max_num_batched_tokens=options.max_num_batched_tokens,
                block_size=options.block_size,
                # vllm/config/model.py:1852 (is_prefix_caching_supported), 0.23.0
                prefix_caching=not shape.is_hybrid if options.prefix_caching is None else options.prefix_caching,
            ),
            data_parallel=options.dp,
            kv_bytes=npu.for_kv_cache if npu else options.kv_memory or KV_MEMORY,
            staging_slots=options.staging_slots,
            ring_bytes=options.ring,
            prompt_tokens=options.prompt_tokens,
            prefill_speed=options.prefill_speed,
            npu_memory=npu,
            quantization=options.quantization,
        )
    )


def default_layers(num_layers: int) -> tuple[int, ...]:
    """What speculators extracts: three layers for the draft model, and the last."""
    return tuple(sorted({layer for layer in (2, num_layers // 2, num_layers - 3, num_layers) if 0 < layer <= num_layers}))


def as_json(result: Plan) -> dict[str, Any]:
    """The plan as plain values: sizes in bytes, layouts by name, and the model without the rest of its config.json."""
    found: dict[str, Any] = _plain(asdict(result))
    found["request"]["shape"].pop("config")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.name.lower() if isinstance(key, Enum) else key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def show(console: Console, result: Plan) -> None:
    """Prints the plan as two tables."""
    request, engine = result.request, result.request.engine
    shape = request.shape
    ids = ", ".join(map(str, request.layer_ids))
    console.print(
        f"{shape.name}: layers {ids} of {shape.num_layers}, TP={engine.tensor_parallel} x DP={request.data_parallel} "
        f"on {result.num_npus} NPUs, {shape.dtype}",
        style="bold",
        highlight=False,
    )
    costs = Table(show_header=False, box=None, pad_edge=False)
    layers = f"{len(request.layer_ids)} layers x {shape.hidden_size:,} elements"
    costs.add_row("hidden states of a token", f"{result.row_bytes:,} bytes", layers)
    slots = f"per NPU: {request.staging_slots} slots of {engine.max_num_batched_tokens:,} tokens"
    costs.add_row("staging", _mib(result.staging_bytes), slots)
    costs.add_row("pinned ring", _mib(result.ring_bytes), "of host memory, per NPU")
    costs.add_row("collected layers", _mib(result.collected_bytes), "per NPU, at most: held by the target in a step, with any extraction")
    costs.add_row("memory for the KV cache", f"{request.kv_bytes / 2**30:.2f} GiB", _memory(request.npu_memory))
    files = f"{result.prompts_bytes / 2**30:.2f} GiB"
    stored = "" if request.quantization == "none" else f", rows as {request.quantization}"
    costs.add_row("files of 1,000 prompts", files, f"of {request.prompt_tokens:,} tokens each{stored}")
    rate = result.write_bytes_per_second / 2**20
    at = f"at {request.prefill_speed:,.0f} tokens/s of prefill; {rate / result.num_npus:,.1f} MiB/s per NPU"
    costs.add_row("write bandwidth", f"{rate:,.1f} MiB/s", at)
    console.print(costs, highlight=False)
    console.print()
    console.print(_capacities(result), highlight=False)
    console.print(
        f"tokens: KV cache of one replica, in requests of {engine.max_model_len:,} tokens, by vLLM's planner\n"
        "at least: the share kept if the collected layers are taken from the KV cache too",
        highlight=False,
    )
    for layout, each in result.layouts.items():
        if each.reason:
            console.print(f"{layout.value} does not start: {each.reason}", highlight=False, markup=False)
    if engine.prefix_caching and shape.is_hybrid:
        console.print("upstream is reckoned without prefix caching, for which a hybrid model needs chunked prefill", highlight=False)


def _capacities(result: Plan) -> Table:
    table = Table("KV cache")
    for heading in ("block size", "blocks", "tokens", "kept", "at least"):
        table.add_column(heading, justify="right")
    for layout, each in result.layouts.items():
        if each.capacity is None:
            table.add_row(layout.value, "", "", "does not start", "", "")
            continue
        numbers = [f"{number:,}" for number in (each.capacity.block_size, each.capacity.num_blocks, each.capacity.tokens)]
        table.add_row(layout.value, *numbers, f"{each.kept:.2%}", f"{each.kept_at_least:.2%}")
    return table


def _memory(npu: NpuMemory | None) -> str:
    if npu is None:
        return "per NPU"
    parts = f"{npu.utilization:.0%} of {npu.total / 2**30:g} GiB, less {npu.weights / 2**30:.1f} GiB of weights"
    return f"per NPU, an estimate: {parts} and {npu.reserve / 2**30:g} GiB reserve"


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"
