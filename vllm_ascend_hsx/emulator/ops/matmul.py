"""References for fused products of two matrices."""

import torch

from vllm_ascend_hsx.emulator.ops.checks import check, check_dtype, check_rank


def _npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """Add x^T weight to ``C`` float32 [M, N] in place, summed in float32.

    x [K, M] and weight [K, N] are float16 or bfloat16.
    """
    op = "_npu_matmul_add_fp32"
    for name, tensor in (("x", x), ("weight", weight), ("C", C)):
        check_rank(op, name, tensor, 2)
    check_dtype(op, "x", x, (torch.float16, torch.bfloat16))
    check(weight.dtype == x.dtype, op, "weight", f"dtype {weight.dtype} must equal x's {x.dtype}")
    check_dtype(op, "C", C, (torch.float32,))
    check(x.shape[0] == weight.shape[0] and tuple(C.shape) == (x.shape[1], weight.shape[1]), op, "C",
          f"shape {tuple(C.shape)} does not fit x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    C.add_(x.float().t() @ weight.float())
