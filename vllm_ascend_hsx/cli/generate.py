"""`hsx generate`: send a dataset to servers that write a file of hidden states per row."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_hsx.cli.arguments import (
    Parser,
    json_object,
    non_empty,
    non_empty_path,
    number_from,
    positive,
    seconds,
    whole,
)
from vllm_ascend_hsx.cli.output import INTERRUPTED, Output, say
from vllm_ascend_hsx.generate.errors import InputError, UnreachedError
from vllm_ascend_hsx.generate.machines.launcher import place_of
from vllm_ascend_hsx.generate.options import (
    BOUNDS,
    ORDERS,
    RANK_ROWS,
    RAY_TASKS,
    SAMPLING_BOUNDS,
    Options,
    RayCluster,
    Sampling,
    base_url,
    path_map,
    read_endpoints,
)
from vllm_ascend_hsx.protocol.errors import UserError

if TYPE_CHECKING:
    from vllm_ascend_hsx.generate.progress import Outcome
    from vllm_ascend_hsx.generate.sizes import Sizes

DEFAULTS = Options("", Path())


def parser() -> argparse.ArgumentParser:
    """Return the parser. Aliases are options of speculators' generate-offline-data."""
    parser = Parser(
        prog="hsx generate",
        allow_abbrev=False,
        description="Sends all rows of a dataset to servers that extract hidden states (`hsx "
        "serve`). The servers write a file hs_{row}.safetensors for each row. After an "
        "interruption run the same command again: rows with a valid file are not sent again.",
        epilog="Exit code: 0 all rows have files, 1 some have none, 2 invalid input, an unusable "
        "server, or no server that answers, 130 ended by Ctrl-C, 143 by SIGTERM, 141 if the output "
        "is closed.",
    )

    def numbers(name: str, metavar: str = "N") -> dict[str, Any]:
        bounds = BOUNDS.get(name)
        return {
            "type": whole(*bounds) if bounds else seconds,
            "default": getattr(DEFAULTS, name),
            "metavar": metavar,
        }

    add = parser.add_argument_group("the dataset").add_argument
    formats = (
        "a file or folder of JSON lines (.gz, .zst), JSON lists, Arrow, parquet or CSV; a folder "
        "written by save_to_disk of `datasets`; "
    )
    others = "the id of a dataset on a hub; or - for stdin"
    add(
        "--data",
        "--preprocessed-data",
        type=non_empty,
        required=True,
        metavar="PATH|ID|-",
        help=formats + others,
    )
    add("--split", metavar="NAME", help="split of a dataset with several splits")
    columns = "token_ids, input_ids, messages, conversations, prompt"
    add(
        "--column",
        metavar="NAME",
        help=f"column to send (default: the first of {columns} in the row)",
    )
    ignored = "leave this column out; may be repeated"
    add("--ignore-column", action="append", default=[], metavar="NAME", help=ignored)
    add("--limit", "--max-samples", **numbers("limit"), help="only the first N rows of the dataset")
    add(
        "--skip-invalid",
        action="store_true",
        help="skip rows that cannot be sent, and list them",
    )
    launched = "(default: from srun, a Kubernetes indexed job or torchrun; else"
    size = f"divide the rows between N runs {launched} 1)"
    add("--world-size", **numbers("world_size") | {"default": None}, help=size)
    rank = f"of every N groups of {RANK_ROWS} rows, do only the R-th {launched} 0)"
    add("--rank", **numbers("rank", "R") | {"default": None}, help=rank)
    order = (
        "prefix: rows with a common prefix one after another, so that servers compute it once; "
        "given: as in the dataset "
    )
    add("--order", choices=ORDERS, default=DEFAULTS.order, help=order + "(default: %(default)s)")
    add = parser.add_argument_group("prompts").add_argument
    add(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="arguments for all chats; a row's own arguments take precedence",
    )
    special = "for texts that a chat template has rendered: do not add a BOS token"
    add("--no-special-tokens", action="store_false", dest="add_special_tokens", help=special)
    show = "show N rows as tokens with the loss mask before the run (default: 1 for a new --output)"
    add("--show", **numbers("show"), help=show)
    add = parser.add_argument_group("answers of the target").add_argument
    included = "generate answers, and store text, token ids and rows (the last token has no row)"
    add("--include-output", "--include-output-tokens", action="store_true", help=included)
    add(
        "--max-tokens",
        **numbers("max_tokens"),
        help="tokens to generate; this and the following options need --include-output",
    )
    for name in (each.name for each in fields(Sampling)):
        kind = whole(1, 2**31 - 1) if name == "top_k" else number_from(*SAMPLING_BOUNDS[name])
        default = (
            "default: 0, greedy decoding" if name == "temperature" else "default: the server's"
        )
        add(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(DEFAULTS.sampling, name),
            metavar="N",
            help=default,
        )
    add(
        "--seed",
        **numbers("seed"),
        help="seed of sampling; each row's seed depends on it and the content",
    )
    add = parser.add_argument_group("servers").add_argument
    endpoints = (
        "URL of `vllm serve`, or several, repeated or separated by commas (default: "
        "http://localhost:8000); "
    )
    file = "@FILE: one URL per line, read again during the run"
    add("--endpoint", action="append", metavar="URL|@FILE", help=endpoints + file)
    add(
        "--model",
        metavar="NAME",
        help="name of the model on the servers (default: each server's first model)",
    )
    add("--api-key", metavar="KEY", help="default: environment variable OPENAI_API_KEY")
    add(
        "--concurrency",
        **numbers("concurrency"),
        help="requests in flight over all servers (default: %(default)s)",
    )
    add(
        "--request-timeout",
        **numbers("request_timeout", "S"),
        help="seconds for an answer (default: %(default)g)",
    )
    add(
        "--max-retries",
        **numbers("max_retries"),
        help="retries per row (default: %(default)s)",
    )
    delay = "seconds before the first retry, doubled each time (default: %(default)g)"
    add("--retry-delay", **numbers("retry_delay", "S"), help=delay)
    add(
        "--allow-failures",
        **numbers("allow_failures"),
        help="exit with 0 if at most N rows have no file (default: %(default)s)",
    )
    errors = (
        "stop after N errors without a finished row in between; refused rows do not count "
        "(default: --concurrency)"
    )
    add("--max-consecutive-errors", **numbers("max_consecutive_errors"), help=errors)
    add = parser.add_argument_group(
        "Ray cluster that does the rows (pip install 'vllm-ascend-hsx[ray]')"
    ).add_argument
    add(
        "--ray",
        metavar="ADDRESS",
        help="address of the head, such as head:6379, or auto; run this command on a node",
    )
    add(
        "--ray-label",
        metavar="KEY=VALUE",
        help="use only nodes with this label (`ray start --labels`), such as nodes with the storage",
    )
    tasks = (
        "divide the rows between N tasks; Ray repeats the tasks of a lost node (default: "
        f"{RayCluster.tasks})"
    )
    add("--ray-tasks", type=whole(*RAY_TASKS), metavar="N", help=tasks)
    add = parser.add_argument_group("files").add_argument
    output = (
        "the servers' storage directory (--out of `hsx serve`) or a folder below it, for files and "
        "ledger"
    )
    add("--output", type=non_empty_path, required=True, metavar="DIR", help=output)
    paths = "path of a directory on the servers' machines and here; may be repeated"
    add("--map-path", action="append", default=[], metavar="SERVER=HERE", help=paths)
    validate = (
        "read all files, existing ones too, and check that numbers are finite and checksums match"
    )
    add("--validate", "--validate-outputs", action="store_true", help=validate)
    add = parser.add_argument_group("sizes").add_argument
    add(
        "--dry-run",
        action="store_true",
        help="show rows, tokens, bytes, free space and time, and send no rows",
    )
    add(
        "--rate",
        type=positive(1e12),
        metavar="TOKENS/S",
        help="rate for the time of --dry-run (default: rate of the last run)",
    )
    known = (
        "bytes per token in a file, for --dry-run; `hsx plan` shows the number (default: from "
        "finished rows)"
    )
    add("--bytes-per-token", **numbers("bytes_per_token"), help=known)
    parser.add_output("the result of the run, or with --dry-run the sizes")
    return parser


