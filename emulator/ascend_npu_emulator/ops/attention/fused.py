"""References for npu_fused_infer_attention_score and npu_fused_infer_attention_score_v2.

Both have an ``out`` form and a function that returns the workspace.
"""

from collections.abc import Callable, Sequence

import torch

from ascend_npu_emulator.ops.attention.definition import PagedKeys, check_heads
from ascend_npu_emulator.ops.attention.fused_call import FusedCall
from ascend_npu_emulator.ops.attention.int8_keys import int8_attention
from ascend_npu_emulator.ops.attention.latent import latent_attention
from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_blocks,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)

Results = tuple[torch.Tensor, torch.Tensor]  # output, log-sum-exp

_MASK_SIZE = 2048  # rows and columns of the compressed causal mask for sparse modes 2, 3 and 4
# Addresses of checked masks. vllm-ascend keeps one mask per process, and reading four million
# elements in each call would be slow.
_KNOWN_CAUSAL_MASKS: set[tuple[int, torch.dtype]] = set()


def _check_mask(op: str, mask: torch.Tensor | None, sparse_mode: int) -> None:
    """Require no mask for sparse mode 0, and the compressed causal mask for 2, 3 and 4.

    The elements of a mask are checked once.
    """
    if sparse_mode == 0:
        if mask is not None:
            raise unsupported(op, "atten_mask (with sparse_mode=0)", mask)
        return
    check(
        mask is not None,
        op,
        "atten_mask",
        f"sparse_mode={sparse_mode} needs the compressed {_MASK_SIZE}x{_MASK_SIZE} mask",
    )
    assert mask is not None
    check_dtype(op, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8))
    check(
        tuple(mask.shape[-2:]) == (_MASK_SIZE, _MASK_SIZE) and mask.numel() == _MASK_SIZE**2,
        op,
        "atten_mask",
        (
            f"shape {tuple(mask.shape)} must be ({_MASK_SIZE}, {_MASK_SIZE}) for "
            f"sparse_mode={sparse_mode}"
        ),
    )
    known = (mask.data_ptr(), mask.dtype)
    if known not in _KNOWN_CAUSAL_MASKS:
        upper = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1)
        check(
            bool(mask.cpu().view(_MASK_SIZE, _MASK_SIZE).bool().equal(upper)),
            op,
            "atten_mask",
            f"sparse_mode={sparse_mode} needs ones above the diagonal and zeros elsewhere",
        )
        _KNOWN_CAUSAL_MASKS.add(known)


def _check_sink(call: FusedCall, sink: torch.Tensor) -> None:
    """Require one score per query head, in bfloat16, or in float32 with a float32 query."""
    op, query = call.op, call.query
    if call.with_lse:
        raise unsupported(op, "return_softmax_lse (with learnable_sink)", True)
    check_dtype(op, "learnable_sink", sink, (torch.bfloat16, torch.float32))
    check(
        query.dtype == torch.float32 or sink.dtype == torch.bfloat16,
        op,
        "learnable_sink",
        f"dtype {sink.dtype} must be torch.bfloat16 for a query of {query.dtype}",
    )
    check(
        tuple(sink.shape) == (query.shape[1],),
        op,
        "learnable_sink",
        f"shape {tuple(sink.shape)} must be ({query.shape[1]},)",
    )
    # Heads of query and value have the same size here.
    check(
        query.shape[2] <= 128,
        op,
        "learnable_sink",
        f"head size {query.shape[2]} of value must be at most 128",
    )


def _check_pages(
    op: str, cache: torch.Tensor, block_size: int, kv_heads: int, head_dim: int
) -> bool:
    """Check the shape of the paged cache for layout TND. Return whether it is head-major."""
    check_rank(op, "key", cache, 3, 4)
    head_major = cache.dim() == 4
    rows, width = (
        (cache.shape[2], cache.shape[1] * cache.shape[3])
        if head_major
        else (cache.shape[1], cache.shape[2])
    )
    check(
        0 < block_size <= 512 and block_size % 16 == 0,
        op,
        "block_size",
        f"{block_size} must be a multiple of 16 up to 512",
    )
    check(
        rows == block_size,
        op,
        "block_size",
        f"{block_size} must be {rows}, the block size of key {tuple(cache.shape)}",
    )
    check(
        width == kv_heads * head_dim,
        op,
        "key",
        f"shape {tuple(cache.shape)} does not hold {kv_heads} heads of {head_dim}",
    )
    check(
        head_major or width <= 65535,
        op,
        "key",
        f"{width} elements per row exceed the 65535 of this cache layout",
    )
    return head_major


