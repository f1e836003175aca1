"""`hsx generate`: send a dataset to servers, which write a file of hidden states for each row."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path, seconds, whole
from vllm_ascend_hsx.cli.output import INTERRUPTED, make_console, say
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.machines.launcher import place_of
from vllm_ascend_hsx.generate.options import (
    BOUNDS,
    ORDERS,
    RANK_ROWS,
    RAY_BLOCK_ROWS,
    Options,
    RayCluster,
    base_url,
    path_map,
    read_endpoints,
)
from vllm_ascend_hsx.protocol.errors import UserError

DEFAULTS = Options(Path(), Path())


def parser() -> argparse.ArgumentParser:
    """Return the parser; aliases are the options of speculators' generate-offline-data."""
    parser = Parser(
        prog="hsx generate",
        allow_abbrev=False,
        description="Sends every row of a dataset to servers that extract hidden states (`hsx serve`), which write each row's file, "
        "hs_{row}.safetensors. Call it again after any interruption: rows that have a valid file are not sent again.",
        epilog="Exit code: 0 all rows have files, 1 some have none, 2 invalid input or an unusable "
        "server, 130 ended by Ctrl-C, 143 by SIGTERM, 141 because nobody reads its output.",
    )

    def numbers(name: str, metavar: str = "N") -> dict[str, Any]:
        bounds = BOUNDS.get(name)
        return {"type": whole(*bounds) if bounds else seconds, "default": getattr(DEFAULTS, name), "metavar": metavar}

    add = parser.add_argument_group("what is sent").add_argument
    formats = "a file of JSON lines, Arrow or parquet; a folder of the two latter, or one from `datasets`' save_to_disk"
    add("--data", "--preprocessed-data", type=non_empty_path, required=True, metavar="PATH", help=formats)
    columns = "token_ids, input_ids, messages, conversations, prompt"
    add("--column", metavar="NAME", help=f"what to send (default: the first that exists of {columns})")
    add("--limit", "--max-samples", **numbers("limit"), help="only the first N rows of the dataset")
    launched = "(default: of srun's step, Kubernetes' indexed job or torchrun; else"
    size = f"divide the rows between N runs, as on N machines {launched} 1)"
    add("--world-size", **numbers("world_size") | {"default": None}, help=size)
    rank = f"this run does every N-th run of {RANK_ROWS} rows, from the R-th {launched} 0)"
    add("--rank", **numbers("rank", "R") | {"default": None}, help=rank)
    order = "prefix: send rows with a common prefix one after the other, so that servers compute it once; given: as they are "
    add("--order", choices=ORDERS, default=DEFAULTS.order, help=order + "(default: %(default)s)")
    add("--include-output-tokens", action="store_true", help="store rows of generated tokens too, all but the last (greedy)")
    add("--max-tokens", **numbers("max_tokens"), help="tokens to generate; with --include-output-tokens only")
    add = parser.add_argument_group("servers").add_argument
    endpoints = "of `vllm serve`; repeat, or separate by commas, for several servers (default: http://localhost:8000); "
    file = "@FILE: a file with one in each line, which is read again during the run"
    add("--endpoint", action="append", metavar="URL|@FILE", help=endpoints + file)
    add("--model", metavar="NAME", help="its name on the servers (default: the first that each names)")
    add("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    add("--concurrency", **numbers("concurrency"), help="concurrent requests, over all servers (default: %(default)s)")
    add("--request-timeout", **numbers("request_timeout", "S"), help="seconds for an answer (default: %(default)g)")
    add("--max-retries", **numbers("max_retries"), help="most repeated requests for a row (default: %(default)s)")
    delay = "seconds before the first retry, doubled each time (default: %(default)g)"
    add("--retry-delay", **numbers("retry_delay", "S"), help=delay)
    errors = "stop after N errors with no row finished in between, not counting refused rows (default: --concurrency)"
    add("--max-consecutive-errors", **numbers("max_consecutive_errors"), help=errors)
    add = parser.add_argument_group("a Ray cluster, whose nodes do the rows (pip install 'vllm-ascend-hsx[ray]')").add_argument
    add("--ray", metavar="ADDRESS", help="of its head, such as head:6379, or auto; this command runs on a node of it")
    add("--ray-label", metavar="KEY=VALUE", help="only on nodes with this label (`ray start --labels`), such as those that see the storage")
    rows = f"most rows of a task, which Ray does again if its node dies (default: {RayCluster.block_rows})"
    add("--ray-block-rows", type=whole(*RAY_BLOCK_ROWS), metavar="N", help=rows)
    add = parser.add_argument_group("files").add_argument
    output = "the servers' storage directory (--out of `hsx serve`), or a folder below it, for the files and the ledger"
    add("--output", type=non_empty_path, required=True, metavar="DIR", help=output)
    paths = "a directory that has another path on the servers' machines; may be repeated"
    add("--map-path", action="append", default=[], metavar="SERVER=HERE", help=paths)
    validate = "read every file once, existing ones too: all numbers are finite, the checksum is right"
    add("--validate", "--validate-outputs", action="store_true", help=validate)
    return parser


def parse_arguments(argv: Sequence[str]) -> Options:
    """Parse the options. An invalid one exits with code 2, or raises InputError or UserError."""
    given = vars(parser().parse_args(argv))
    given["ray"] = _cluster(given.pop("ray"), given.pop("ray_label"), given.pop("ray_block_rows"))
    given |= _endpoints(given.pop("endpoint") or list(DEFAULTS.endpoints))
    given["path_maps"] = tuple(path_map(text) for text in given.pop("map_path"))
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY") or None
    # A cluster does all rows, wherever this process was started.
    place = place_of(given["world_size"], given["rank"], {} if given["ray"] else os.environ)
    given |= {"world_size": place.world_size, "rank": place.rank, "rank_source": place.source}
    return Options(**given)


def _cluster(address: str | None, label: str | None, block_rows: int | None) -> RayCluster | None:
    """Return the cluster. Raises InputError."""
    if address is None:
        if label is not None or block_rows is not None:
            raise InputError("--ray-label and --ray-block-rows are of a cluster; name it with --ray")
        return None
    if not address:
        raise InputError("--ray: it is empty; give the address of the cluster's head, such as head:6379, or auto")
    key, equals, value = (label or "").partition("=")
    if label is not None and not (key and equals and value):
        raise InputError(f"--ray-label {label}: give KEY=VALUE, a label that `ray start --labels` gave to nodes")
    cluster = RayCluster(address, (key, value) if label else None)
    return cluster if block_rows is None else replace(cluster, block_rows=block_rows)


def _endpoints(named: Sequence[str]) -> dict[str, Any]:
    """Return the options for the servers. Raises InputError."""
    if not any(each.startswith("@") for each in named):
        return {"endpoints": tuple(base_url(url) for each in named for url in each.split(",") if url.strip())}
    if len(named) > 1:
        raise InputError("--endpoint @FILE: other servers are named beside it; write them into the file")
    path = Path(named[0][1:])
    return {"endpoints": read_endpoints(path), "endpoint_file": path}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx generate` and return its exit code."""
    console = make_console()
    try:
        options = parse_arguments(sys.argv[1:] if argv is None else argv)
        # Imported late, so that `--help` needs no httpx.
        from vllm_ascend_hsx.generate.run import generate

        if options.ray is None:
            return generate(options, console)
        try:
            from vllm_ascend_hsx.generate.machines.ray_run import do_on_ray
        except ModuleNotFoundError as error:
            raise InputError(f"--ray needs {error.name}: pip install 'vllm-ascend-hsx[ray]', here and on all nodes") from error
        return generate(options, console, do_on_ray)
    except (InputError, UserError) as error:
        for line in f"hsx generate: {error}".split("\n"):
            say(line, error=True)
        return 2
    except KeyboardInterrupt:  # before the run began
        say("hsx generate: interrupted", error=True)
        return INTERRUPTED