def parse_arguments(argv: Sequence[str]) -> Options:
    """Parse the options. Invalid ones exit with code 2, or raise InputError or UserError."""
    return _options(parser().parse_args(argv))


def _options(parsed: argparse.Namespace) -> Options:
    """Return the options of the run. Raises InputError or UserError."""
    given = {name: value for name, value in vars(parsed).items() if name not in ("json", "quiet")}
    given["ray"] = _cluster(given.pop("ray"), given.pop("ray_label"), given.pop("ray_tasks"))
    given |= _endpoints(given.pop("endpoint") or list(DEFAULTS.endpoints))
    given["sampling"] = Sampling(**{each.name: given.pop(each.name) for each in fields(Sampling)})
    given["ignored_columns"] = frozenset(given.pop("ignore_column"))
    given["path_maps"] = tuple(path_map(text) for text in given.pop("map_path"))
    given["api_key"] = given["api_key"] or os.environ.get("OPENAI_API_KEY") or None
    # On a cluster, ignore the variables of a launcher: the cluster does all rows.
    place = place_of(given["world_size"], given["rank"], {} if given["ray"] else os.environ)
    given |= {"world_size": place.world_size, "rank": place.rank, "rank_source": place.source}
    return Options(**given)


def _cluster(address: str | None, label: str | None, tasks: int | None) -> RayCluster | None:
    """Return the cluster. Raises InputError."""
    if address is None:
        if label is not None or tasks is not None:
            raise InputError("--ray-label and --ray-tasks need a cluster; give it with --ray")
        return None
    if not address:
        raise InputError(
            "--ray: the value is empty; give the address of the cluster's head, such as head:6379, "
            "or auto"
        )
    key, equals, value = (label or "").partition("=")
    if label is not None and not (key and equals and value):
        raise InputError(
            f"--ray-label {label}: give KEY=VALUE, a label of nodes from `ray start --labels`"
        )
    cluster = RayCluster(address, (key, value) if label else None)
    return cluster if tasks is None else replace(cluster, tasks=tasks)


