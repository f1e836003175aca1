"""References for the sampling kernels."""

import torch

from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype, check_rank


def npu_top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Set ``logits`` [B, V] to -inf outside top-k and then top-p.

    ``k`` is int32 [B], ``p`` [B] in logits' dtype. A value equal to the k-th largest stays. The
    remaining values are removed in ascending order while the running sum of probabilities is at
    most 1 - p; the largest value always stays. (torch_npu 2.10.0.post4, docs of npu_top_k_top_p.)
    """
    op = "npu_top_k_top_p"
    check_rank(op, "logits", logits, 2)
    check_dtype(op, "logits", logits, FLOATS)
    check(p is not None or k is not None, op, "p", "p and k must not both be None")
    batch, vocabulary = logits.shape
    values, order = torch.sort(logits, dim=-1, stable=True)
    if k is not None:
        check_dtype(op, "k", k, (torch.int32,))
        check(tuple(k.shape) == (batch,), op, "k", f"shape {tuple(k.shape)} must be ({batch},)")
        outside = k[(k < 1) | (k > vocabulary)]
        check(outside.numel() == 0, op, "k", f"{outside.tolist()[:8]} must lie in 1..{vocabulary}")
        smallest_kept = values.gather(1, (vocabulary - k.long()).unsqueeze(1))
        values = values.masked_fill(values < smallest_kept, float("-inf"))
    if p is not None:
        check(
            p.dtype == logits.dtype, op, "p", f"dtype {p.dtype} must equal logits' {logits.dtype}"
        )
        check(tuple(p.shape) == (batch,), op, "p", f"shape {tuple(p.shape)} must be ({batch},)")
        below = torch.softmax(values.float(), -1).cumsum(-1)
        dropped = below <= 1.0 - p.float().unsqueeze(1)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, values)
