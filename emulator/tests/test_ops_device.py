"""Operators and Triton kernels on the device, called directly and captured in graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from emulated import NPU, RACE, capture, full, replay_aside, scenarios, side_stream
from operator_cases import CASES, arguments, layout, on_host, operator, reference, tensors

from ascend_npu_emulator.ops.recording import recordable
from ascend_npu_emulator.ops.registration import COMPOSITES
from ascend_npu_emulator.ops.shapes import SHAPES
from ascend_npu_emulator.ops.triton.kernels import make_triton
from ascend_npu_emulator.ops.triton.language import tl

triton = make_triton()
SCORE_OUT = "npu::npu_fused_infer_attention_score.out"


def test_every_shape_function_has_a_case() -> None:
    assert SHAPES.keys() - COMPOSITES <= CASES.keys()  # composites need other ranks


@pytest.mark.usefixtures("any_mode")
@pytest.mark.parametrize("qualified", CASES)
def test_operator_equals_its_reference_on_each_stream(
    qualified: str,
) -> None:
    args, kwargs = arguments(qualified, 1, "cpu")
    expected = reference(qualified)(*args, **kwargs)
    here, there = arguments(qualified, 1, "npu"), arguments(qualified, 1, "npu")
    results = [operator(qualified)(*here[0], **here[1])]
    with side_stream() as stream:
        results.append(operator(qualified)(*there[0], **there[1]))
    torch.npu.current_stream().wait_stream(stream)
    for result, given in zip(results, (here, there), strict=True):
        assert layout(result) == layout(expected)
        assert {tensor.device for tensor in tensors(result)} <= {NPU}
        torch.testing.assert_close(
            on_host(result, given), on_host(expected, args, kwargs), equal_nan=True
        )


@pytest.mark.usefixtures("any_mode")
@pytest.mark.parametrize("qualified", CASES)
def test_replay_equals_a_direct_call(qualified: str) -> None:
    call, given = operator(qualified), arguments(qualified, 0, "npu")
    untouched = on_host(given)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = call(*given[0], **given[1])
    assert all(
        torch.equal(now, before) for now, before in zip(on_host(given), untouched, strict=True)
    )
    for seed in (0, 1):
        fresh = arguments(qualified, seed, "npu")
        for held, new in zip(tensors(given), tensors(fresh), strict=True):
            if held.device == NPU:
                held.copy_(new)
        graph.replay()
        expected = call(*fresh[0], **fresh[1])
        torch.testing.assert_close(
            on_host(results, given), on_host(expected, fresh), rtol=0, atol=0
        )


@pytest.mark.parametrize("qualified", CASES)
def test_meta_kernel_has_the_shapes_of_the_reference(qualified: str) -> None:
    args, kwargs = arguments(qualified, 1, "cpu")
    meta_args, meta_kwargs = arguments(qualified, 1, "meta")
    assert layout(operator(qualified)(*meta_args, **meta_kwargs)) == layout(
        reference(qualified)(*args, **kwargs)
    )


NO_REFERENCE: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "torch_npu": (
        lambda x: torch_npu.npu_clipped_swiglu(x),
        "npu::npu_clipped_swiglu has no reference",
    ),
    "vllm-ascend": (
        lambda x: torch.ops._C_ascend.npu_sign_bits_pack(x, 1),
        "_C_ascend::npu_sign_bits_pack has no reference",
    ),
    "unknown name": (lambda x: torch_npu.npu_no_such_function(x), "npu_no_such_function"),
}


@scenarios("call, message", NO_REFERENCE)
def test_operator_without_a_reference_is_named_in_the_error(
    call: Callable[[torch.Tensor], object], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call(full(1.0, 2, 4))


def test_device_call_rejects_a_wrong_dtype() -> None:
    page, row = full(0.0, 2, 16, 1, 4), full(0.0, 1, 1, 4)
    with pytest.raises(ValueError, match="_npu_reshape_and_cache: slot_indices: dtype torch.int64"):
        torch_npu._npu_reshape_and_cache(
            row, row, page, page, torch.zeros(1, dtype=torch.int64, device="npu")
        )


# ---- graphs ----


def test_captured_out_operator_returns_the_given_tensors() -> None:
    args, kwargs = arguments(SCORE_OUT, 0, "npu")
    with torch.npu.graph(torch.npu.NPUGraph()):
        results = operator(SCORE_OUT)(*args, **kwargs)
    assert [result.data_ptr() for result in results] == [
        given.data_ptr() for given in kwargs["out"]
    ]


def test_capture_reads_numbers_and_host_tensors_once() -> None:
    fused, paged = arguments(SCORE_OUT, 0, "npu"), arguments("atb::_npu_paged_attention", 0, "npu")
    outputs = fused[1]["out"][0], paged[1]["out"]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        operator(SCORE_OUT)(*fused[0], **fused[1])
        torch.ops.atb._npu_paged_attention(*paged[0], **paged[1])
    graph.replay()
    before = on_host(outputs)
    fused[1]["actual_seq_lengths_kv"][0], paged[1]["context_lens"][0] = 2, 2
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(on_host(outputs), before, strict=True))


@pytest.mark.usefixtures("late")
def test_race_detector_tracks_reads_and_writes_of_a_reference() -> None:
    args, kwargs = arguments(SCORE_OUT, 0, "npu")
    stream = replay_aside(capture(lambda: operator(SCORE_OUT)(*args, **kwargs)))
    args[1].sum()  # the graph only reads the keys
    for touch in (lambda: kwargs["out"][0] + 1, lambda: args[1].zero_()):
        with pytest.raises(RuntimeError, match=f"{RACE}: .*{SCORE_OUT} on stream"):
            touch()
    stream.synchronize()


def reads_values(x: torch.Tensor) -> torch.Tensor:
    return x[: int(x[0])]


SCHEMA = "reads_values(Tensor x) -> Tensor"


def test_operator_with_unknown_shapes_cannot_be_captured() -> None:
    call = recordable("test::reads_values", SCHEMA, reads_values, reads_values)
    x = full(2.0)
    assert call(x).tolist() == [2, 2]
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(NotImplementedError, match="test::reads_values cannot be captured"),
    ):
        call(x)


def test_replay_reports_a_wrong_result_shape() -> None:
    call, x = (
        recordable("test::reads_values", SCHEMA, reads_values, lambda x: x.new_empty(3)),
        full(2.0),
    )
    graph = capture(lambda: call(x))
    with pytest.raises(
        RuntimeError,
        match=r"result 0 of the replay is torch.float32 \(2,\), but torch.float32 \(3,\) in",
    ):
        graph.replay()


@pytest.mark.usefixtures("late")
def test_synchronize_raises_the_error_of_an_invalid_replay() -> None:
    args, kwargs = arguments("npu::npu_grouped_matmul", 0, "npu")
    graph = capture(lambda: torch.ops.npu.npu_grouped_matmul(*args, **kwargs))
    kwargs["group_list"].fill_(9)
    stream = replay_aside(graph)
    with pytest.raises(
        (ValueError, RuntimeError),
        match="npu_grouped_matmul: group_list: 18 rows exceed the 6 of x",
    ):
        stream.synchronize()
    stream.synchronize()


# ---- Triton ----


@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x * tl.load(factor_ptr) * factor, mask=mask)


def launch(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    scale_kernel[(2,)](x, factor, out, 6, 10, BLOCK=4)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(6.0).to(NPU), full(2.0, 1), full(0.0, 6)


@pytest.mark.usefixtures("any_mode")
def test_triton_kernel_runs_in_stream_order() -> None:
    x, factor, out = operands()
    with side_stream() as stream:
        x.add_(1)
        launch(x, factor, out)
        out.add_(1)
    torch.npu.current_stream().wait_stream(stream)
    assert out.tolist() == [20 * (i + 1) + 1 for i in range(6)]


@pytest.mark.usefixtures("late")
def test_triton_launch_without_a_wait_is_a_race() -> None:
    out = full(0.0, 6)
    with torch.npu.stream(torch.npu.Stream()), pytest.raises(RuntimeError, match=RACE):
        launch(*operands()[:2], out)


@pytest.mark.usefixtures("any_mode")
def test_triton_kernel_is_captured_and_replayed() -> None:
    x, factor, out = operands()
    graph = capture(lambda: launch(x, factor, out))
    assert out.tolist() == [0] * 6
    for value in (2, 3):
        factor.fill_(value)
        graph.replay()
        assert out.tolist() == [10 * value * i for i in range(6)]


def test_torch_compile_rejects_a_triton_launch() -> None:
    compiled = torch.compile(launch, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"scale_kernel in torch.compile is not implemented"
    ):
        compiled(*operands())


@pytest.mark.usefixtures("late")
def test_race_detector_tracks_writes_of_a_triton_kernel_after_the_first_run() -> None:
    x, factor, out = operands()
    graph = capture(lambda: launch(x, factor, out))
    graph.replay()
    stream = replay_aside(graph)
    x.sum()
    with pytest.raises(RuntimeError, match=rf"{RACE}: .*scale_kernel on stream"):
        out.sum()
    stream.synchronize()
