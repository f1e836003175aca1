"""Build arguments from a seed for each operator that is tested on the device and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from emulated import int32, random
from torch.utils._pytree import tree_leaves, tree_map

from ascend_npu_emulator.ops.registration import REFERENCES
from ascend_npu_emulator.ops.shapes import INT8_ATTENTION

Call = tuple[tuple[Any, ...], dict[str, Any]]
HOST = frozenset({"context_lens"})  # arguments that stay on the host


def half(*shape: int, seed: int) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=torch.bfloat16)


def experts(seed: int) -> torch.Tensor:
    return torch.stack(
        [
            torch.randperm(4, generator=torch.Generator().manual_seed(10 * seed + row))[:2]
            for row in range(3)
        ]
    ).int()


def attention(seed: int, **options: Any) -> Call:
    """Return two sequences with one query each, over a paged cache with blocks of 16."""
    table = torch.tensor([[1 + seed % 2, 3], [0, 4]], dtype=torch.int32)
    return (
        random(2, 4, 16, seed=seed),
        random(5, 16, 32, seed=seed + 1),
        random(5, 16, 32, seed=seed + 2),
    ), {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": "TND",
        "block_size": 16,
        "block_table": table,
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [18, 9],
        **options,
    }


def attention_v2(seed: int, **options: Any) -> Call:
    args, kwargs = attention(seed, **options)
    new = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen",
    }
    return args, {
        {**new, "actual_seq_lengths_kv": "actual_seq_kvlen"}.get(name, name): value
        for name, value in kwargs.items()
    }


def outputs() -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 16), torch.zeros(1)]


def latent_attention(seed: int) -> Call:
    """Return two queries of 8 heads over shared latents. The output layout puts heads first."""
    shapes = ((2, 8, 512), (2, 8, 64), (3, 1, 16, 512), (3, 1, 16, 64))
    query, rope, keys, key_rope = (half(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return (query, keys, keys.clone()), {
        "query_rope": rope,
        "key_rope": key_rope,
        "num_heads": 8,
        "num_key_value_heads": 1,
        "scale": 0.1,
        "input_layout": "TND_NTD",
        "sparse_mode": 0,
        "block_size": 16,
        "block_table": int32(1, 0, 2, 0).view(2, 2),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [18, 9],
    }


def latent_cache(seed: int, rows: bool) -> Call:
    shapes = ((3, 1, 1, 576), (512,), (3, 1, 1, 64), (3, 1, 1, 64))
    caches = [torch.zeros(2, 4, 1, width).bfloat16() for width in (64, 512)]
    given = [half(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return (*given, torch.tensor([seed, -1, 6]), *caches), {
        "cache_mode": "PA",
        "is_output_kv": rows,
    }


def two_sequences(seed: int) -> dict[str, Any]:
    """Return options for two sequences, with one and two queries, over blocks of 16."""
    table = torch.tensor([[1 + seed % 2, 3], [0, 4]], dtype=torch.int32)
    return {"actual_seq_lengths_query": int32(1, 3), "block_table": table, "layout_query": "TND"}


def indexer(seed: int) -> Call:
    options = {
        "actual_seq_lengths_key": int32(18, 9),
        "layout_key": "PA_BSND",
        "sparse_count": 5,
        **two_sequences(seed),
    }
    return (
        half(3, 2, 128, seed=seed),
        half(5, 16, 1, 128, seed=9),
        half(3, 2, seed=seed + 1),
    ), options


def sparse_attention(seed: int) -> Call:
    shapes = ((3, 2, 512), (3, 2, 64), (5, 16, 1, 512), (5, 16, 1, 64))
    query, rope, keys, key_rope = (half(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    query = query.transpose(0, 1).contiguous().transpose(0, 1)  # the strides of vllm-ascend
    ropes = {"query_rope": rope, "key_rope": key_rope}
    chosen = int32(3, 17 - seed, 2, 0, 1, -1, 8, 0, -1).view(3, 1, 3)
    return (query, keys, keys.clone(), chosen, 0.1), {
        "actual_seq_lengths_kv": int32(18, 9),
        "layout_kv": "PA_BSND",
        **ropes,
        **two_sequences(seed),
    }


def init_routing(seed: int, active: tuple[int, int] = (0, 4)) -> Call:
    options = {
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
    }
    return (random(3, 8, seed=seed), experts(seed)), {
        "scale": random(3, seed=seed),
        "active_expert_range": list(active),
        **options,
    }


def norm(seed: int, *more: Any) -> Call:
    return (random(3, 8, seed=seed), random(3, 8, seed=8), random(8), *more), {}


def grouped(seed: int) -> Call:
    options = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    return ([random(6, 8, seed=seed)], [random(2, 8, 5)]), {
        "group_list": torch.tensor([2 + seed, 4 - seed]),
        **options,
    }


def int8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        -128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )


def int8_indexer(seed: int) -> Call:
    (query, _, weights), options = indexer(seed)
    scales = [random(*shape, seed=seed).abs().half() for shape in ((3, 2), (5, 16, 1))]
    return (
        int8(*query.shape, seed=seed),
        int8(5, 16, 1, 128, seed=9),
        weights.half(),
        *scales,
    ), options


def int8_sparse_attention(seed: int) -> Call:
    (query, _, _, chosen, scale), options = sparse_attention(seed)
    latents, ropes, factors = (
        int8(5, 16, 1, 512, seed=seed),
        half(5, 16, 1, 64, seed=2),
        random(5, 16, 1, 4, seed=3).abs() / 50,
    )
    keys = torch.cat((latents, ropes.view(torch.int8), factors.view(torch.int8)), -1)
    kept = {
        name: option for name, option in options.items() if name not in ("query_rope", "key_rope")
    }
    query = torch.cat((query, options["query_rope"]), -1)
    return (query, keys, keys.clone(), chosen, scale), {
        **kept,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
    }


def preprocessed(seed: int) -> Call:
    """Return two rows of 32 elements, a latent query of 32, and two heads of 16 + 64 elements."""
    caches = [torch.zeros(2, 4, 1, width).bfloat16() for width in (512, 64)]
    turns = [half(2, 1, 1, 64, seed=seed + i) for i in range(2)]
    layers = [
        (
            int8(1, 1, columns, 32, seed=columns),
            random(columns, seed=1).abs() / 1000,
            int8(columns, seed=2).int(),
        )
        for columns in (608, 160)
    ]
    scales = [torch.tensor([0.05]).bfloat16(), torch.tensor([3], dtype=torch.int8)]
    (down, descale0, bias0), (up, descale1, bias1) = layers
    ones = torch.ones(1).bfloat16()
    outs = [torch.zeros(2, *shape).bfloat16() for shape in ((2, 512), (2, 64), (32,))]
    return (
        half(2, 32, seed=seed), down, descale0, half(32, seed=3), half(32, seed=4), up, descale1, half(512, seed=5), *turns,
        half(2, 16, 512, seed=6), *[torch.zeros_like(cache) for cache in caches], int32(seed, -1),
        *scales, bias0, *scales, bias1, ones, ones,
        "krope_ctkv", "per_tensor_quant_asymm", True, outs[0], caches[0], outs[1], caches[1], outs[2],
    ), {}  # fmt: skip


def quantised_routing(seed: int) -> Call:
    (_, chosen), options = init_routing(seed, active=(1, 3))
    return (half(3, 8, seed=seed), chosen), {**options, "scale": None, "quant_mode": 1}


def quantised_grouped(seed: int) -> Call:
    _, options = grouped(seed)
    scales = {"scale": [half(2, 5, seed=1).abs()], "per_token_scale": [random(6, seed=seed).abs()]}
    return ([int8(6, 8, seed=seed)], [int8(2, 8, 5)]), {**options, **scales, "output_dtype": 15}


def int4(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return int32 numbers that hold eight int4 numbers each."""
    return torch.randint(
        -(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )


def scales_of_int4(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return int64 scales with the bits of a float32 in the lower half."""
    return (random(*shape, seed=seed).abs() / 100 + 0.001).view(torch.int32).long()


def int4_grouped(seed: int) -> Call:
    _, options = grouped(seed)
    scales = {
        "scale": [scales_of_int4(2, 1, 64)],
        "bias": [random(2, 64)],
        "per_token_scale": [random(6, seed=seed).abs()],
    }
    return ([int8(6, 64, seed=seed)], [int4(2, 64, 8)]), {**options, **scales, "output_dtype": 15}


def int4_swiglu(seed: int) -> Call:
    groups = {
        "group_list": torch.tensor([2, 3 + seed]),
        "group_list_type": 1,
        "weight_assist_matrix": [random(2, 64)],
    }
    return (
        int8(6, 64, seed=seed),
        [int4(2, 64, 8)],
        [scales_of_int4(2, 64)],
        random(6, seed=seed).abs() / 9,
    ), groups


def sums_of_int8(seed: int, **options: Any) -> Call:
    scales = {
        "weight_scale": random(64, seed=1).abs() / 1000,
        "activation_scale": random(4, seed=seed).abs(),
    }
    return (int8(4, 64, seed=seed).int() * 300,), {**scales, "quant_mode": 1, **options}


def decode(seed: int) -> Call:
    options = {
        "block_table": int32(1, 0, 2, 0).view(2, 2),
        "context_lens": int32(17, 3),
        "out": torch.zeros(2, 4, 8),
    }
    return (
        random(2, 4, 8, seed=seed),
        random(3, 16, 2, 8),
        random(3, 16, 2, 8, seed=4),
        2,
        4,
        0.3,
    ), options


def store(seed: int) -> Call:
    return (
        random(2, 2, 8, seed=seed),
        random(2, 2, 8, seed=7),
        *[torch.zeros(2, 4, 2, 8) for _ in "kv"],
        int32(seed, -1),
    ), {}


def store_fractal(seed: int) -> Call:
    caches = [torch.zeros(2, 2, 1, 4, 32, dtype=torch.int8) for _ in "kv"]
    return (int8(2, 2, 32, seed=seed), int8(2, 2, 32, seed=7), *caches, int32(seed, -1)), {}


def int8_attention(seed: int) -> Call:
    """Return two sequences with one query each, over a paged int8 cache with blocks of 32."""
    scales = {
        f"{name}_antiquant_scale": half(2, 1, 32, seed=i).abs()
        for i, name in enumerate(("key", "value"))
    }
    return (
        half(2, 4, 1, 32, seed=seed),
        int8(5, 2, 1, 32, 32, seed=seed),
        int8(5, 2, 1, 32, 32, seed=9),
    ), {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.01,
        "input_layout": "BNSD",
        "block_size": 32,
        "inner_precise": 1,
        "block_table": torch.tensor([[1 + seed % 2, 3], [0, 4]], dtype=torch.int32),
        "actual_seq_lengths_kv": [40, 9],
        **scales,
    }


def turn(seed: int, heads: int) -> Call:
    return (
        random(1, 3, 2, 8, seed=seed),
        *[random(1, 3, 2, 8, seed=9)] * (heads - 1),
        random(1, 3, 1, 8),
        random(1, 3, 1, 8, seed=5),
    ), {}


def adapters(seed: int, runs: bool) -> tuple[torch.Tensor, ...]:
    """Return the adapter of each of three rows, or the adapters and lengths of runs of rows."""
    return (
        (torch.tensor([seed % 2, -1]), torch.tensor([2, 1]))
        if runs
        else (torch.tensor([seed % 2, -1, 1]),)
    )


def shrink(seed: int, runs: bool) -> Call:
    return (
        half(3, 32, seed=seed),
        half(2, 8, 32, seed=3),
        *adapters(seed, runs),
        torch.ones(3, 8),
        0.5,
    ), {}


def expand(seed: int, runs: bool) -> Call:
    return (
        random(3, 8, seed=seed),
        half(2, 1, 16, 8, seed=3),
        *adapters(seed, runs),
        half(3, 48, seed=4),
        16,
        16,
    ), {}


# The key is the qualified name of the operator. A note about the call may follow a comma.
CASES: dict[str, Callable[[int], Call]] = {
    "npu::npu_rms_norm": lambda seed: ((random(3, 8, seed=seed), random(8)), {"epsilon": 1e-5}),
    "npu::npu_add_rms_norm": norm,
    "npu::npu_swiglu": lambda seed: ((random(3, 8, seed=seed),), {}),
    "npu::npu_mrope": lambda seed: (
        (
            torch.arange(6).view(3, 2),
            random(2, 256, seed=seed),
            random(2, 128, seed=1),
            random(6, 128, seed=2),
            128,
        ),
        {"mrope_section": [16, 24, 24]},
    ),
    "npu::npu_rotary_mul": lambda seed: turn(seed, 1),
    "npu::npu_apply_rotary_pos_emb": lambda seed: turn(seed, 2),
    "npu::npu_format_cast": lambda seed: ((random(3, 8, seed=seed), 2), {}),
    "npu::npu_format_cast, transposed tensor": lambda seed: (
        (random(4, 4, seed=seed).t(), 29),
        {},
    ),
    "npu::npu_fused_infer_attention_score": attention,
    "npu::npu_fused_infer_attention_score, causal": lambda seed: attention(
        seed, sparse_mode=3, atten_mask=torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    ),
    "npu::npu_fused_infer_attention_score, latent": latent_attention,
    "npu::npu_fused_infer_attention_score, with sums": lambda seed: attention(
        seed, softmax_lse_flag=True
    ),
    "npu::npu_fused_infer_attention_score, over an int8 cache": int8_attention,
    "npu::npu_scatter_pa_kv_cache, in parts of 32 bytes": store_fractal,
    "npu::npu_fused_infer_attention_score.out": lambda seed: attention(seed, out=outputs()),
    "npu::npu_fused_infer_attention_score_v2": attention_v2,
    "npu::npu_fused_infer_attention_score_v2.out": lambda seed: attention_v2(seed, out=outputs()),
    "npu::_npu_fused_infer_attention_score_get_max_workspace": attention,
    "npu::npu_interleave_rope": lambda seed: (
        tuple(half(3, n, 1, 64, seed=seed) for n in (2, 1, 1)),
        {},
    ),
    "npu::npu_kv_rmsnorm_rope_cache": lambda seed: latent_cache(seed, rows=False),
    "npu::npu_kv_rmsnorm_rope_cache, with rows": lambda seed: latent_cache(seed, rows=True),
    "npu::npu_transpose_batchmatmul": lambda seed: (
        (random(2, 3, 128, seed=seed), random(3, 128, 128)),
        {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]},
    ),
    "npu::npu_scatter_nd_update_": lambda seed: (
        (random(6, 4), torch.tensor([[seed], [-1], [5]]), random(3, 4, seed=seed + 1)),
        {},
    ),
    "npu::npu_lightning_indexer": indexer,
    "npu::npu_moe_gating_top_k_softmax": lambda seed: ((random(3, 8, seed=seed),), {"k": 2}),
    "npu::npu_moe_init_routing_v2": init_routing,
    "npu::npu_moe_init_routing_v2, some experts": lambda seed: init_routing(seed, active=(1, 3)),
    "npu::npu_moe_token_permute": lambda seed: (
        (random(3, 4, seed=seed), experts(seed).long()),
        {},
    ),
    "npu::npu_grouped_matmul": grouped,
    "npu::npu_grouped_matmul, quantised": quantised_grouped,
    "npu::npu_grouped_matmul, int4": int4_grouped,
    "npu::npu_quantize": lambda seed: (
        (half(3, 8, seed=seed), half(8, seed=5).abs() * 30, half(8, seed=6), 12, -1, False),
        {},
    ),
    "npu::npu_dynamic_block_quant": lambda seed: ((half(3, 1, 256, seed=seed),), {}),
    "npu::npu_dynamic_quant": lambda seed: ((half(3, 8, seed=seed),), {"dst_type": 1}),
    "npu::npu_quant_matmul": lambda seed: (
        (int8(3, 8, seed=seed), int8(8, 5), random(5).abs()),
        {"bias": int8(5).int() * 9, "output_dtype": 15},
    ),
    "npu::npu_quant_matmul, with row scales": lambda seed: (
        (int8(3, 8, seed=seed), int8(8, 5), half(5, seed=1)),
        {"pertoken_scale": random(3, seed=seed).abs(), "output_dtype": 15},
    ),
    "npu::npu_quant_matmul, int32 sums": lambda seed: (
        (int8(3, 8, seed=seed), int8(8, 5), random(5).abs()),
        {"output_dtype": 3},
    ),
    "npu::npu_moe_token_unpermute": lambda seed: (
        (random(6, 8, seed=seed), int32(*[5, 0, 1, 2, 4, 3][:: 1 - 2 * (seed % 2)])),
        {"probs": random(3, 2).abs()},
    ),
    "npu::npu_top_k_top_p": lambda seed: ((random(3, 8, seed=seed),), {"k": int32(2, 1 + seed, 8)}),
    "npu::npu_top_k_top_p, with p": lambda seed: (
        (random(3, 9, seed=seed),),
        {"k": int32(9, 3, 1), "p": torch.tensor([0.5, 1.0, 0.9])},
    ),
    "atb::_npu_reshape_and_cache": store,
    "atb::_npu_paged_attention": decode,
    "atb::_npu_rotary_embedding": lambda seed: (
        (
            torch.tensor([3, seed]),
            random(2, 16, seed=seed),
            random(2, 8, seed=1),
            8,
            random(4, 8, seed=2),
            True,
        ),
        {},
    ),
    "_C_ascend::npu_lightning_indexer": indexer,
    "_C_ascend::npu_sparse_flash_attention": sparse_attention,
    "_C_ascend::npu_lightning_indexer_quant": int8_indexer,
    INT8_ATTENTION: int8_sparse_attention,
    "_C_ascend::mla_preprocess": preprocessed,
    "_C_ascend::store_kv_block_metadata": lambda seed: (
        (int32(seed, seed + 1, -1), *[int32(9, 9, 9) for _ in range(3)], 16),
        {},
    ),
    "_C_ascend::store_kv_block": lambda seed: (
        (
            int8(3, 1, 8, seed=seed),
            torch.zeros(2, 16, 1, 8, dtype=torch.int8),
            int32(2, 1),
            int32(0, 2),
            int32(4, seed),
            16,
        ),
        {},
    ),
    "_C_ascend::batch_matmul_transpose": lambda seed: (
        (half(3, 2, 16, seed=seed), half(2, 16, 8, seed=1), torch.zeros(3, 2, 8).bfloat16()),
        {},
    ),
    "_C_ascend::npu_add_rms_norm_bias": norm,
    "_C_ascend::npu_add_rms_norm_bias, without beta": lambda seed: norm(seed, None, 1e-6),
    "_C_ascend::npu_moe_init_routing_custom": init_routing,
    "_C_ascend::npu_moe_init_routing_custom, quantised": quantised_routing,
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz": lambda seed: (
        (
            int8(6, 8, seed=seed),
            int8(2, 8, 6),
            random(2, 6).abs(),
            random(6, seed=seed).abs(),
            torch.tensor([2, 4 + seed]),
        ),
        {},
    ),
    "_C_ascend::grouped_matmul_swiglu_quant_v2": int4_swiglu,
    "_C_ascend::npu_dequant_swiglu_quant": lambda seed: sums_of_int8(seed, swiglu_mode=1),
    "_C_ascend::npu_dequant_swiglu_quant, one group": lambda seed: sums_of_int8(
        seed, group_index=torch.tensor([2 + seed])
    ),
    **{
        f"_C_ascend::{name}_shrink": partial(shrink, runs=name == "sgmv")
        for name in ("bgmv", "sgmv")
    },
    **{
        f"_C_ascend::{name}_expand": partial(expand, runs=name == "sgmv")
        for name in ("bgmv", "sgmv")
    },
    "_C_ascend::moe_gating_top_k": lambda seed: (
        (random(3, 8, seed=seed), 2, 1, 1, 1, 1, 1, False, 1.0, 1e-20),
        {"bias_opt": random(8, seed=1)},
    ),
}


def split(qualified: str) -> tuple[str, str]:
    """Return the namespace and the name. The name may end with an overload."""
    namespace, _, name = qualified.partition(",")[0].partition("::")
    return namespace, name


def operator(qualified: str) -> Any:
    namespace, name = split(qualified)
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def reference(qualified: str) -> Callable[..., Any]:
    namespace, name = split(qualified)
    return REFERENCES[namespace][name]


def arguments(qualified: str, seed: int, device: str) -> Call:
    """Return the arguments of a case on `device`. Arguments in HOST stay on the host."""
    args, kwargs = CASES[qualified](seed)
    move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
    return tree_map(move, args), {
        name: value if name in HOST else tree_map(move, value) for name, value in kwargs.items()
    }


def tensors(*trees: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def on_host(*trees: object) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors(*trees)]


def layout(*trees: object) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors(*trees)]
