"""The layers that the demo extracts, and the function that computes expected rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_hsx.demo import DemoError

if TYPE_CHECKING:
    import torch

    from vllm_ascend_hsx.demo.verify import Reference


def default_layers(layers: int) -> tuple[int, ...]:
    """Return a few ids across the depth, including the last one."""
    spread = (2, layers // 2, layers - 3, layers) if layers > 8 else (1, layers // 2, layers)
    return tuple(sorted(set(spread)))


def reference_for(model: Path) -> Reference:
    """Return the function that computes expected states. Refuse a model that exceeds the memory."""
    import torch

    from vllm_ascend_hsx.demo.reference import reference_hidden_states

    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    available = available_memory()
    if stored > available:
        raise DemoError(
            f"the reference needs about {stored >> 30} GiB of memory but only "
            f"{available >> 30} GiB are free; call again with --no-reference to check "
            "only shapes, token ids and finiteness"
        )
    # float32 has negligible rounding errors, but takes twice the memory of the stored weights.
    dtype = torch.float32 if 2 * stored <= available else torch.bfloat16
    return partial(reference_hidden_states, model, dtype=dtype)


def remembered(reference: Reference) -> Reference:
    """Cache the function's results, for runs with mostly the same texts."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def rows(token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
        key = (tuple(token_ids), tuple(layer_ids))
        if key not in known:
            known[key] = reference(token_ids, layer_ids)
        return known[key]

    return rows


def available_memory() -> int:
    """Return the bytes that new processes can get without swapping, caches included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
