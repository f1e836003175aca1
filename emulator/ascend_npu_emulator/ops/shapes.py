"""Shapes of the results of operators with references that branch on the content of a tensor.

A graph's capture runs nothing, so it must know the shapes of results in advance. Most references
return them when they run on meta tensors; the references of the operators below cannot. Each
function takes the operator's arguments as meta tensors, writes to the same arguments as the
operator, and returns meta tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ascend_npu_emulator.ops.quantization.linear import dtype_of
from ascend_npu_emulator.ops.schemas import is_at_least

Shape = Callable[..., Any]
# 0.30.0rc2 gave it another name.
INT8_ATTENTION = (
    f"_C_ascend::npu_kv_quant_sparse_flash_attention{'_vllm' if is_at_least('0.30') else ''}"
)

_HEADS_FIRST = {
    "TND_NTD": (1, 0, 2),
    "BNSD_NBSD": (1, 0, 2, 3),
}  # order of query's dimensions in the output


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    input_layout: str = "BSH",
    softmax_lse_flag: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, in the layout's order of dimensions, and the log-sum-exp."""
    lse = query.new_empty((*query.shape[:-1], 1) if softmax_lse_flag else (0,), dtype=torch.float32)
    order = _HEADS_FIRST.get(input_layout, range(query.dim()))
    return query.new_empty([query.shape[dimension] for dimension in order]), lse


def _attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_softmax_lse: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention(query, key, value, softmax_lse_flag=return_softmax_lse, **options)


def _attention_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    out: list[torch.Tensor],
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write and return ``out``. The schema does not mark it as written."""
    for tensor in out:
        tensor.zero_()
    return out[0], out[1]


def _latent_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    is_output_kv: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write both caches, unmarked in the schema. Return them and the rows, if any."""
    k_cache.zero_()
    ckv_cache.zero_()
    if not is_output_kv:
        return k_cache, ckv_cache, kv.new_empty(0), kv.new_empty(0)
    return k_cache, ckv_cache, torch.empty_like(cos), kv.new_empty(*kv.shape[:-1], gamma.shape[0])


def _chosen_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    sparse_count: int = 2048,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape[0], 1, sparse_count, dtype=torch.int32), query.new_empty(0)


def _chosen_int8_tokens(
    query: torch.Tensor, *_: object, sparse_count: int = 2048, **__: object
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, sparse_count, dtype=torch.int32)


