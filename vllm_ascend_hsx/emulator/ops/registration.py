"""Declares every operator with its real schema and puts the references, or an error that names the operator, behind it."""

from collections.abc import Callable
from typing import Any

import torch

from . import (
    cache,
    causal_conv1d,
    collectives,
    fused_attention,
    gated_delta_rule,
    matmul,
    mla,
    moe_experts,
    moe_gating,
    norm,
    paged_attention,
    rotary,
    sampling,
)
from .recording import recordable
from .schemas import NAMESPACES, schemas
from .shapes import shape_of

Reference = Callable[..., Any]

REFERENCES: dict[str, dict[str, Reference]] = {
    "npu": {
        "npu_rms_norm": norm.npu_rms_norm,
        "npu_add_rms_norm": norm.npu_add_rms_norm,
        "npu_swiglu": norm.npu_swiglu,
        "npu_rotary_mul": rotary.npu_rotary_mul,
        "npu_apply_rotary_pos_emb": rotary.npu_apply_rotary_pos_emb,
        "npu_scatter_pa_kv_cache": cache.npu_scatter_pa_kv_cache,
        "npu_format_cast": cache.npu_format_cast,
        "npu_prefetch": cache.npu_prefetch,
        "npu_fused_infer_attention_score": fused_attention.npu_fused_infer_attention_score,
        "npu_fused_infer_attention_score.out": fused_attention.npu_fused_infer_attention_score_out,
        "npu_fused_infer_attention_score_v2": fused_attention.npu_fused_infer_attention_score_v2,
        "npu_fused_infer_attention_score_v2.out": fused_attention.npu_fused_infer_attention_score_v2_out,
        "_npu_fused_infer_attention_score_get_max_workspace": fused_attention.get_max_workspace,
        "_npu_fused_infer_attention_score_v2_get_max_workspace": fused_attention.get_max_workspace,
        "npu_interleave_rope": mla.npu_interleave_rope,
        "npu_kv_rmsnorm_rope_cache": mla.npu_kv_rmsnorm_rope_cache,
        "npu_transpose_batchmatmul": mla.npu_transpose_batchmatmul,
        "npu_attention_update": mla.npu_attention_update,
        "npu_moe_gating_top_k": moe_gating.npu_moe_gating_top_k,
        "npu_moe_gating_top_k_softmax": moe_gating.npu_moe_gating_top_k_softmax,
        "npu_moe_init_routing_v2": moe_experts.npu_moe_init_routing_v2,
        "npu_grouped_matmul": moe_experts.npu_grouped_matmul,
        "npu_moe_token_permute": moe_experts.npu_moe_token_permute,
        "npu_moe_token_unpermute": moe_experts.npu_moe_token_unpermute,
        "npu_mm_reduce_scatter_base": collectives.npu_mm_reduce_scatter_base,
        "npu_top_k_top_p": sampling.npu_top_k_top_p,
    },
    "atb": {
        "_npu_matmul_add_fp32": matmul._npu_matmul_add_fp32,
        "_npu_rotary_embedding": rotary._npu_rotary_embedding,
        "_npu_reshape_and_cache": cache._npu_reshape_and_cache,
        "npu_paged_cache_load": mla.npu_paged_cache_load,
        "npu_paged_cache_load.out": mla.npu_paged_cache_load_out,
        "_npu_paged_attention": paged_attention._npu_paged_attention,
        "_npu_paged_attention_get_workspace": paged_attention._npu_paged_attention_get_workspace,
    },
    "_C_ascend": {
        "npu_add_rms_norm_bias": norm.npu_add_rms_norm_bias,
        "npu_gemma_rms_norm": norm.npu_gemma_rms_norm,
        "moe_gating_top_k": moe_gating.moe_gating_top_k,
        "npu_moe_init_routing_custom": moe_experts.npu_moe_init_routing_custom,
        "npu_causal_conv1d_custom": causal_conv1d.npu_causal_conv1d_custom,
        "npu_fused_gdn_gating": gated_delta_rule.npu_fused_gdn_gating,
        "npu_recurrent_gated_delta_rule": gated_delta_rule.npu_recurrent_gated_delta_rule,
        "chunk_gated_delta_rule_fwd_h": gated_delta_rule.chunk_gated_delta_rule_fwd_h,
        "chunk_fwd_o": gated_delta_rule.chunk_fwd_o,
    },
}
# References that launch a collective of their own.
COMPOSITES = frozenset({"npu::npu_mm_reduce_scatter_base"})
_libraries: list[torch.library.Library] = []  # an operator lives as long as the Library object that declared it


def _missing(qualified: str) -> Reference:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{qualified} has no reference in the emulated NPU")

    return refuse


def declare() -> None:
    """Declare all operators of all namespaces for the device; calling it again changes nothing."""
    if _libraries:
        return
    for namespace in NAMESPACES:
        known = REFERENCES[namespace]
        declared = schemas(namespace)
        unknown = sorted(known.keys() - declared.keys())
        assert not unknown, f"references without a schema in schemas/{namespace}.txt: {unknown}"
        library = torch.library.Library(namespace, "FRAGMENT")
        for name, schema in declared.items():
            library.define(schema)
            qualified, reference = f"{namespace}::{name}", known.get(name)
            if reference is None:
                library.impl(name, _missing(qualified), "PrivateUse1")
                continue
            shape = shape_of(qualified, schema, reference)
            library.impl(name, recordable(qualified, schema, reference, shape, qualified in COMPOSITES), "PrivateUse1")
            library.impl(name, shape, "Meta")  # for torch.compile, as torch_npu has them
        _libraries.append(library)


def find(name: str) -> Reference | None:
    """The operator that ``torch_npu.<name>`` is, or None if torch_npu 2.10.0.post4 has none that vllm-ascend 0.23.0 names.

    torch_npu takes its functions from two namespaces: npu, and for the names of the ATB library atb (op_plugin/atb/_atb_ops.py).
    """
    for namespace in ("npu", "atb"):
        if any(declared.partition(".")[0] == name for declared in schemas(namespace)):
            operator: Reference = getattr(getattr(torch.ops, namespace), name)
            return operator
    return None