def _endpoints(named: Sequence[str]) -> dict[str, Any]:
    """Return the options for the servers. Raises InputError."""
    if not any(each.startswith("@") for each in named):
        return {
            "endpoints": tuple(
                base_url(url) for each in named for url in each.split(",") if url.strip()
            )
        }
    if len(named) > 1:
        raise InputError(
            "--endpoint @FILE: cannot be used with other --endpoint; write all servers to the file"
        )
    path = Path(named[0][1:])
    return {"endpoints": read_endpoints(path), "endpoint_file": path}


def _give(out: Output, directory: Path, found: Outcome | Sizes) -> None:
    """Print the result of a run or a dry run, and the problems of a run."""
    from vllm_ascend_hsx.generate.progress import facts_of, show, show_problems
    from vllm_ascend_hsx.generate.sizes import Sizes, show_sizes

    if isinstance(found, Sizes):
        out.give(found._asdict(), lambda console: show_sizes(console, found))
    else:
        out.give(facts_of(found, directory), lambda console: show(console, found, directory))
        show_problems(out.errors, found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx generate` and return the exit code."""
    parsed = parser().parse_args(sys.argv[1:] if argv is None else argv)
    out = Output(parsed)
    try:
        options = _options(parsed)
        # Imported late, so that `--help` is fast.
        from vllm_ascend_hsx.generate.run import generate

        give = partial(_give, out, options.output)
        if options.ray is None:
            return generate(options, out.progress, give)
        try:
            from vllm_ascend_hsx.generate.machines.ray_run import do_on_ray
        except ModuleNotFoundError as error:
            raise InputError(
                f"--ray needs {error.name}: pip install 'vllm-ascend-hsx[ray]', here and on all "
                "nodes"
            ) from error
        return generate(options, out.progress, give, do_on_ray)
    except (InputError, UnreachedError, UserError) as error:
        for line in f"hsx generate: {error}".split("\n"):
            say(line, error=True)
        return 2
    except KeyboardInterrupt:  # before the run began
        say("hsx generate: interrupted", error=True)
        return INTERRUPTED