def _sparse_attention(
    query: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output and two empty tensors."""
    return (
        query.new_empty(query.shape),
        query.new_empty(0, dtype=torch.float32),
        query.new_empty(0, dtype=torch.float32),
    )


def _int8_sparse_attention(
    query: torch.Tensor, *_: object, rope_head_dim: int = 64, **__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, without a rope, and two empty tensors."""
    return _sparse_attention(query[..., rope_head_dim:])


def _preprocessed(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the last five arguments. The schema marks them as written."""
    return arguments[-5:]


def _init_routing(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    expert_num: int = -1,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, places, tokens per expert and scales; see ``npu_moe_init_routing_custom``."""
    first, last = active_expert_range or (0, expert_num)
    copies = expert_idx.numel()
    return (
        x.new_empty(copies, x.shape[1], dtype=x.dtype if quant_mode == -1 else torch.int8),
        x.new_empty(copies, dtype=torch.int32),
        x.new_empty(last - first, dtype=torch.int64),
        x.new_empty(copies, dtype=torch.float32),
    )


def _grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    output_dtype: int | None = None,
    **_: object,
) -> list[torch.Tensor]:
    """Return [M, n] for x [M, k] and weight [groups, k, n], where an int32 holds eight int4.

    A product of int8 and int4 writes x. The schema does not mark it.
    """
    int4 = x[0].dtype == torch.int8 and weight[0].dtype == torch.int32
    if int4:
        x[0].zero_()
    return [
        x[0].new_empty(
            x[0].shape[0],
            weight[0].shape[-1] * (8 if int4 else 1),
            dtype=dtype_of(output_dtype) or x[0].dtype,
        )
    ]


def _grouped_swiglu(
    x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int8 [M, N / 2], scales and a number for x [M, K] and weight [groups, K, N]."""
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    return (
        x.new_empty(x.shape[0], weight.shape[-1] // 2),
        scales,
        x.new_empty((), dtype=torch.float32),
    )


def _grouped_swiglu_of_int4(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [M, N / 2] and scales for x [M, K] and weight_scale [groups, N]."""
    return x.new_empty(x.shape[0], weight_scale[0].shape[-1] // 2), x.new_empty(
        x.shape[0], dtype=torch.float32
    )


def _dequant_swiglu(x: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [..., H] and scales for x [..., 2 H]."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.int8), x.new_empty(
        x.shape[:-1], dtype=torch.float32
    )


def _unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    *_: object,
    **__: object,
) -> torch.Tensor:
    """Return [T, H] for T*K rows [T*K, H]."""
    top_k = 1 if probs is None else probs.shape[1]
    return permuted_tokens.new_empty(sorted_indices.shape[0] // top_k, permuted_tokens.shape[1])


def _scattered(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Return ``input``. The schema marks it as written."""
    return input


def _adapted(
    x: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, y: torch.Tensor, *_: object
) -> torch.Tensor:
    """Return ``y``. The schema marks it as written."""
    return y


def _adapted_runs(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    """Return ``y``. The schema marks it as written."""
    return y


def _experts_out(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` and ``expert_token_nums``. The schema marks them as written."""
    given = dict(zip(("out", "expert_token_nums"), arguments[11:13], strict=False)) | named
    return given["out"], given["expert_token_nums"]


def _like_first(first: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(first)


SHAPES: dict[str, Shape] = {
    "npu::npu_fused_infer_attention_score": _attention,
    "npu::npu_fused_infer_attention_score.out": _attention_out,
    "npu::npu_fused_infer_attention_score_v2": _attention_v2,
    "npu::npu_fused_infer_attention_score_v2.out": _attention_out,
    "npu::npu_kv_rmsnorm_rope_cache": _latent_cache,
    "npu::npu_scatter_nd_update_": _scattered,
    "npu::npu_lightning_indexer": _chosen_tokens,
    "npu::npu_moe_init_routing_v2": _init_routing,
    "npu::npu_grouped_matmul": _grouped_matmul,
    "npu::npu_moe_token_unpermute": _unpermute,
    "npu::npu_top_k_top_p": _like_first,
    "_C_ascend::bgmv_expand": _adapted,
    "_C_ascend::sgmv_expand": _adapted_runs,
    "_C_ascend::dispatch_ffn_combine": _experts_out,
    "_C_ascend::npu_lightning_indexer": _chosen_tokens,
    "_C_ascend::npu_sparse_flash_attention": _sparse_attention,
    "_C_ascend::npu_lightning_indexer_quant": _chosen_int8_tokens,
    INT8_ATTENTION: _int8_sparse_attention,
    "_C_ascend::mla_preprocess": _preprocessed,
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz": _grouped_swiglu,
    "_C_ascend::grouped_matmul_swiglu_quant_v2": _grouped_swiglu_of_int4,
    "_C_ascend::npu_dequant_swiglu_quant": _dequant_swiglu,
    "_C_ascend::npu_moe_init_routing_custom": _init_routing,
}


def shape_of(qualified: str, schema: str, reference: Shape) -> Shape:
    """Return the shape function of operator ``namespace::name.overload``.

    It is the entry in SHAPES, or by default the reference. An operator without results needs none,
    because the schema marks the written arguments.
    """
    if qualified in SHAPES:
        return SHAPES[qualified]
    return _nothing if schema.endswith("-> ()") else reference


def _nothing(*_: object, **__: object) -> None:
    """Return None, as operators without results do."""
