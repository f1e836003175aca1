"""`hsx generate`: send a dataset to servers, which write a file of hidden states for each row."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.cli.arguments import non_empty_path, seconds, whole
from vllm_ascend_hsx.cli.output import INTERRUPTED, make_console, say
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import BOUNDS, ORDERS, RANK_ROWS, Options, base_url, path_map

DEFAULTS = Options(Path(), Path())


def parser() -> argparse.ArgumentParser:
    """Return the parser; aliases are the options of speculators' generate-offline-data."""
    parser = argparse.ArgumentParser(
        prog="hsx generate",
        allow_abbrev=False,
        description="Sends every row of a dataset to servers that extract hidden states (`hsx serve`), which write each row's file, "
        "hs_{row}.safetensors. Call it again after any interruption: rows that have a valid file are not sent again.",
        epilog="Exit code: 0 all rows have files, 1 some have none, 2 invalid input or an unusable server, 130 interrupted.",
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
    add("--world-size", **numbers("world_size"), help="divide the rows between N runs, as on N machines (default: 1)")
    add("--rank", **numbers("rank", "R"), help=f"this run does every N-th run of {RANK_ROWS} rows, from the R-th (default: 0)")
    order = "prefix: send rows with a common prefix one after the other, so that servers compute it once; given: as they are "
    add("--order", choices=ORDERS, default=DEFAULTS.order, help=order + "(default: %(default)s)")
    add("--include-output-tokens", action="store_true", help="store rows of generated tokens too, all but the last (greedy)")
    add("--max-tokens", **numbers("max_tokens"), help="tokens to generate; with --include-output-tokens only")
    add = parser.add_argument_group("servers").add_argument
    endpoints = "of `vllm serve`; repeat, or separate by commas, for several servers (default: http://localhost:8000)"
    add("--endpoint", action="append", metavar="URL", help=endpoints)
    add("--model", metavar="NAME", help="its name on the servers (default: the first that each names)")
    add("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    add("--concurrency", **numbers("concurrency"), help="concurrent requests, over all servers (default: %(default)s)")
    add("--request-timeout", **numbers("request_timeout", "S"), help="seconds for an answer (default: %(default)g)")
    add("--max-retries", **numbers("max_retries"), help="most repeated requests for a row (default: %(default)s)")
    delay = "seconds before the first retry, doubled each time (default: %(default)g)"
    add("--retry-delay", **numbers("retry_delay", "S"), help=delay)
    errors = "stop after N errors with no row finished in between, not counting refused rows (default: --concurrency)"
    add("--max-consecutive-errors", **numbers("max_consecutive_errors"), help=errors)
    add = parser.add_argument_group("files").add_argument
    output = "the servers' storage directory (--out of `hsx serve`), or a folder below it, for the files and the ledger"
    add("--output", type=non_empty_path, required=True, metavar="DIR", help=output)
    paths = "a directory that has another path on the servers' machines; may be repeated"
    add("--map-path", action="append", default=[], metavar="SERVER=HERE", help=paths)
    validate = "read every file once, existing ones too: all numbers are finite, the checksum is right"
    add("--validate", "--validate-outputs", action="store_true", help=validate)
    return parser


def parse_arguments(argv: Sequence[str]) -> Options:
    """Parse the options. Exits with code 2, or raises InputError, for an invalid one."""
    given = vars(parser().parse_args(argv))
    urls = given.pop("endpoint") or list(DEFAULTS.endpoints)
    given["endpoints"] = tuple(base_url(url) for each in urls for url in each.split(",") if url.strip())
    given["path_maps"] = tuple(path_map(text) for text in given.pop("map_path"))
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY")
    return Options(**given)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx generate` and return its exit code."""
    console = make_console()
    try:
        options = parse_arguments(sys.argv[1:] if argv is None else argv)
        # Imported late, so that `--help` needs no httpx.
        from vllm_ascend_hsx.generate.run import generate

        return generate(options, console)
    except InputError as error:
        for line in f"hsx generate: {error}".split("\n"):
            say(line, error=True)
        return 2
    except KeyboardInterrupt:  # before the run began
        say("hsx generate: interrupted", error=True)
        return INTERRUPTED
