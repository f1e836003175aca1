"""`python -m benchmarks.pipeline.quantization`: measure float8 for docs/file-format.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import ROOT, machine
from benchmarks.measure import Cost, cost_of, in_turn
from benchmarks.pipeline.rows import MINIMAX_M2
from vllm_ascend_hsx.demo.prompts import demo_prompts
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.tensors import dequantized
from vllm_ascend_hsx.sinks.base import Sink
from vllm_ascend_hsx.sinks.encoder import Fp8PerToken
from vllm_ascend_hsx.sinks.file import FileSink

PAGE = ROOT / "docs" / "file-format.md"
TOKENS = 512  # of the synthetic rows, and of files for sizes
HIDDEN = 4096
OUTLIERS = 8  # channels
VOCABULARY = 500  # token ids of the tiny model
JOB = 1 << 20  # bytes per job of a writer thread

Rows = list[list[str]]


@dataclass(frozen=True)
class Load:
    """Load for the cost: the files, their tokens and the repetitions."""

    repetitions: int = 9
    files: int = 4
    tokens: int = 2048


LOAD = Load()


@dataclass(frozen=True)
class Case:
    """Rows to store.

    Attributes:
        name: name in the table.
        rows: float32 [tokens, layers, hidden].
        layers: name of each layer; None if all are of one kind and shown together.
        outliers: channels larger than the others.
    """

    name: str
    rows: torch.Tensor
    layers: Sequence[str] | None = None
    outliers: int = 0


@dataclass(frozen=True)
class Errors:
    """Relative errors of rows read from a file: norm of the difference over the float32 row's norm.

    Attributes:
        bfloat16: median over the rows if stored in bfloat16.
        fp8: median over the rows, dequantised to bfloat16 as by readers.
        worst: maximum.
        ordinary: median over the channels without outliers, relative to their norm.
        lost: share of nonzero elements that became 0.
    """

    bfloat16: float
    fp8: float
    worst: float
    ordinary: float
    lost: float


def store(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as read from a bfloat16 server with fp8, [tokens, layers, hidden]."""
    tokens, layers, hidden = rows.shape
    encoder = Fp8PerToken(RowFormat(tuple(range(layers)), hidden, "BF16", quantization="fp8"))
    data = rows.bfloat16().contiguous().view(torch.uint8).numpy().reshape(-1).data
    stored = torch.frombuffer(encoder.encode(0, data), dtype=torch.float8_e4m3fn).reshape(
        rows.shape
    )
    scales = encoder.scales(tokens)
    assert scales is not None
    return dequantized(stored, torch.from_numpy(scales).view(-1, 1, 1), torch.bfloat16)


