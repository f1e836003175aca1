"""`python -m benchmarks.pipeline.shards`: small requests as files and as shard members."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Cost, cost_of, in_turn, speed_ratio
from vllm_ascend_hsx import HiddenStatesDataset, load
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

ROWS = RowFormat(layer_ids=(1, 2, 3, 4), hidden_size=1024, dtype="BF16")
SHARD_BYTES = 256 << 20
KINDS = ("files", "shards")


def measure(requests: int, tokens: int, repetitions: int) -> dict[str, str]:
    """Compare shards with files. Return the description and the ratio of each figure, in words.

    Above 1, shards are faster.

    Args:
        requests: number of requests, one after the other.
        tokens: tokens of each; a row has 8 KiB.
        repetitions: number of measurements, after a warm-up.
    """
    rows = np.random.default_rng(0).integers(
        0, 1 << 15, (tokens, *ROWS.row_shape), dtype=np.uint16
    ) & np.uint16(0x3FFF)
    ids = np.arange(tokens, dtype=np.int64)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        where = {kind: Path(directory, kind) for kind in KINDS}
        turn = dict.fromkeys(KINDS, 0)

        def write(kind: str) -> None:
            turn[kind] += 1
            target = where[kind] / str(turn[kind])
            sink: DirectorySink = (
                FileSink(target, ROWS)
                if kind == "files"
                else ShardSink(target, ROWS, shard_bytes=SHARD_BYTES)
            )
            with sink:
                for serial in range(requests):
                    name = f"cmpl-{serial:08d}-0123abcd"
                    file = sink.open(name, target / f"{name}.safetensors", tokens)
                    file.write(0, rows)
                    file.commit(ids, tokens)

        def read(kind: str) -> None:
            paths = HiddenStatesDataset(where[kind] / "1").paths
            random.Random(0).shuffle(paths)
            for path in paths:
                load(path, mmap=True)

        found = {}
        for what, work in (("written", write), ("listed, and loaded in any order", read)):
            costs = in_turn({kind: _timed(work, kind) for kind in KINDS}, repetitions)
            found[f"requests of {tokens} tokens {what}"] = (
                f"{speed_ratio(costs['shards'], costs['files']):.2f}"
            )
        names = {kind: len(os.listdir(where[kind] / "1")) for kind in KINDS}
        found["names in the directory"] = f"{names['shards']:,} instead of {names['files']:,}"
        return found


def _timed(work: Callable[[str], None], kind: str) -> Callable[[], Cost]:
    return lambda: cost_of(lambda: work(kind))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.shards", description=__doc__
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(argv)
    for what, figure in measure(options.requests, options.tokens, options.repetitions).items():
        print(f"| {what} | {figure} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
