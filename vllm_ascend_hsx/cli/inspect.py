"""`hsx inspect`: show the contents of a file or of all files in a directory, or plot norms."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path, whole
from vllm_ascend_hsx.cli.output import Output, say
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX, printable
from vllm_ascend_hsx.reader.check import Examination, Kind, examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import is_decided


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx inspect`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx inspect",
        description="Shows tokens, layers, dtype, norms of the rows, metadata and verdict of a "
        "file of hidden states, or of all files and members of shards below a directory. Exit code "
        "0: all are valid; 1: some are not; 2: nothing could be read.",
    )
    parser.add_argument("path", type=non_empty_path, metavar="FILE|DIR")
    parser.add_argument(
        "--limit",
        type=whole(1, 10**9),
        default=50,
        metavar="N",
        help="maximum number of files to show (default: 50)",
    )
    plot = "draw the norms of a file's rows, by layer and by token; needs matplotlib"
    parser.add_argument("--plot", type=non_empty_path, metavar="PNG", help=plot)
    parser.add_output("the files, and the number of files that are left out")
    options = parser.parse_args(argv)
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.plot is not None and os.path.isdir(options.path):
        parser.error(f"--plot draws one file, but {options.path} is a directory: give a file in it")
    if options.plot is not None and (problem := _no_picture(options.plot)):
        parser.error(f"--plot {printable(str(options.plot))} {problem}")
    return options


def _no_picture(target: Path) -> str | None:
    """Return the reason why no picture can be written there, or None."""
    from matplotlib.backend_bases import FigureCanvasBase

    if os.path.isdir(target):
        return "is a directory: give a file in it"
    formats = FigureCanvasBase.get_supported_filetypes()
    return (
        None
        if target.suffix[1:].lower() in formats
        else f"has an unknown format: use one of the suffixes .{', .'.join(formats)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx inspect` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    unreadable: list[OSError] = []
    try:
        paths = _paths(options.path, unreadable.append)
    except OSError as error:
        say(f"hsx inspect: {options.path} cannot be read: {error}", error=True)
        return 2
    for problem in unreadable:
        say(f"hsx inspect: {problem.filename} cannot be read: {problem.strerror}", error=True)
    if not paths and not unreadable:
        say(
            f"hsx inspect: {options.path} does not exist or has no *{DATA_SUFFIX} files.",
            error=True,
        )
        return 2
    is_directory = os.path.isdir(options.path)
    found = [examine(path, listed=is_directory, norms=True) for path in paths[: options.limit]]
    facts = {"files": [_facts(each) for each in found], "left_out": len(paths) - len(found)}
    out.give(
        facts,
        lambda console: (
            _show_all(console, options.path, found, len(paths))
            if is_directory
            else _show(console, found[0])
        ),
    )
    if options.plot is not None and found[0].token_norms is not None and found[0].tokens:
        draw(found[0], options.plot)
        out.progress.tell(f"drawn: {options.plot}")
    # In a directory, files that were removed meanwhile or are being written are not invalid.
    return (
        1
        if unreadable
        or any(each.problem is not None and (each.is_there or not is_directory) for each in found)
        else 0
    )


def _paths(path: Path, on_error: Callable[[OSError], None]) -> list[Path]:
    """Return the files of a directory, or a file that exists or has an error file or a lock.

    Raises OSError if the directory cannot be read.
    """
    if os.path.isdir(path):
        return [each for each in files_in(path, on_error) if not each.name.endswith(ERROR_SUFFIX)]
    name = str(path.with_name(path.name.removesuffix(ERROR_SUFFIX) or path.name))
    exists = any(
        os.path.exists(name + suffix) for suffix in ("", ERROR_SUFFIX, LOCK_SUFFIX)
    ) or is_decided(Path(name))
    return [Path(name)] if exists else []


def _facts(found: Examination) -> dict[str, Any]:
    """Return the facts about a file, for --json."""
    counts = {
        name: getattr(found, name)
        for name in ("tokens", "prompt_tokens", "num_bytes", "file_bytes")
    }
    verdict = {"verdict": found.verdict, "problem": found.problem}
    return {
        "path": str(found.path),
        **verdict,
        **counts,
        **found.kind._asdict(),
        "norms": list(found.norms),
        "metadata": found.metadata,
    }


def _show_all(console: Console, directory: Path, found: Sequence[Examination], number: int) -> None:
    """Show the first files of a directory with `number` files."""
    console.print(_table(directory, found))
    if number > len(found):
        console.print(
            f"... and {number - len(found)} more; --limit {number} shows them", highlight=False
        )


def _table(directory: Path, found: Sequence[Examination]) -> Table:
    table = Table("file", "tokens", "layers", "dtype", "norm per layer", "verdict")
    for each in found:
        prompt = each.tokens if each.prompt_tokens is None else each.prompt_tokens
        tokens = str(prompt) if prompt == each.tokens else f"{prompt} + {each.tokens - prompt}"
        layers = f"{list(each.kind.layer_ids or range(each.kind.layers))} x {each.kind.hidden_size}"
        verdict = (
            Text(each.verdict)
            if each.problem is None
            else _plain(f"{each.verdict}: {each.problem}", "red" if each.is_there else "")
        )
        norms = " ".join(f"{norm:.3g}" for norm in each.norms)
        table.add_row(
            _plain(str(each.path.relative_to(directory))),
            tokens,
            Text(layers),
            each.kind.dtype,
            norms,
            verdict,
        )
    return table


def _show(console: Console, found: Examination) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("file", _plain(str(found.path)))
    table.add_row(
        "verdict", found.verdict if found.problem is None else _plain(found.problem, "red")
    )
    if found.kind.layers:
        prompt = "" if found.prompt_tokens is None else f" ({found.prompt_tokens} of the prompt)"
        table.add_row("tokens", f"{found.tokens}{prompt}")
        table.add_row(
            "rows",
            (
                f"{found.kind.layers} layers x {found.kind.hidden_size} {found.kind.dtype}, "
                f"{found.num_bytes / 1e6:.1f} MB"
            ),
        )
        for name, norm in zip(_layer_names(found.kind), found.norms, strict=False):
            table.add_row(f"layer {name}", f"mean norm {norm:.4g}")
    for key, value in found.metadata.items():
        table.add_row(_plain(key), _plain(value))
    console.print(table)


def _layer_names(kind: Kind) -> list[str]:
    """Return the ids of the layers, or positions if the file has another number of ids."""
    if len(kind.layer_ids) == kind.layers:
        return [str(layer_id) for layer_id in kind.layer_ids]
    return [f"#{layer}" for layer in range(kind.layers)]


def _plain(text: str, style: str = "") -> Text:
    """Return a text of a file literally: no markup, and control characters escaped."""
    return Text(printable(text), style)


def draw(found: Examination, target: Path) -> None:
    """Plot the norms of all rows: a line per layer, and a heat map of layers by tokens.

    Args:
        found: result of a file, with `token_norms`.
        target: picture to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert found.token_norms is not None
    names, layers = _layer_names(found.kind), found.token_norms.T
    figure, (lines, heat) = pyplot.subplots(2, 1, figsize=(10, 6), layout="constrained")
    for name, norms in zip(names, layers, strict=True):
        lines.plot(norms, label=f"layer {name}", linewidth=0.8)
    # A logarithmic axis requires a positive finite value.
    scale = "log" if ((layers > 0) & (layers < math.inf)).any() else "linear"
    lines.set(yscale=scale, ylabel="norm of the row")
    lines.set_title(printable(found.path.name), parse_math=False)
    lines.legend(fontsize="small")
    image = heat.imshow(layers, aspect="auto", norm=scale, interpolation="nearest")
    heat.set(xlabel="token position", ylabel="layer", yticks=range(len(names)), yticklabels=names)
    figure.colorbar(image, ax=heat, label="norm of the row")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
