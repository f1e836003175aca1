"""The operators on the emulated device: called as vllm-ascend calls them, in both modes, on the default and on a side stream."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from vllm_ascend_hsx.emulator.ops.registration import REFERENCES
from vllm_ascend_hsx.emulator.ops.triton_kernels import make_triton
from vllm_ascend_hsx.emulator.ops.triton_language import tl

triton = make_triton()
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gathered(**options: Any) -> dict[str, Any]:
    return {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1, **options}


# Operator, positional arguments, keyword arguments; the reference itself, on the host, says what must come out.
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "npu_rms_norm": ("npu", (random(3, 8), random(8, seed=1)), {"epsilon": 1e-5}),
    "npu_add_rms_norm": ("npu", (random(3, 8), random(3, 8, seed=1), random(8, seed=2)), {}),
    "npu_swiglu": ("npu", (random(3, 8),), {}),
    "npu_rotary_mul": ("npu", (random(1, 3, 2, 8), random(1, 3, 1, 8, seed=1), random(1, 3, 1, 8, seed=2)), {}),
    "npu_format_cast": ("npu", (random(4, 4).t(), 29), {}),
    "npu_top_k_top_p": ("npu", (random(3, 9),), {"k": int32(9, 3, 1), "p": torch.tensor([0.5, 1.0, 0.9])}),
    "npu_fused_infer_attention_score": (
        "npu",
        (random(5, 4, 8), random(6, 16, 16, seed=1), random(6, 16, 16, seed=2)),
        {"atten_mask": MASK, "actual_seq_lengths": [1, 5], "actual_seq_lengths_kv": [9, 20], "num_heads": 4, "scale": 0.5,
         "num_key_value_heads": 2, "input_layout": "TND", "sparse_mode": 3, "block_size": 16,
         "block_table": torch.tensor([[3, 0], [5, 1]], dtype=torch.int32)},
    ),
    "npu_moe_gating_top_k_softmax": ("npu", (random(3, 8),), {"k": 2}),
    "npu_moe_token_permute": ("npu", (random(3, 4), torch.tensor([[2, 0], [1, 0], [3, 1]])), {}),
    "npu_moe_token_unpermute": ("npu", (random(4, 3), int32(2, 0, 3, 1), random(2, 2, seed=1)), {}),
    "npu_grouped_matmul": (
        "npu", ([random(4, 3)], [random(2, 3, 5, seed=1)]),
        {"group_list": torch.tensor([1, 3]), "split_item": 2, "group_type": 0, "group_list_type": 1},
    ),
    "npu_moe_init_routing_v2": ("npu", (random(3, 4), int32(0, 2, 1, 3, 3, 0).view(3, 2)), gathered(active_expert_range=[1, 3])),
    "moe_gating_top_k": ("_C_ascend", (random(3, 8), 2, 1, 1, 1, 1, 1, False, 1.0, 1e-20), {"bias_opt": random(8, seed=1)}),
    "npu_moe_init_routing_custom": ("_C_ascend", (random(3, 4), int32(0, 2, 1, 3, 3, 0).view(3, 2)), gathered()),
    "npu_add_rms_norm_bias": ("_C_ascend", (random(3, 8), random(3, 8, seed=1), random(8, seed=2), None, 1e-6), {}),
}


def moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(moved(item, move) for item in value)
    return value


def to_npu(value: Any) -> Any:
    # A transposed tensor stays transposed: some operators look at strides.
    return moved(value, lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="npu").copy_(tensor))


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.device.type == "npu"
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual.cpu(), expected)
    else:
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_gives_on_the_device_what_its_reference_gives(name: str, side_stream: bool, any_mode: None) -> None:
    namespace, positional, named = CALLS[name]
    expected = REFERENCES[namespace][name](*positional, **named)
    operator = getattr(torch_npu if namespace == "npu" else torch.ops._C_ascend, name)
    arguments = [to_npu(value) for value in positional]
    options = {key: to_npu(value) for key, value in named.items()}
    stream = torch.npu.Stream() if side_stream else torch.npu.current_stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        actual = operator(*arguments, **options)
    torch.npu.current_stream().wait_stream(stream)
    assert_same(actual, expected)


def test_operators_that_write_in_place_write_the_callers_tensor(any_mode: None) -> None:
    query, key, cache = random(2, 16).npu(), random(2, 8, seed=1).npu(), random(4, 8, seed=2)
    expected = (query.cpu(), key.cpu())
    REFERENCES["atb"]["_npu_rotary_embedding"](torch.tensor([3, 1]), *expected, 8, cache, True)
    torch_npu._npu_rotary_embedding(torch.tensor([3, 1]).npu(), query, key, 8, cache.npu(), True)
    assert_same((query, key), expected)
    pages = [torch.zeros(2, 16, 1, 4, device="npu") for _ in range(2)]
    rows = random(2, 1, 4).npu()
    torch_npu._npu_reshape_and_cache(key=rows, value=rows, key_cache=pages[0], value_cache=pages[1], slot_indices=int32(17, -1).npu())
    for page in pages:
        assert torch.equal(page[1, 1].cpu(), rows[0].cpu())
        assert page.count_nonzero() == 4


def test_an_operator_without_a_reference_raises_with_its_name() -> None:
    x = torch.ones(2, 4, device="npu")
    with pytest.raises(NotImplementedError, match="npu::npu_dynamic_quant has no reference"):
        torch_npu.npu_dynamic_quant(x)
    with pytest.raises(NotImplementedError, match="_C_ascend::npu_sign_bits_pack has no reference"):
        torch.ops._C_ascend.npu_sign_bits_pack(x, 1)
    with pytest.raises(NotImplementedError, match="npu_no_such_function"):
        torch_npu.npu_no_such_function(x)


def test_a_wrong_argument_is_an_error_on_the_device_too() -> None:
    with pytest.raises(ValueError, match="_npu_reshape_and_cache: slot_indices: dtype torch.int64"):
        page, row = torch.zeros(2, 16, 1, 4, device="npu"), torch.zeros(1, 1, 4, device="npu")
        torch_npu._npu_reshape_and_cache(row, row, page, page, torch.zeros(1, dtype=torch.int64, device="npu"))


@triton.jit
def scale_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < count) * 3, mask=offsets < count)


def test_a_triton_kernel_runs_on_device_memory_in_the_order_of_its_stream(any_mode: None) -> None:
    out, stream = torch.zeros(10, device="npu"), torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x = torch.ones(10, device="npu")
        x.add_(1)
        scale_kernel[(3,)](x, out, 10, BLOCK=4)
        out.add_(1)
    torch.npu.current_stream().wait_stream(stream)
    assert out.tolist() == [7.0] * 10


def test_a_triton_kernel_that_does_not_wait_for_its_output_buffer_is_a_race(late: None) -> None:
    out = torch.zeros(4, device="npu")
    with torch.npu.stream(torch.npu.Stream()):
        x = torch.ones(4, device="npu")
        with pytest.raises(RuntimeError, match="NPU stream race"):
            scale_kernel[(1,)](x, out, 4, BLOCK=4)
