"""References for fused products of two matrices, and for the products of adapters (LoRA)."""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.checks import check, check_dtype, check_rank, unsupported


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
    check(
        x.shape[0] == weight.shape[0] and tuple(C.shape) == (x.shape[1], weight.shape[1]),
        op,
        "C",
        f"shape {tuple(C.shape)} does not fit x {tuple(x.shape)} and weight {tuple(weight.shape)}",
    )
    C.add_(x.float().t() @ weight.float())


_PRODUCT_ROWS_AT_MOST = 1024  # MAX_CAPTURE_NUM


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Write a product per batch to ``tensor_c`` [M, B, N]: [M, K] of ``tensor_a`` by [K, N].

    Products are summed in float32 and rounded once. Tensors must be contiguous, because the kernel
    takes addresses alone. Supported: the format ND without quantisation.
    (csrc/batch_matmul_transpose/op_host/batch_matmul_transpose.h:47 in vllm-ascend 0.23.0.)

    Args:
        tensor_a: float16 or bfloat16 [M, B, K], M at most 1024.
        tensor_b: [B, K, N].
    """
    op = "batch_matmul_transpose"
    for option, mode, known, default in (
        ("format_mode", format_mode, ("ND", "NZ"), "ND"),
        (
            "quant_mode",
            quant_mode,
            ("per_channel_symm", "per_channel_asymm", "per_token_symm"),
            "per_channel_symm",
        ),
    ):
        check(mode is None or mode in known, op, option, f"{mode!r} is not one of {known}")
        if mode not in (None, default):
            raise unsupported(op, option, mode)
    for name, tensor in (("tensor_a", tensor_a), ("tensor_b", tensor_b), ("tensor_c", tensor_c)):
        check_rank(op, name, tensor, 3)
        check_dtype(op, name, tensor, (torch.float16, torch.bfloat16))
        check(
            tensor.dtype == tensor_a.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal tensor_a's {tensor_a.dtype}",
        )
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
    rows, batches, inner = tensor_a.shape
    check(
        0 < rows <= _PRODUCT_ROWS_AT_MOST,
        op,
        "tensor_a",
        f"{rows} rows must be 1 to {_PRODUCT_ROWS_AT_MOST}",
    )
    check(
        tuple(tensor_b.shape[:2]) == (batches, inner),
        op,
        "tensor_b",
        f"shape {tuple(tensor_b.shape)} does not fit tensor_a {tuple(tensor_a.shape)}",
    )
    wanted = (rows, batches, tensor_b.shape[2])
    check(
        tuple(tensor_c.shape) == wanted,
        op,
        "tensor_c",
        f"shape {tuple(tensor_c.shape)} must be {wanted}",
    )
    tensor_c.copy_(torch.bmm(tensor_a.float().transpose(0, 1), tensor_b.float()).transpose(0, 1))


# Adapters (LoRA): vllm-ascend's own kernels, csrc/kernels/{b,s}gmv_{shrink,expand}.cpp in 0.23.0.
# bgmv takes one adapter per row, sgmv one per run of rows.

_RANKS = (
    8,
    16,
    32,
    64,
)  # ranks that the expanding kernels compute; for others the sums are undefined
_ALIGNED = 16  # elements of two bytes in 32 bytes, the unit in which the kernels copy


def _check_adapters(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    half: torch.Tensor,
    rank: int,
    matrix: Sequence[int],
) -> None:
    """Check the arguments that the four kernels share.

    Args:
        half: x or y, whichever has the weights' dtype; the other tensor is float32 [rows, rank].
        matrix: the shape of each adapter's weight. The kernel reads any weight in this shape.
    """
    for name, tensor in (("x", x), ("y", y)):
        check_rank(op, name, tensor, 2)
        check_dtype(
            op,
            name,
            tensor,
            (torch.float16, torch.bfloat16) if tensor is half else (torch.float32,),
        )
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
    check_rank(op, "weight", weight, 3, 4)
    check(weight.dtype == half.dtype, op, "weight", f"dtype {weight.dtype} must be {half.dtype}")
    check(weight.is_contiguous(), op, "weight", f"strides {weight.stride()} must be contiguous")
    check(
        tuple(weight.shape[1:]) in (tuple(matrix), (1, *matrix)),
        op,
        "weight",
        (
            f"shape {tuple(weight.shape)} must be [adapters, {matrix[0]}, {matrix[1]}] or "
            f"[adapters, 1, {matrix[0]}, {matrix[1]}]"
        ),
    )
    check(x.shape[0] == y.shape[0], op, "y", f"{y.shape[0]} rows for {x.shape[0]} rows of x")
    check(rank in _RANKS, op, "weight", f"rank {rank} is not one of {_RANKS}")
    width = max(matrix)
    check(
        width % _ALIGNED == 0,
        op,
        "weight",
        f"shape {tuple(weight.shape)}: {width} must be a multiple of {_ALIGNED}",
    )


def _adapter_of_rows(
    op: str, indices: torch.Tensor, seq_len: torch.Tensor | None, adapters: int, rows: int
) -> torch.Tensor:
    """Return the adapter of each row, negative for none.

    Without ``seq_len``, ``indices`` is int64 [rows], one adapter per row. With ``seq_len``, int64
    lengths of runs of rows, ``indices`` has one adapter per run; rows after the last run have none.

    Raises:
        ValueError: for an index without an adapter. Hardware would read past the weights.
    """
    name = "indices" if seq_len is None else "lora_indices"
    for argument, tensor in ((name, indices), ("seq_len", seq_len)):
        if tensor is not None:
            check_rank(op, argument, tensor, 1)
            check_dtype(op, argument, tensor, (torch.int64,))
            check(
                tensor.is_contiguous(),
                op,
                argument,
                f"strides {tensor.stride()} must be contiguous",
            )
    of_rows = indices
    if seq_len is None:
        check(indices.shape[0] == rows, op, name, f"{indices.shape[0]} indices for {rows} rows")
    else:
        check(
            indices.shape == seq_len.shape,
            op,
            name,
            f"{indices.shape[0]} indices for {seq_len.shape[0]} runs",
        )
        check(bool((seq_len >= 0).all()), op, "seq_len", f"{seq_len.tolist()} must not be negative")
        of_rows = torch.nn.functional.pad(
            indices.repeat_interleave(seq_len)[:rows],
            (0, max(0, rows - int(seq_len.sum()))),
            value=-1,
        )
    beyond = of_rows[of_rows >= adapters]
    check(
        beyond.numel() == 0,
        op,
        name,
        f"{beyond.tolist()[:8]} lie past the {adapters} adapters of weight",
    )
    return of_rows


def _shrink(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    seq_len: torch.Tensor | None,
    y: torch.Tensor,
    scale: float,
) -> None:
    """Compute ``bgmv_shrink``, or with ``seq_len`` ``sgmv_shrink``."""
    check(
        x.dim() == y.dim() == 2 and x.shape[1] > y.shape[1],
        op,
        "y",
        f"shape {tuple(y.shape)} must have fewer columns than x {tuple(x.shape)}",
    )
    _check_adapters(op, x, weight, y, x, y.shape[1], (y.shape[1], x.shape[1]))
    of_rows = _adapter_of_rows(op, indices, seq_len, weight.shape[0], x.shape[0])
    for adapter in of_rows[of_rows >= 0].unique().tolist():
        mine = of_rows == adapter
        y[mine] = scale * (x[mine].float() @ weight[adapter].view(y.shape[1], -1).float().t())


def _expand(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    seq_len: torch.Tensor | None,
    y: torch.Tensor,
    offset: int,
    size: int,
) -> torch.Tensor:
    """Compute ``bgmv_expand``, or with ``seq_len`` ``sgmv_expand``."""
    check(
        x.dim() == 2 and x.shape[1] <= size,
        op,
        "slice_size",
        f"{size} must not be smaller than x's {tuple(x.shape)[-1]} columns",
    )
    check(
        offset >= 0 and y.dim() == 2 and offset + size <= y.shape[1],
        op,
        "slice_offset",
        f"columns {offset} to {offset + size} must lie in y {tuple(y.shape)}",
    )
    check(
        offset % _ALIGNED == 0 and y.shape[-1] % _ALIGNED == 0,
        op,
        "slice_offset",
        f"{offset} and y's {y.shape[-1]} columns must be multiples of {_ALIGNED}",
    )
    _check_adapters(op, x, weight, y, y, x.shape[1], (size, x.shape[1]))
    of_rows = _adapter_of_rows(op, indices, seq_len, weight.shape[0], x.shape[0])
    columns = slice(offset, offset + size)
    for adapter in of_rows[of_rows >= 0].unique().tolist():
        mine = of_rows == adapter
        y[mine, columns] = (
            y[mine, columns].float() + x[mine] @ weight[adapter].view(size, -1).float().t()
        ).to(y.dtype)
    return y


def bgmv_shrink(
    x: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, y: torch.Tensor, scale: float
) -> None:
    """Write scale * weight[i] x to each row of ``y``, where i is the adapter of the row.

    Computed in float32. The row is overwritten. A row with a negative index is unchanged.

    Args:
        x: float16 or bfloat16 [rows, inner].
        weight: [adapters, rank, inner] or [adapters, 1, rank, inner], of x's dtype.
        indices: int64 [rows].
        y: float32 [rows, rank].
    """
    _shrink("bgmv_shrink", x, weight, indices, None, y, scale)


def sgmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    scale: float,
) -> None:
    """Do the same as ``bgmv_shrink``, with the adapter ``lora_indices`` int64 [runs] of each run.

    Run j has the next ``seq_len[j]`` rows. Rows after the last run are unchanged.
    """
    _shrink("sgmv_shrink", x, weight, lora_indices, seq_len, y, scale)


def bgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Add weight[i] x to columns of each row of ``y``; i is the adapter of the row. Return ``y``.

    The columns are the ``slice_size`` from ``slice_offset`` on. Sums are float32, rounded once. A
    row with a negative index is unchanged.

    Args:
        x: float32 [rows, rank].
        weight: [adapters, slice_size, rank] or [adapters, 1, slice_size, rank], of y's dtype.
        indices: int64 [rows].
        y: float16 or bfloat16 [rows, columns].
    """
    return _expand("bgmv_expand", x, weight, indices, None, y, slice_offset, slice_size)


def sgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Do the same as ``bgmv_expand``, for runs of rows as in ``sgmv_shrink``."""
    return _expand("sgmv_expand", x, weight, lora_indices, seq_len, y, slice_offset, slice_size)
