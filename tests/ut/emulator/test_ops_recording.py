"""References and Triton kernels in graphs: captured without being run, replayed on what their inputs hold by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from vllm_ascend_hsx.emulator.ops.recording import recordable
from vllm_ascend_hsx.emulator.ops.registration import REFERENCES
from vllm_ascend_hsx.emulator.ops.shapes import SHAPES
from vllm_ascend_hsx.emulator.ops.triton_kernels import make_triton
from vllm_ascend_hsx.emulator.ops.triton_language import tl

NPU = torch.device("npu:0")
triton = make_triton()
Call = tuple[tuple[Any, ...], dict[str, Any]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(seed: int) -> torch.Tensor:
    return torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(10 * seed + row))[:2] for row in range(3)]).int()


def attention(seed: int, **names: str) -> Call:
    """Two sequences of one query over a paged cache of blocks of 16."""
    lengths = names.get("lengths", "actual_seq_lengths")
    return (random(2, 4, 16, seed=seed), random(5, 16, 32, seed=seed + 1), random(5, 16, 32, seed=seed + 2)), {
        names.get("heads", "num_heads"): 4,
        names.get("kv_heads", "num_key_value_heads"): 2,
        names.get("scale", "scale"): 0.25,
        "input_layout": "TND",
        "block_size": 16,
        "block_table": torch.tensor([[1 + seed % 2, 3], [0, 4]], dtype=torch.int32),
        names.get("q", lengths): [1, 2],
        names.get("kv", f"{lengths}_kv"): [18, 9],
    }


def latent_attention(seed: int) -> Call:
    """Two queries of 8 heads against a shared latent, and the output with the heads first."""
    shapes = ((2, 8, 512), (2, 8, 64), (3, 1, 16, 512), (3, 1, 16, 64))
    query, rope, keys, key_rope = (random(*shape, seed=seed + i).bfloat16() for i, shape in enumerate(shapes))
    return (query, keys, keys.clone()), {
        "query_rope": rope,
        "key_rope": key_rope,
        "num_heads": 8,
        "num_key_value_heads": 1,
        "scale": 0.1,
        "input_layout": "TND_NTD",
        "sparse_mode": 0,
        "block_size": 16,
        "block_table": torch.tensor([[1, 0], [2, 0]], dtype=torch.int32),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [18, 9],
    }


def latent_cache(seed: int, rows: bool) -> Call:
    shapes = ((3, 1, 1, 576), (512,), (3, 1, 1, 64), (3, 1, 1, 64))
    kv, gamma, cos, sin = (random(*shape, seed=seed + i).bfloat16() for i, shape in enumerate(shapes))
    caches = [torch.zeros(2, 4, 1, width).bfloat16() for width in (64, 512)]
    return (kv, gamma, cos, sin, torch.tensor([seed, -1, 6]), *caches), {"cache_mode": "PA", "is_output_kv": rows}


V2 = {"heads": "num_query_heads", "scale": "softmax_scale", "q": "actual_seq_qlen", "kv": "actual_seq_kvlen"}


def attention_out(seed: int, **names: str) -> Call:
    args, kwargs = attention(seed, **names)
    return args, kwargs | {"out": [torch.zeros(2, 4, 16), torch.zeros(1)]}


def init_routing(seed: int) -> Call:
    return (random(3, 8, seed=seed), experts(seed)), {
        "scale": random(3, seed=seed),
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [0, 4],
    }


# Arguments by operator (", " and what is special about them), as a function of a seed; tensors are on the CPU here. Those that are
# to stay there: HOST.
CASES: dict[str, Callable[[int], Call]] = {
    "npu::npu_rms_norm": lambda seed: ((random(3, 8, seed=seed), random(8)), {}),
    "npu::npu_swiglu": lambda seed: ((random(3, 8, seed=seed),), {}),
    "npu::npu_rotary_mul": lambda seed: ((random(1, 3, 2, 8, seed=seed), random(1, 3, 1, 8), random(1, 3, 1, 8, seed=5)), {}),
    "npu::npu_apply_rotary_pos_emb": lambda seed: (
        (random(1, 3, 2, 8, seed=seed), random(1, 3, 2, 8, seed=9), random(1, 3, 1, 8), random(1, 3, 1, 8, seed=5)),
        {},
    ),
    "npu::npu_format_cast": lambda seed: ((random(3, 8, seed=seed), 2), {}),
    "npu::npu_fused_infer_attention_score": lambda seed: attention(seed),
    "npu::npu_fused_infer_attention_score, latent": latent_attention,
    "npu::npu_fused_infer_attention_score, with sums": lambda seed: (attention(seed)[0], attention(seed)[1] | {"softmax_lse_flag": True}),
    "npu::npu_fused_infer_attention_score.out": lambda seed: attention_out(seed),
    "npu::npu_fused_infer_attention_score_v2": lambda seed: attention(seed, **V2),
    "npu::npu_fused_infer_attention_score_v2.out": lambda seed: attention_out(seed, **V2),
    "npu::_npu_fused_infer_attention_score_get_max_workspace": lambda seed: attention(seed),
    "npu::npu_interleave_rope": lambda seed: ([random(3, n, 1, 64, seed=seed).bfloat16() for n in (2, 1, 1)], {}),
    "npu::npu_kv_rmsnorm_rope_cache": lambda seed: latent_cache(seed, rows=False),
    "npu::npu_kv_rmsnorm_rope_cache, with rows": lambda seed: latent_cache(seed, rows=True),
    "npu::npu_transpose_batchmatmul": lambda seed: (
        (random(2, 3, 128, seed=seed), random(3, 128, 128)), {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}
    ),
    "npu::npu_moe_gating_top_k_softmax": lambda seed: ((random(3, 8, seed=seed),), {"k": 2}),
    "npu::npu_moe_init_routing_v2": init_routing,
    "npu::npu_grouped_matmul": lambda seed: (
        ([random(6, 8, seed=seed)], [random(2, 8, 5)]),
        {"group_list": torch.tensor([2 + seed, 4 - seed]), "split_item": 2, "group_type": 0, "group_list_type": 1},
    ),
    "npu::npu_moe_token_unpermute": lambda seed: (
        (random(6, 8, seed=seed), torch.tensor([5, 0, 1, 2, 4, 3][:: 1 - 2 * (seed % 2)], dtype=torch.int32)),
        {"probs": random(3, 2).abs()},
    ),
    "npu::npu_top_k_top_p": lambda seed: ((random(3, 8, seed=seed),), {"k": torch.tensor([2, 1 + seed, 8], dtype=torch.int32)}),
    "atb::_npu_reshape_and_cache": lambda seed: (
        (random(2, 2, 8, seed=seed), random(2, 2, 8, seed=7), *[torch.zeros(2, 4, 2, 8) for _ in "kv"], torch.tensor([seed, -1]).int()),
        {},
    ),
    "atb::_npu_paged_attention": lambda seed: (
        (random(2, 4, 8, seed=seed), random(3, 16, 2, 8), random(3, 16, 2, 8, seed=4), 2, 4, 0.3),
        {
            "block_table": torch.tensor([[1, 0], [2, 0]], dtype=torch.int32),
            "context_lens": torch.tensor([17, 3], dtype=torch.int32),
            "out": torch.zeros(2, 4, 8),
        },
    ),
    "_C_ascend::npu_add_rms_norm_bias": lambda seed: ((random(3, 8, seed=seed), random(3, 8, seed=8), random(8)), {}),
    "_C_ascend::npu_moe_init_routing_custom": init_routing,
}
HOST = frozenset({"context_lens"})


def operator(qualified: str) -> Any:
    namespace, _, name = qualified.partition(",")[0].partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def put(call: Call, device: str) -> Call:
    args, kwargs = call
    move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
    return tree_map(move, args), {name: value if name in HOST else tree_map(move, value) for name, value in kwargs.items()}


def tensors(*trees: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def on_host(*trees: object) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors(*trees)]


def test_every_operator_whose_shapes_are_given_has_a_case() -> None:
    assert SHAPES.keys() <= CASES.keys()


@pytest.mark.usefixtures("any_mode")
@pytest.mark.parametrize("qualified", CASES)
def test_a_replay_computes_what_the_call_would(qualified: str) -> None:
    call = operator(qualified)
    arguments = put(CASES[qualified](0), "npu")
    untouched = on_host(arguments)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = call(*arguments[0], **arguments[1])
    assert all(torch.equal(now, before) for now, before in zip(on_host(arguments), untouched, strict=True))
    for seed in (0, 1):
        fresh = put(CASES[qualified](seed), "npu")
        for held, new in zip(tensors(arguments), tensors(fresh), strict=True):
            if held.device.type == "npu":
                held.copy_(new)
        graph.replay()
        expected = call(*fresh[0], **fresh[1])
        torch.testing.assert_close(on_host(results, arguments), on_host(expected, fresh), rtol=0, atol=0)


@pytest.mark.parametrize("qualified", CASES)
def test_the_meta_kernel_has_the_shapes_of_the_reference(qualified: str) -> None:
    namespace, _, name = qualified.partition(",")[0].partition("::")
    args, kwargs = CASES[qualified](1)
    expected = REFERENCES[namespace][name](*args, **kwargs)
    meta_args, meta_kwargs = put(CASES[qualified](1), "meta")
    found = operator(qualified)(*meta_args, **meta_kwargs)
    describe = lambda tree: [(t.shape, t.stride(), t.dtype) for t in tensors(tree)]  # noqa: E731
    assert describe(found) == describe(expected)


def test_arguments_that_are_results_stay_themselves() -> None:
    args, kwargs = put(CASES["npu::npu_fused_infer_attention_score.out"](0), "npu")
    with torch.npu.graph(torch.npu.NPUGraph()):
        out, lse = torch.ops.npu.npu_fused_infer_attention_score.out(*args, **kwargs)
    assert out.data_ptr() == kwargs["out"][0].data_ptr()
    assert lse.data_ptr() == kwargs["out"][1].data_ptr()


def test_numbers_and_host_tensors_are_taken_as_they_are_at_the_capture() -> None:
    lengths, context = [18, 9], torch.tensor([17, 3], dtype=torch.int32)
    fused, paged = put(CASES["npu::npu_fused_infer_attention_score.out"](0), "npu"), put(CASES["atb::_npu_paged_attention"](0), "npu")
    fused[1]["actual_seq_lengths_kv"], paged[1]["context_lens"] = lengths, context
    outputs = fused[1]["out"][0], paged[1]["out"]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.ops.npu.npu_fused_infer_attention_score.out(*fused[0], **fused[1])
        torch.ops.atb._npu_paged_attention(*paged[0], **paged[1])
    graph.replay()
    before = on_host(outputs)
    lengths[0], context[0] = 2, 2
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(on_host(outputs), before, strict=True))


@pytest.mark.usefixtures("late")
def test_the_race_detector_knows_what_a_reference_reads_and_writes() -> None:
    args, kwargs = put(CASES["npu::npu_fused_infer_attention_score.out"](0), "npu")
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        torch.ops.npu.npu_fused_infer_attention_score.out(*args, **kwargs)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        graph.replay()
    args[1].sum()  # the keys are only read
    for touch in (lambda: kwargs["out"][0] + 1, lambda: args[1].zero_()):
        with pytest.raises(RuntimeError, match="NPU stream race: .*npu::npu_fused_infer_attention_score.out on stream"):
            touch()
    stream.synchronize()


def reads_values(x: torch.Tensor) -> torch.Tensor:
    return x[: int(x[0])]


SCHEMA = "reads_values(Tensor x) -> Tensor"


def test_an_operator_whose_shapes_are_unknown_cannot_be_captured() -> None:
    call = recordable("test::reads_values", SCHEMA, reads_values, reads_values)
    x = torch.full((4,), 2.0, device=NPU)
    assert call(x).tolist() == [2, 2]
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(NotImplementedError, match="test::reads_values cannot be captured"):
        call(x)


def test_a_wrong_shape_is_an_error_at_the_replay() -> None:
    call = recordable("test::reads_values", SCHEMA, reads_values, lambda x: x.new_empty(3))
    x, graph = torch.full((4,), 2.0, device=NPU), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        call(x)
    with pytest.raises(RuntimeError, match=r"result 0 is torch.float32 \(2,\), the capture took it for torch.float32 \(3,\)"):
        graph.replay()


@pytest.mark.usefixtures("late")
def test_a_reference_that_refuses_its_arguments_says_so_where_the_host_waits() -> None:
    (x, weights), kwargs = put(CASES["npu::npu_grouped_matmul"](0), "npu")
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        torch.ops.npu.npu_grouped_matmul(x, weights, **kwargs)
    kwargs["group_list"].fill_(9)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        graph.replay()
    with pytest.raises((ValueError, RuntimeError), match="npu_grouped_matmul: group_list: 18 rows are more than the 6 of x"):
        stream.synchronize()
    stream.synchronize()


# ---- Triton ----


@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x * tl.load(factor_ptr) * factor, mask=mask)


@pytest.mark.usefixtures("any_mode")
def test_a_triton_kernel_is_captured_and_replayed() -> None:
    x, factor, out = torch.arange(6.0).to(NPU), torch.tensor([2.0]).to(NPU), torch.zeros(6, device=NPU)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        scale_kernel[(2,)](x, factor, out, 6, 10, BLOCK=4)
    assert out.tolist() == [0] * 6
    for value in (2, 3):
        factor.fill_(value)
        graph.replay()
        assert out.tolist() == [10 * value * i for i in range(6)]


def test_a_launch_that_torch_compile_would_have_to_trace_is_refused() -> None:
    x, factor, out = torch.arange(6.0).to(NPU), torch.tensor([2.0]).to(NPU), torch.zeros(6, device=NPU)

    @torch.compile(backend="eager", fullgraph=True)
    def launch() -> None:
        scale_kernel[(2,)](x, factor, out, 6, 10, BLOCK=4)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"scale_kernel in torch.compile is not implemented"):
        launch()


@pytest.mark.usefixtures("late")
def test_the_race_detector_learns_what_a_triton_kernel_writes_from_its_first_run() -> None:
    x, factor, out = torch.arange(6.0).to(NPU), torch.tensor([2.0]).to(NPU), torch.zeros(6, device=NPU)
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        scale_kernel[(2,)](x, factor, out, 6, 10, BLOCK=4)
    graph.replay()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        graph.replay()
    x.sum()
    with pytest.raises(RuntimeError, match=r"NPU stream race: .*scale_kernel on stream"):
        out.sum()
    stream.synchronize()