def _fused(call: FusedCall) -> Results:
    """Return the results of the TND layout; see ``npu_fused_infer_attention_score``."""
    op, query, key, value, table = call.op, call.query, call.key, call.value, call.block_table
    if call.layout != "TND":
        raise unsupported(op, "input_layout", call.layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dtype(op, name, tensor, FLOATS)
        check(
            tensor.dtype == query.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal query's {query.dtype}",
        )
        if name == "query":
            check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
        elif table is not None:  # without a table CANN makes contiguous copies (AutoContiguous)
            check_blocks(op, name, tensor)
    check(
        call.inner_precise in (0, 1, 2, 3),
        op,
        "inner_precise",
        f"{call.inner_precise} is not one of 0, 1, 2, 3",
    )
    check_rank(op, "query", query, 3)
    kv_heads, width = check_heads(op, call.heads, call.kv_heads), query.shape[2]
    check(
        query.shape[1] == call.heads,
        op,
        "num_heads",
        f"{call.heads} does not match query {tuple(query.shape)}",
    )
    check(
        key.shape == value.shape,
        op,
        "value",
        f"shape {tuple(value.shape)} must equal key's {tuple(key.shape)}",
    )
    if call.sink is not None:
        _check_sink(call, call.sink)
    spans = call.query_spans(query.shape[0])
    if table is None:
        check(
            tuple(key.shape[1:]) == (kv_heads, width),
            op,
            "key",
            f"shape {tuple(key.shape)} must be [S, {kv_heads}, {width}]",
        )
        pairs = [(key[first:last], value[first:last]) for first, last in call.key_spans(len(spans))]
    else:
        head_major = _check_pages(op, key, call.block_size, kv_heads, width)
        keys, values = (PagedKeys(op, cache, table, kv_heads, head_major) for cache in (key, value))
        pairs = [
            (keys.of(i, length), values.of(i, length))
            for i, length in enumerate(call.cached_lengths(table, spans))
        ]
    return call.attend(query, spans, pairs, width)


def _infer(call: FusedCall) -> Results:
    _check_mask(call.op, call.mask, call.sparse_mode)
    latent = call.query_rope is not None or call.key_rope is not None
    if call.key_scale is not None or call.value_scale is not None:
        out, lse = int8_attention(call)
    else:
        out, lse = latent_attention(call) if latent else _fused(call)
    return out, lse if call.with_lse else lse.new_empty(0)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    **quantisation_and_prefix: object,
) -> Results:
    """Compute attention of many sequences laid end to end (layout TND).

    The keys are also laid end to end, or in a paged cache. A sequence without queries is skipped.
    Padding rows are computed like all others. Unlike hardware, this accepts float32 (the exactness
    mode) and any head size.

    Args:
        query: [T, num_heads, D].
        key, value: [S, num_key_value_heads, D]; with ``block_table`` [blocks, block_size, heads *
            D] or [blocks, heads, block_size, D].
        actual_seq_lengths: running totals, the last one T.
        actual_seq_lengths_kv: running totals ending at S; with ``block_table`` one length per
            sequence.
        block_table: int32 [sequences, n], or None.
        query_rope, key_rope: see latent.py.
        key_antiquant_scale, value_antiquant_scale: see int8_keys.py.
        sparse_mode: 0, 2, 3 or 4; see attention.band_of.
        pre_tokens, next_tokens: the window in sparse mode 4; ignored in the other modes, as on
            hardware.

    Returns:
        The output, like query, and the log-sum-exp [T, num_heads, 1] float32, empty unless
            ``softmax_lse_flag``.
    """
    op = "npu_fused_infer_attention_score"
    refuse_options(op, pse_shift=pse_shift, **quantisation_and_prefix)
    return _infer(
        FusedCall(
            op,
            query,
            key,
            value,
            query_rope,
            key_rope,
            atten_mask,
            actual_seq_lengths,
            actual_seq_lengths_kv,
            block_table,
            num_heads,
            num_key_value_heads,
            scale,
            pre_tokens,
            next_tokens,
            input_layout,
            sparse_mode,
            inner_precise,
            block_size,
            softmax_lse_flag,
            None,
            key_antiquant_scale,
            value_antiquant_scale,
        )
    )


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    learnable_sink: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    **quantisation: object,
) -> Results:
    """Do the same as ``npu_fused_infer_attention_score``, with the second version's argument names.

    ``learnable_sink`` [num_query_heads] is a score in each query's softmax without a value. It is
    refused with ``return_softmax_lse``, because CANN does not document whether the log-sum-exp
    includes the sink.
    """
    op = "npu_fused_infer_attention_score_v2"
    refuse_options(op, pse_shift=pse_shift, **quantisation)
    return _infer(
        FusedCall(
            op,
            query,
            key,
            value,
            query_rope,
            key_rope,
            atten_mask,
            actual_seq_qlen,
            actual_seq_kvlen,
            block_table,
            num_query_heads,
            num_key_value_heads,
            softmax_scale,
            pre_tokens,
            next_tokens,
            input_layout,
            sparse_mode,
            inner_precise,
            block_size,
            return_softmax_lse,
            learnable_sink,
        )
    )


def _into_out(infer: Callable[..., Results], lse_option: str) -> Callable[..., Results]:
    """Return the form of ``infer`` that writes into ``out`` = [output, log-sum-exp].

    ``workspace`` is scratch memory. The emulator ignores it.
    """
    op = f"{infer.__name__}.out"

    def write(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
        out: list[torch.Tensor],
        **options: object,
    ) -> Results:
        results = infer(query, key, value, **options)
        check(len(out) == 2, op, "out", f"{len(out)} tensors must be 2")
        check(
            out[0].shape == results[0].shape,
            op,
            "out",
            f"shape {tuple(out[0].shape)} must be {tuple(results[0].shape)}",
        )
        out[0].copy_(results[0])
        if options.get(lse_option):
            out[1].copy_(results[1])
        return out[0], out[1]

    return write


npu_fused_infer_attention_score_out = _into_out(npu_fused_infer_attention_score, "softmax_lse_flag")
npu_fused_infer_attention_score_v2_out = _into_out(
    npu_fused_infer_attention_score_v2, "return_softmax_lse"
)


def get_max_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
) -> torch.Tensor:
    """Return scratch memory for the kernel: here an empty uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=query.device)
