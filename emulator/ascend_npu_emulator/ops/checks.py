"""Errors of references for invalid arguments and unsupported options.

All operators use the same format: each message names the operator and the argument.
"""

from collections.abc import Iterable

import torch

from ascend_npu_emulator.ops.schemas import is_at_least

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(condition: bool, op: str, argument: str, why: str) -> None:
    """Raise ``ValueError`` naming operator and argument unless ``condition`` holds.

    The checks are those that the kernel or the host-side tiling makes before the kernel starts.
    """
    if not condition:
        raise ValueError(f"{op}: {argument}: {why}")


def check_dtype(
    op: str, argument: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype]
) -> None:
    """Raise ``ValueError`` unless ``tensor`` has one of the ``allowed`` dtypes."""
    accepted = tuple(allowed)
    names = ", ".join(str(dtype) for dtype in accepted)
    check(
        tensor.dtype in accepted,
        op,
        argument,
        f"dtype {tensor.dtype} is not supported; supported: {names}",
    )


def check_rank(op: str, argument: str, tensor: torch.Tensor, *ranks: int) -> None:
    """Raise ``ValueError`` unless ``tensor`` has one of the given numbers of dimensions."""
    wanted = " or ".join(str(rank) for rank in ranks)
    check(
        tensor.dim() in ranks,
        op,
        argument,
        f"shape {tuple(tensor.shape)} must have {wanted} dimensions",
    )


def check_blocks(op: str, argument: str, cache: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a paged cache is contiguous, or has gaps only between blocks.

    Gaps require CANN 9.2: vllm-ascend 0.30 stores K and V of a block side by side (vllm-ascend's
    developer guide, "Non-Contiguous KV Cache").
    """
    whole = cache[:1] if is_at_least("0.30") else cache
    check(whole.is_contiguous(), op, argument, f"strides {cache.stride()} must be contiguous")


def row_groups(
    op: str, group_list: torch.Tensor, groups: int, rows: int, cumulative: bool
) -> list[tuple[int, int]]:
    """Return the rows [first, end) of each group.

    ``group_list`` int64 [groups] has running totals of rows (``cumulative``) or rows per group.
    Raises ``ValueError`` if it does not fit ``groups`` and ``rows``.
    """
    check_dtype(op, "group_list", group_list, (torch.int64,))
    check(
        tuple(group_list.shape) == (groups,),
        op,
        "group_list",
        f"shape {tuple(group_list.shape)} must be ({groups},)",
    )
    entries = group_list.tolist()
    ends = entries if cumulative else torch.tensor(entries).cumsum(0).tolist()
    found = list(zip([0, *ends[:-1]], ends, strict=True))
    check(
        all(start <= end for start, end in found),
        op,
        "group_list",
        f"{entries} must not give a group a negative number of rows",
    )
    check(ends[-1] <= rows, op, "group_list", f"{ends[-1]} rows exceed the {rows} of x")
    return found


def unsupported(op: str, option: str, value: object) -> NotImplementedError:
    """Return the error for an option that the emulator lacks."""
    shown = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
    return NotImplementedError(f"{op}: {option}={shown} has no reference in the emulated NPU")


def refuse_options(op: str, **options: object) -> None:
    """Raise ``NotImplementedError`` for the first option that is set.

    ``None``, ``False``, ``0``, ``""`` and an empty sequence are defaults and count as not set.
    """
    for option, value in options.items():
        if isinstance(value, torch.Tensor) or value:
            raise unsupported(op, option, value)