def errors(case: Case) -> list[Errors]:
    """Return the errors of each layer, or of all layers together if they are of one kind."""
    read, plain = store(case.rows).float(), case.rows.bfloat16().float()
    ordinary = slice(case.outliers, None)
    found = []
    for layer in range(case.rows.shape[1]) if case.layers is not None else (slice(None),):
        true, fp8, bfloat16 = (each[:, layer].flatten(0, -2) for each in (case.rows, read, plain))
        relative = _relative(fp8, true)
        lost = (fp8 == 0) & (true.bfloat16() != 0)
        found.append(
            Errors(
                bfloat16=float(_relative(bfloat16, true).median()),
                fp8=float(relative.median()),
                worst=float(relative.max()),
                ordinary=float(_relative(fp8[:, ordinary], true[:, ordinary]).median()),
                lost=float(lost.float().mean()),
            )
        )
    return found


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows]."""
    return torch.linalg.vector_norm(actual - expected, dim=-1) / torch.linalg.vector_norm(
        expected, dim=-1
    )


def synthetic() -> list[Case]:
    """Return random rows with the properties that make rows of large models hard to quantize."""

    def gaussian(layers: int, factor: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(layers)
        rows = torch.randn(TOKENS, layers, HIDDEN, generator=generator)
        rows[..., :OUTLIERS] *= factor
        return rows

    cases = [Case("normally distributed", gaussian(4))]
    for factor in (100, 1_000, 30_000, 300_000):
        cases.append(
            Case(
                f"{OUTLIERS} of {HIDDEN:,} channels ×{factor:,}",
                gaussian(4, factor),
                outliers=OUTLIERS,
            )
        )
    sizes = torch.tensor([0.02, 0.5, 5.0, 50.0])
    names = [f"one of four layers, size {size:g}" for size in sizes.tolist()]
    cases.append(
        Case("layers of different sizes", gaussian(4, 100) * sizes.view(-1, 1), names, OUTLIERS)
    )
    return cases


def tiny(directory: Path) -> Case:
    """Return rows of the tiny MiniMax-M2, computed by transformers in float32."""
    layer_ids = (0, 1, 2, 3, 4)
    model = build_minimax_m2(directory / "minimax_m2")
    prompts = [
        prompt.content for prompt in demo_prompts(VOCABULARY) if isinstance(prompt.content, list)
    ]
    rows = torch.cat([reference_hidden_states(model, prompt, layer_ids) for prompt in prompts])
    return Case(f"tiny MiniMax-M2, layer ids 0 to {layer_ids[-1]}", rows)


def error_rows(cases: Sequence[Case]) -> Rows:
    rows = []
    for case in cases:
        for name, each in zip(case.layers or [case.name], errors(case), strict=True):
            ordinary = _percent(each.ordinary) if case.outliers else ""
            rows.append(
                [
                    name,
                    _percent(each.bfloat16),
                    _percent(each.fp8),
                    _percent(each.worst),
                    ordinary,
                    _percent(each.lost),
                ]
            )
    return rows


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


def size_rows(directory: Path) -> Rows:
    """Return bytes per token of files, without header, by model, for four layers."""
    rows = []
    for name in ("minimax-m2", "qwen3.5-35b-a3b", "deepseek-v3"):
        preset = PRESETS[name]
        sizes = []
        for quantization in ("none", "fp8"):
            row_format = RowFormat(
                (0, 1, 2, 3), preset.hidden_size, "BF16", quantization=quantization
            )
            path = directory / f"{name}-{quantization}.safetensors"
            with FileSink(directory, row_format) as sink:
                file = sink.open(path.stem, path, TOKENS)
                file.write(0, np.zeros((TOKENS, row_format.row_bytes), np.uint8))
                file.commit(np.zeros(TOKENS, np.int64), TOKENS)
            sizes.append((path.stat().st_size - 4096) // TOKENS)
            path.unlink()
        rows.append(
            [preset.repository, f"{sizes[0]:,}", f"{sizes[1]:,}", f"{sizes[1] / sizes[0]:.2%}"]
        )
    return rows


def cost_rows(directory: Path, load: Load = LOAD) -> Rows:
    """Return one thread's cost of writing MiniMax-M2 rows with checksum to `directory`."""
    values = np.random.default_rng(0).standard_normal(
        (load.tokens, *MINIMAX_M2.row_shape), np.float32
    )
    rows = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
    with ExitStack() as stack:
        contestants = {}
        for quantization in ("none", "fp8"):
            row_format = replace(MINIMAX_M2, quantization=quantization)
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            sink = stack.enter_context(FileSink(where, row_format))
            contestants[quantization] = _writes(sink, where, rows, load)
        costs = in_turn(contestants, load.repetitions)
    gigabytes = load.files * rows.nbytes / 1e9
    table = []
    for name, mine in costs.items():
        cpu = statistics.median(cost.cpu for cost in mine) / gigabytes
        ratio = statistics.median(
            cost.cpu / plain.cpu for cost, plain in zip(mine, costs["none"], strict=True)
        )
        table.append([name, f"{cpu:.2f}", f"{1 / cpu:.1f}", f"{ratio:.1f}"])
    return table


def _writes(sink: Sink, where: Path, rows: npt.NDArray[np.uint8], load: Load) -> Callable[[], Cost]:
    step = JOB // MINIMAX_M2.row_bytes

    def write() -> None:
        for index in range(load.files):
            file = sink.open(f"r{index}", where / f"{index}.safetensors", load.tokens)
            for first in range(0, load.tokens, step):
                file.write(first, rows[first : first + step])
            file.commit(np.zeros(load.tokens, np.int64), load.tokens)
            os.unlink(file.path)  # the next round uses the same name

    return lambda: cost_of(write)


ERROR_HEAD = [
    "rows",
    "stored in bfloat16",
    "fp8",
    "fp8, worst row",
    "fp8, non-outlier channels",
    "elements that become 0",
]
SIZE_HEAD = ["model", "bytes per token, bfloat16", "fp8", "share"]
COST_HEAD = [
    "quantization",
    "CPU seconds per GB of rows",
    "GB of rows per second per core",
    "relative to none",
]


def table(head: Sequence[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def page(text: str, directory: Path, load: Load = LOAD) -> str:
    """Return docs/file-format.md with new tables.

    Args:
        text: the page as it is.
        directory: for files, in memory.
        load: amount of data to write.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        where = Path(name)
        measured_on = f"Measured on {machine.processor()}; torch {torch.__version__}.\n\n"
        tables = {
            "sizes": table(SIZE_HEAD, size_rows(where)),
            "errors": table(ERROR_HEAD, error_rows([tiny(where), *synthetic()])),
            "cost": measured_on + table(COST_HEAD, cost_rows(where, load)),
        }
    for label, new in tables.items():
        before, begin, rest = text.partition(f"<!-- quantization: {label} -->\n")
        _, end, after = rest.partition("<!-- /quantization -->\n")
        assert begin and end, f"the page has no table {label}"
        text = before + begin + new + end + after
    return text


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.quantization",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--memory",
        type=Path,
        default=Path("/dev/shm"),
        metavar="DIR",
        help="on a tmpfs (default: %(default)s)",
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="(default: docs/file-format.md)"
    )
    arguments = parser.parse_args(argv)
    text = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(page(text, arguments.memory), encoding="utf-8")
    print(f"written: {arguments.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
