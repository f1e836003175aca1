"""Declare every operator with the real schema, and with a reference or an error."""

from collections.abc import Callable
from typing import Any

import torch

from ascend_npu_emulator.ops import matmul, moe_experts, moe_gating, norm, rotary, sampling
from ascend_npu_emulator.ops.attention import (
    cache,
    fused,
    mla,
    mla_preprocess,
    paged,
    sparse,
    sparse_int8,
    store_block,
)
from ascend_npu_emulator.ops.collectives import fused_mc2, mc2
from ascend_npu_emulator.ops.collectives import matmul as fused_matmul
from ascend_npu_emulator.ops.quantization import blocks, experts, int4, linear, shared_experts
from ascend_npu_emulator.ops.recording import recordable
from ascend_npu_emulator.ops.recurrent import causal_conv1d, fla_npu, gated_delta_rule
from ascend_npu_emulator.ops.schemas import NAMESPACES, schemas
from ascend_npu_emulator.ops.shapes import shape_of

Reference = Callable[..., Any]


def _by_name(*references: Reference) -> dict[str, Reference]:
    return {reference.__name__: reference for reference in references}


REFERENCES: dict[str, dict[str, Reference]] = {
    "npu": {
        **_by_name(
            norm.npu_rms_norm, norm.npu_add_rms_norm, norm.npu_swiglu,
            rotary.npu_mrope, rotary.npu_rotary_mul, rotary.npu_apply_rotary_pos_emb,
            cache.npu_scatter_pa_kv_cache, cache.npu_format_cast, cache.npu_prefetch,
            fused.npu_fused_infer_attention_score, fused.npu_fused_infer_attention_score_v2,
            mla.npu_interleave_rope, mla.npu_kv_rmsnorm_rope_cache, mla.npu_transpose_batchmatmul,
            mla.npu_attention_update, mla.npu_gather_pa_kv_cache,
            cache.npu_scatter_nd_update_, sparse.npu_lightning_indexer,
            moe_gating.npu_moe_gating_top_k, moe_gating.npu_moe_gating_top_k_softmax,
            moe_experts.npu_moe_init_routing_v2, moe_experts.npu_grouped_matmul, moe_experts.npu_moe_token_permute,
            moe_experts.npu_moe_token_unpermute,
            linear.npu_quantize, linear.npu_dynamic_quant, linear.npu_quant_matmul, blocks.npu_dynamic_block_quant,
            fused_matmul.npu_mm_reduce_scatter_base,
            mc2.npu_moe_distribute_dispatch_v2, mc2.npu_moe_distribute_combine_v2,
            sampling.npu_top_k_top_p,
        ),
        "npu_fused_infer_attention_score.out": fused.npu_fused_infer_attention_score_out,
        "npu_fused_infer_attention_score_v2.out": fused.npu_fused_infer_attention_score_v2_out,
        "_npu_fused_infer_attention_score_get_max_workspace": fused.get_max_workspace,
        "_npu_fused_infer_attention_score_v2_get_max_workspace": fused.get_max_workspace,
    },
    "atb": {
        **_by_name(
            matmul._npu_matmul_add_fp32,
            rotary._npu_rotary_embedding,
            cache._npu_reshape_and_cache,
            mla.npu_paged_cache_load,
            paged._npu_paged_attention, paged._npu_paged_attention_get_workspace,
        ),
        "npu_paged_cache_load.out": mla.npu_paged_cache_load_out,
    },
    "_C_ascend": {
        **_by_name(
            norm.npu_add_rms_norm_bias, norm.npu_gemma_rms_norm,
            moe_gating.moe_gating_top_k,
            matmul.batch_matmul_transpose, cache.npu_scatter_nd_update_sk,
            sparse.npu_lightning_indexer, sparse.npu_sparse_flash_attention,
            sparse_int8.npu_lightning_indexer_quant, sparse_int8.npu_kv_quant_sparse_flash_attention,
            mla_preprocess.mla_preprocess, store_block.store_kv_block, store_block.store_kv_block_metadata,
            matmul.bgmv_shrink, matmul.bgmv_expand, matmul.sgmv_shrink, matmul.sgmv_expand,
            fused_mc2.dispatch_ffn_combine, moe_experts.npu_moe_init_routing_custom, experts.grouped_matmul_swiglu_quant_weight_nz,
            int4.grouped_matmul_swiglu_quant_v2, shared_experts.npu_dequant_swiglu_quant,
            causal_conv1d.npu_causal_conv1d_custom,
            gated_delta_rule.npu_fused_gdn_gating, gated_delta_rule.npu_recurrent_gated_delta_rule,
            gated_delta_rule.chunk_gated_delta_rule_fwd_h, gated_delta_rule.chunk_fwd_o,
        ),
        "npu_kv_quant_sparse_flash_attention_vllm": sparse_int8.npu_kv_quant_sparse_flash_attention,
    },
    "fla_npu": _by_name(fla_npu.causal_conv1d, fla_npu.chunk_gated_delta_rule_fwd, fla_npu.recurrent_gated_delta_rule),
}  # fmt: skip
# References that launch a collective.
COMPOSITES = frozenset(
    {
        "npu::npu_mm_reduce_scatter_base",
        "npu::npu_moe_distribute_dispatch_v2",
        "npu::npu_moe_distribute_combine_v2",
        "_C_ascend::dispatch_ffn_combine",
    }
)
_libraries: list[
    torch.library.Library
] = []  # keeps the Library objects alive, and with them the operators


def _missing(qualified: str) -> Reference:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{qualified} has no reference in the emulated NPU")

    return refuse


def declare() -> None:
    """Declare the operators of all namespaces for the device. Idempotent."""
    if _libraries:
        return
    for namespace in NAMESPACES:
        known = REFERENCES[namespace]
        declared = schemas(namespace)
        library = torch.library.Library(namespace, "FRAGMENT")
        for name, schema in declared.items():
            library.define(schema)
            qualified, reference = f"{namespace}::{name}", known.get(name)
            if reference is None:
                library.impl(name, _missing(qualified), "PrivateUse1")
                continue
            shape = shape_of(qualified, schema, reference)
            library.impl(
                name,
                recordable(qualified, schema, reference, shape, qualified in COMPOSITES),
                "PrivateUse1",
            )
            library.impl(name, shape, "Meta")  # for torch.compile, as in torch_npu
        _libraries.append(library)


def find(name: str) -> Reference | None:
    """Return the operator ``torch_npu.<name>``, or None if it is not declared.

    torch_npu 2.10.0.post4 takes functions from two namespaces: npu, and atb for the ATB library
    (op_plugin/atb/_atb_ops.py).
    """
    for namespace in ("npu", "atb"):
        if any(declared.partition(".")[0] == name for declared in schemas(namespace)):
            operator: Reference = getattr(getattr(torch.ops, namespace), name)
            return operator
    return None
