"""Part (e): slow storage: a stream without extraction beside extracted prompts, by slow_storage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.measure import quantile
from benchmarks.pipeline.engine import LAYER_IDS, Engine
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

NO_EXTRACTION, WAIT, FAIL = "no extraction", "wait", "fail"
# Share of the bytes per second that the prompts write with fast storage.
SHARES: dict[str, float | None] = {
    "as it is": None,
    "1/2": 0.5,
    "1/10": 0.1,
    "1/100": 0.01,
    "stalled": 0.0,
}
ROW_BYTES = len(LAYER_IDS) * 256 * 2  # of the tiny model
RING_BYTES = 4 << 20


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        seconds: duration of each cell.
        in_flight: number of prompts. tokens: tokens of each.
    """

    seconds: float = 10.0
    in_flight: int = 16
    tokens: int = 250


FULL = Scale()
QUICK = Scale(seconds=2.0)


@dataclass(frozen=True)
class Cell:
    """One setting with one storage.

    Attributes:
        p50, p99, longest: seconds between two tokens of the stream.
        per_second: answered prompts.
        failed: share of the prompts without rows.
    """

    setting: str
    storage: str
    p50: float
    p99: float
    longest: float
    per_second: float
    failed: float


@dataclass(frozen=True)
class Result:
    """All cells.

    Attributes:
        needed: bytes per second that prompts write with fast storage, by setting.
        machine: description and load of the machine.
    """

    cells: list[Cell]
    needed: dict[str, float]
    scale: Scale
    machine: str


def run(scale: Scale, directory: Path, show: Callable[[str], None]) -> Result:
    """Measure, with files on the directory's filesystem."""
    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    cells: list[Cell] = []
    needed: dict[str, float] = {}
    before = machine.load_average()
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory))
        )
        model = build_qwen3(place / "model")
        for setting in (WAIT, FAIL):
            show(f"starting the engine: slow_storage={setting}")
            engine = Engine(
                settings(setting, model, place / setting),
                {},
                place / f"{setting}.log",
                "slow_storage_process",
            )
            with ExitStack() as closing:
                closing.callback(engine.close)

                def measure(
                    setting: str, storage: str, engine: Engine = engine, **order: Any
                ) -> Cell:
                    found = engine.order({**vars(scale), **order})
                    gaps = found["gaps"]
                    per_second, failed = (
                        found["answered"] / scale.seconds,
                        found["failed"] / max(1, found["prompts"]),
                    )
                    cell = Cell(
                        setting,
                        storage,
                        quantile(gaps, 0.5),
                        quantile(gaps, 0.99),
                        max(gaps),
                        per_second,
                        failed,
                    )
                    show(f"{setting}, storage {storage}: longest gap {cell.longest:.3f} s")
                    return cell

                measure(setting, "warming up", extract=True, bytes_per_s=None)
                cells.append(
                    measure(
                        f"{NO_EXTRACTION} ({setting})", "as it is", extract=False, bytes_per_s=None
                    )
                )
                for storage, share in SHARES.items():
                    rate = None if share is None else share * needed[setting]
                    cells.append(measure(setting, storage, extract=True, bytes_per_s=rate))
                    needed.setdefault(setting, cells[-1].per_second * scale.tokens * ROW_BYTES)
    load = f"load average {before:.1f} before, {machine.load_average():.1f} after"
    return Result(cells, needed, scale, f"{machine.processor()}, {load}")


def settings(setting: str, model: Path, storage: Path) -> dict[str, Any]:
    """EngineArgs."""
    transfer = kv_transfer_config(storage)
    transfer["kv_connector_extra_config"].update(slow_storage=setting, pinned_ring_bytes=RING_BYTES)
    return {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "speculative_config": speculative_config(LAYER_IDS),
        "kv_transfer_config": transfer,
    }
