"""References for the variants of RMSNorm, and for SwiGLU."""

import torch

from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype


def _rstd_shape(x: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape[: x.dim() - gamma.dim()]) + (1,) * gamma.dim()


def _normalise(
    op: str, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute RMSNorm over the trailing dimensions that ``gamma`` covers.

    As in the kernel (CANN ops-nn rms_norm and add_rms_norm, op_kernel), statistics and the product
    with the reciprocal root are float32. The result is rounded to the input's dtype once before and
    once after the product with gamma. For bfloat16 the product with gamma is a float32 product of
    bfloat16 values and has one rounding, as in transformers.
    """
    check_dtype(op, "x", x, FLOATS)
    check_dtype(op, "gamma", gamma, (x.dtype, torch.float32))
    check(gamma.dim() >= 1, op, "gamma", "must have at least one dimension")
    check(
        x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        op,
        "gamma",
        f"shape {tuple(gamma.shape)} must equal the trailing dimensions of x {tuple(x.shape)}",
    )
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    exact = x.float()
    rstd = torch.rsqrt(exact.square().mean(axes, keepdim=True) + epsilon)
    y = (exact * rstd).to(x.dtype).float() * gamma.float()
    if beta is not None:
        check_dtype(op, "beta", beta, (gamma.dtype,))
        check(
            beta.shape == gamma.shape,
            op,
            "beta",
            f"shape {tuple(beta.shape)} must equal gamma's {tuple(gamma.shape)}",
        )
        y = y.to(x.dtype).float() + beta.float()
    return y.to(x.dtype), rstd.reshape(_rstd_shape(x, gamma))


def npu_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y like ``input`` [..., H], and rstd float32 with ones where ``gamma`` normalises."""
    return _normalise("npu_rms_norm", input, gamma, None, epsilon)


def _check_addends(op: str, x1: torch.Tensor, x2: torch.Tensor) -> None:
    check(
        x1.shape == x2.shape, op, "x2", f"shape {tuple(x2.shape)} must equal x1's {tuple(x1.shape)}"
    )
    check(x1.dtype == x2.dtype, op, "x2", f"dtype {x2.dtype} must equal x1's {x1.dtype}")


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, rstd and x: x = x1 + x2 rounded to the input's dtype, y the RMSNorm of x."""
    _check_addends("npu_add_rms_norm", x1, x2)
    x = x1 + x2
    y, rstd = _normalise("npu_add_rms_norm", x, gamma, None, epsilon)
    return y, rstd, x


def npu_add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as ``npu_add_rms_norm``, and add ``beta`` [H] to y if given.

    vllm-ascend's own kernel, csrc/add_rms_norm_bias.
    """
    _check_addends("npu_add_rms_norm_bias", x1, x2)
    x = x1 + x2
    y, rstd = _normalise("npu_add_rms_norm_bias", x, gamma, beta, epsilon)
    return y, rstd, x


def npu_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and rstd of ``npu_rms_norm`` with the weight 1 + gamma, rounded once at the end."""
    op = "npu_gemma_rms_norm"
    check_dtype(op, "x", x, FLOATS)
    check_dtype(op, "gamma", gamma, (x.dtype,))
    check(
        x.shape[-1:] == gamma.shape,
        op,
        "gamma",
        f"shape {tuple(gamma.shape)} must be the last dimension of {tuple(x.shape)}",
    )
    exact = x.float()
    rstd = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return (exact * rstd * (1.0 + gamma.float())).to(x.dtype), rstd


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return silu(a) * b for the halves of ``input`` along ``dim``; float32, rounded at the end."""
    op = "npu_swiglu"
    check_dtype(op, "input", input, FLOATS)
    check(input.dim() >= 1, op, "input", "must have at least one dimension")
    check(
        input.shape[dim] % 2 == 0,
        op,
        "dim",
        f"size {input.shape[dim]} of dimension {dim} must be even",
    )
    gate, up = input.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)
