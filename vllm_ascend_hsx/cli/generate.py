"""`hsx generate`: send a dataset to servers, which write a file of hidden states for each row."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_hsx.cli.numbers import seconds, whole
from vllm_ascend_hsx.cli.output import make_console
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import BOUNDS, Options, base_url, path_map
from vllm_ascend_hsx.protocol.names import printable

DEFAULTS = Options(Path(), Path())
WHOLE = {name: whole(*bounds) for name, bounds in BOUNDS.items()}


def parser() -> argparse.ArgumentParser:
    """The options of `hsx generate`; aliases are those of speculators' generate-offline-data."""
    parser = argparse.ArgumentParser(
        prog="hsx generate",
        allow_abbrev=False,
        description="Sends every row of a dataset to servers that extract hidden states (`hsx serve`), which write each row's file, "
        "hs_{row}.safetensors. Call it again after any interruption: rows whose file is there and right are not sent again.",
        epilog="Exit code: 0 all rows are there, 1 some are not, 2 something of the input cannot be used and nothing was generated, "
        "130 interrupted.",
    )
    data = parser.add_argument_group("what is sent")
    data.add_argument(
        "--data",
        "--preprocessed-data",
        type=Path,
        required=True,
        metavar="PATH",
        help="JSON lines, Arrow or parquet; a folder of these, or one from `datasets`' save_to_disk",
    )
    data.add_argument(
        "--column",
        metavar="NAME",
        help="what to send (default: the first there is of token_ids, input_ids, messages, conversations, prompt)",
    )
    data.add_argument("--limit", "--max-samples", type=WHOLE["limit"], metavar="N", help="only the first N rows of the dataset")
    data.add_argument(
        "--world-size",
        type=WHOLE["world_size"],
        default=1,
        metavar="N",
        help="divide the rows between N runs, as on N machines (default: 1)",
    )
    data.add_argument(
        "--rank",
        type=WHOLE["rank"],
        default=0,
        metavar="R",
        help="this run does the rows whose number modulo world size is R (default: 0)",
    )
    data.add_argument("--include-output-tokens", action="store_true", help="rows of generated tokens too, all but the last (greedy)")
    data.add_argument("--max-tokens", type=WHOLE["max_tokens"], metavar="N", help="tokens to generate; with --include-output-tokens only")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--endpoint",
        action="append",
        metavar="URL",
        help="of `vllm serve`; give several times, or with commas, for several servers (default: http://localhost:8000)",
    )
    servers.add_argument("--model", metavar="NAME", help="as the servers call it (default: the first that each names)")
    servers.add_argument("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    servers.add_argument(
        "--concurrency",
        type=WHOLE["concurrency"],
        default=DEFAULTS.concurrency,
        metavar="N",
        help="requests under way, over all servers (default: %(default)s)",
    )
    servers.add_argument(
        "--request-timeout",
        type=seconds,
        default=DEFAULTS.request_timeout,
        metavar="S",
        help="seconds for an answer (default: %(default)g)",
    )
    servers.add_argument(
        "--max-retries",
        type=WHOLE["max_retries"],
        default=DEFAULTS.max_retries,
        metavar="N",
        help="how often a row is asked for again (default: %(default)s)",
    )
    servers.add_argument(
        "--retry-delay",
        type=seconds,
        default=DEFAULTS.retry_delay,
        metavar="S",
        help="seconds before the first retry, doubled each time (default: %(default)g)",
    )
    servers.add_argument(
        "--max-consecutive-errors",
        type=WHOLE["max_consecutive_errors"],
        metavar="N",
        help="stop after N errors with no row finished in between (default: --concurrency)",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="the servers' storage directory (--out of `hsx serve`), or a folder below it: receives the files and the ledger",
    )
    files.add_argument(
        "--map-path",
        action="append",
        default=[],
        metavar="SERVER=HERE",
        help="a directory that has another name on the servers' machines; may be given several times",
    )
    files.add_argument(
        "--validate",
        "--validate-outputs",
        action="store_true",
        help="read every file once, also those that are there: all numbers are finite, the checksum is right",
    )
    return parser


def parse_arguments(argv: Sequence[str]) -> Options:
    """Reads the options; argparse exits with code 2 for a wrong one, InputError is raised for a value that cannot be."""
    given = vars(parser().parse_args(argv))
    urls = given.pop("endpoint") or list(DEFAULTS.endpoints)
    given["endpoints"] = tuple(base_url(url) for each in urls for url in each.split(",") if url.strip())
    given["path_maps"] = tuple(path_map(text) for text in given.pop("map_path"))
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY")
    return Options(**given)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and returns the exit code: 0 all rows are there, 1 some are not, 2 bad input, 130 interrupted."""
    console = make_console()
    try:
        options = parse_arguments(sys.argv[1:] if argv is None else argv)
        # Only now, so that `--help` needs no httpx.
        from vllm_ascend_hsx.generate.run import generate

        return generate(options, console)
    except InputError as error:
        print("\n".join(printable(line) for line in f"hsx generate: {error}".split("\n")), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run began
        print("hsx generate: interrupted", file=sys.stderr)
        return 130
