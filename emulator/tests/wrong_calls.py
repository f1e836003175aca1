"""Build operator calls with one invalid argument."""

from collections.abc import Callable
from typing import Any

import torch


def wrong(operator: Callable[..., object], **right: Any) -> Callable[..., Callable[[], object]]:
    """Return a function that builds calls of `operator` from valid arguments and changes."""
    return lambda **changes: lambda: operator(**right | changes)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, tensor), -1)


def more_heads(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[:, :1].expand(-1, count, *tensor.shape[2:])


def blocks_of(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda cache: cache.new_zeros(cache.shape[0], size, *cache.shape[2:])
