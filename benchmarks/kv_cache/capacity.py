"""Part (f): the remaining KV cache without extraction, with ours and with vLLM's own layout.

The figures come from vLLM's planner with vllm-ascend's patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.kv_cache import vllm_planner
from benchmarks.kv_cache.model_shape import ModelShape, shape_of
from benchmarks.kv_cache.preset_configs import CONFIGS
from benchmarks.kv_cache.server_config import EngineOptions, Layout
from benchmarks.kv_cache.vllm_planner import Capacity, LayoutError
from vllm_ascend_hsx.cli import plan
from vllm_ascend_hsx.plan.presets import PRESETS

KV_BYTES = 30 << 30


@dataclass(frozen=True)
class Cell:
    """One model with one layout.

    Attributes:
        block_size: tokens per block of the attention layers. blocks: vLLM's num_gpu_blocks.
        tokens: size of the KV cache as logged by the server.
        kept: tokens as a share of `off`; 0 if the server does not start.
        reason: reason why it does not start.
    """

    model: str
    layout: str
    block_size: int
    blocks: int
    tokens: int
    kept: float
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """The layouts of each model, with equal options and `kv_bytes` per NPU without extraction."""

    options: EngineOptions
    kv_bytes: int
    cells: list[Cell]


def run(show: Callable[[str], None]) -> Result:
    """Plan every preset, with the default layers of `hsx plan`."""
    vllm_planner.load()
    options, cells = EngineOptions(), []
    for name, config in CONFIGS.items():
        preset = PRESETS[name]
        words = (
            f"--tp {options.tensor_parallel} --max-num-batched-tokens "
            f"{options.max_num_batched_tokens} --kv-memory {KV_BYTES}"
        )
        planned = plan.plan(plan.parse_arguments([name, *words.split()]))
        made = capacities(
            shape_of(config),
            options,
            len(planned.request.layer_ids),
            KV_BYTES,
            planned.staging_bytes,
        )
        plain = made[Layout.PLAIN]
        if isinstance(plain, LayoutError):
            raise plain
        cells += [
            _cell(preset.repository, layout, each, plain.tokens) for layout, each in made.items()
        ]
        show(
            f"{preset.repository}: "
            f"{', '.join(f'{cell.layout} {cell.kept:.2%}' for cell in cells[-len(made) :])}"
        )
    return Result(options, KV_BYTES, cells)


def capacities(
    shape: ModelShape, options: EngineOptions, num_extracted: int, kv_bytes: int, staging_bytes: int
) -> dict[Layout, Capacity | LayoutError]:
    """Plan the KV cache of each layout; the staging bytes reduce ours.

    vllm_planner.load must have been called.

    Args:
        shape: the target.
        options: options of the server.
        num_extracted: number of extracted layers.
        kv_bytes: memory of an NPU for the KV cache, without extraction.
        staging_bytes: bytes of our staging slots.
    """
    found: dict[Layout, Capacity | LayoutError] = {}
    for layout in Layout:
        left = kv_bytes - staging_bytes if layout is Layout.HSX else kv_bytes
        try:
            found[layout] = vllm_planner.plan_layout(shape, options, layout, num_extracted, left)
        except LayoutError as error:
            found[layout] = error
    return found


def _cell(model: str, layout: Layout, found: Capacity | LayoutError, plain_tokens: int) -> Cell:
    if isinstance(found, LayoutError):
        return Cell(model, layout.value, 0, 0, 0, 0.0, str(found))
    return Cell(
        model,
        layout.value,
        found.block_size,
        found.num_blocks,
        found.tokens,
        found.tokens / plain_tokens,
    )
