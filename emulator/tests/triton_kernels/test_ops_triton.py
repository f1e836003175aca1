"""The emulated Triton runs kernels from source, and the references equal the sources."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated import close, int32, random, scenarios
from releases import installed_is

from ascend_npu_emulator.ops import patch_hooks
from ascend_npu_emulator.ops.poison import POISON
from ascend_npu_emulator.ops.triton.kernels import REFERENCES, Kernel, make_triton
from ascend_npu_emulator.ops.triton.language import tl

triton = make_triton()


# ---- the language ----


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(
        out_ptr + offsets,
        tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask),
        mask=mask,
    )


@triton.jit
def histogram_kernel(values_ptr, counts_ptr, count, BLOCK: tl.constexpr):
    for start in tl.range(tl.program_id(axis=0) * BLOCK, count, tl.num_programs(axis=0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        tl.atomic_add(counts_ptr + tl.load(values_ptr + offsets, mask=mask, other=0), 1, mask=mask)


@triton.jit
def running_best_kernel(x_ptr, value_ptr, place_ptr, columns, BLOCK: tl.constexpr = 4):
    row = tl.program_id(0).to(tl.int64)
    best, where = tl.full((), -float("inf"), tl.float32), tl.full((), -1, tl.int64)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
        found = tl.argmax(x, axis=0)
        value = tl.get_element(x, (found,))
        if value > best:
            best, where = value, start + found
    tl.store(value_ptr + row, best)
    tl.store(place_ptr + row, where)


@triton.jit
def double_kernel(x_ptr, place):
    tl.store(x_ptr + place, tl.load(x_ptr + place) * 2)


@triton.jit
def caller_kernel(x_ptr):
    double_kernel(x_ptr, tl.program_id(1))


def test_masked_programs_write_exactly_the_elements() -> None:
    x, y, out = random(10), random(10, seed=1), torch.full((12,), -1.0)
    add_kernel[(3,)](
        x, y, out, 10, BLOCK=4, num_warps=4, multibuffer=False
    )  # launch options are not arguments
    assert torch.equal(out[:10], x + y)
    assert out[10:].tolist() == [-1, -1]


def test_pointer_starts_at_the_first_element_of_its_tensor() -> None:
    x, out = random(10), torch.zeros(4)
    add_kernel[(1,)](x[3:7], x[5:9], out, 4, BLOCK=4)
    assert torch.equal(out, x[3:7] + x[5:9])


def test_grid_stride_loops_and_atomic_adds_count_every_element_once() -> None:
    values, counts = torch.tensor([1, 3, 1, 0, 1, 3, 2]), torch.zeros(4, dtype=torch.int32)
    histogram_kernel[(2,)](values, counts, 7, BLOCK=2)
    assert counts.tolist() == [1, 3, 1, 2]


def test_kernel_branches_on_loaded_values_and_has_a_default_constexpr() -> None:
    x = random(3, 10)
    values, places = torch.empty(3), torch.empty(3, dtype=torch.int64)
    running_best_kernel[(3,)](x, values, places, 10)
    assert torch.equal(values, x.max(1).values)
    assert torch.equal(places, x.argmax(1))


def test_kernel_calls_another_kernel_on_a_grid_of_two_axes() -> None:
    x = torch.ones(3)
    caller_kernel[(2, 3)](x)
    assert x.tolist() == [4, 4, 4]


def launch(grid: tuple[int, ...], *more: Any, out: int = 4, **options: Any) -> Callable[[], object]:
    return lambda: add_kernel[grid](random(8), random(8), torch.zeros(out), *more, **options)


BAD_LAUNCHES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a write outside the tensor": (
        launch((2,), 8, BLOCK=4),
        IndexError,
        r"add_kernel, program \(1, 0, 0\): writes out_ptr at \[4, 5, 6, 7\], .* 4 elements",
    ),
    "a name that the language lacks": (
        lambda: triton.jit(lambda x_ptr: tl.dot_scaled(x_ptr))[(1,)](torch.zeros(1)),
        NotImplementedError,
        r"tl\.dot_scaled",
    ),
    "an unknown argument": (launch((1,), 4, BLOCK=4, WIDTH=1), TypeError, "WIDTH"),
    "a missing argument": (launch((1,), 4), TypeError, "BLOCK"),
    "a call instead of a launch": (
        lambda: add_kernel(random(4), random(4), torch.zeros(4), 4, 4),
        RuntimeError,
        "must be launched",
    ),
    "more programs than the device launches at once": (
        lambda: double_kernel[(65536,)](torch.zeros(1), 0),
        ValueError,
        "65535",
    ),
}


@scenarios("call, error, message", BAD_LAUNCHES)
def test_invalid_launch_names_the_kernel(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_read_just_past_a_tensor_gives_poison_and_a_far_read_is_an_error() -> None:
    out = torch.zeros(8)
    add_kernel[(2,)](random(4), torch.zeros(8), out, 8, BLOCK=4)
    assert torch.equal(out[:4], random(4))
    assert (out[4:] == POISON).all()
    with pytest.raises(IndexError, match=r"reads x_ptr at \[132, "):
        add_kernel[(34,)](random(4), torch.zeros(136), torch.zeros(136), 136, BLOCK=4)


def test_autotuning_takes_the_first_configuration_and_heuristics_are_computed() -> None:
    tuned = triton.autotune(
        configs=[triton.Config({"BLOCK": 2}), triton.Config({"BLOCK": 8})], key=["count"]
    )(Kernel(add_kernel.fn))
    assert tuned.bind(1, 2, 3, 4)["BLOCK"] == 2
    guessed = triton.heuristics({"BLOCK": lambda given: given["count"] * 2})(Kernel(add_kernel.fn))
    assert guessed.bind(1, 2, 3, 4)["BLOCK"] == 8


def test_hook_makes_triton_available_to_vllm() -> None:
    module = ModuleType("vllm.triton_utils")
    module.HAS_TRITON = False
    patch_hooks()["vllm.triton_utils"](module)
    assert module.HAS_TRITON is True
    assert module.triton.next_power_of_2(5) == 8
    assert module.tl.float32 is torch.float32


# ---- references against the sources in vllm and vllm-ascend ----


SCOPE = {"tl": tl, "triton": triton, "torch": torch, "BT_LIST": [8]}
SCOPE |= {name: getattr(tl, name) for name in ("extract_slice", "insert_slice", "get_element")}


def kernels_of(package: str, path: str) -> dict[str, Kernel]:
    """Return the kernels in a file of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    tree, scope = ast.parse((Path(spec.origin).parent / path).read_text()), dict(SCOPE)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tree.body = [
        node
        for node in functions
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    exec(compile(tree, path, "exec", dont_inherit=True), scope)
    return {name: value for name, value in scope.items() if isinstance(value, Kernel)}


def assert_same(
    package: str, path: str, name: str, grid: tuple[int, ...], make: Callable[[], dict[str, Any]]
) -> None:
    """Assert that source and reference give equal tensors for equal arguments."""
    kernel, by_source, by_reference = kernels_of(package, path)[name], make(), make()
    kernel.interpret(grid, kernel.bind(**by_source))
    REFERENCES[f"{package}.{path.removesuffix('.py').replace('/', '.')}.{name}"](
        grid, kernel.bind(**by_reference)
    )
    for argument, value in by_source.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                by_reference[argument], value, msg=lambda text, n=argument: f"{n}: {text}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("from_cache", [True, False])
def test_rope_reference_equals_the_kernels_source(
    from_cache: bool, neox: bool, dtype: torch.dtype
) -> None:
    cache, positions = random(9, 8, seed=2, dtype=dtype), torch.tensor([3, 8, 0])

    def arguments() -> dict[str, Any]:
        cos, sin = cache[positions].chunk(2, -1)
        return {
            "q_ptr": random(3, 4, 16, dtype=dtype),
            "q_row_stride": 64,
            "k_ptr": random(3, 2, 16, seed=1, dtype=dtype),
            "k_row_stride": 32,
            "cos_ptr": None if from_cache else cos.contiguous(),
            "cos_row_stride": 4,
            "sin_ptr": None if from_cache else sin.contiguous(),
            "sin_row_stride": 4,
            "cos_sin_ptr": cache if from_cache else None,
            "cos_sin_row_stride": 8,
            "pos_ptr": positions if from_cache else None,
            "num_tokens": 3,
            "n_qh": 4,
            "n_kh": 2,
            "hd": 16,
            "rope_dim": 8,
            "pad_rope_dim": 8,
            "BLOCK_SIZE_HEAD": 4,
            "IS_NEOX_STYLE": neox,
            "USE_COS_SIN": from_cache,
        }

    assert_same("vllm_ascend", "ops/triton/rope.py", "_triton_rope", (2,), arguments)


SPLIT = "ops/triton/linearnorm/split_qkv_tp_rmsnorm_rope.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_split_and_normalise_references_equal_the_kernels_sources(
    rotary_dim: int, dtype: torch.dtype
) -> None:
    def split() -> dict[str, Any]:
        return {
            "input_ptr": random(5, 48, dtype=dtype),
            "q_out_ptr": torch.zeros(5, 32, dtype=dtype),
            "k_out_ptr": torch.zeros(5, 8, dtype=dtype),
            "v_out_ptr": torch.zeros(5, 8, dtype=dtype),
            "qk_var_ptr": torch.zeros(5, 2),
            "num_tokens": 5,
            "q_cols": 32,
            "k_cols": 8,
            "q_cols_pow2": 32,
            "k_cols_pow2": 8,
            "qkv_stride": 48,
            "q_inv_size": 1 / 32,
            "k_inv_size": 1 / 8,
        }

    assert_same("vllm_ascend", SPLIT, "_split_qkv_and_compute_local_qk_var_kernel", (3,), split)

    def normalise() -> dict[str, Any]:
        angles = random(5, rotary_dim // 2, seed=3)
        return {
            "q_ptr": random(5, 32, dtype=dtype),
            "k_ptr": random(5, 8, seed=1, dtype=dtype),
            "cos_ptr": torch.cat((angles.cos(), angles.cos()), -1).to(dtype),
            "sin_ptr": torch.cat((angles.sin(), angles.sin()), -1).to(dtype),
            "cs_row_stride": rotary_dim,
            "q_weight_ptr": random(32, seed=4, dtype=dtype),
            "k_weight_ptr": random(8, seed=5, dtype=dtype),
            "qk_global_var_ptr": random(5, 2, seed=6).abs(),
            "eps": 1e-6,
            "inv_tp_world": 0.5,
            "num_tokens": 5,
            "q_cols": 32,
            "k_cols": 8,
            "q_num_heads": 4,
            "k_num_heads": 1,
            "head_dim": 8,
            "rotary_dim": rotary_dim,
            "HALF": rotary_dim // 2,
        }

    assert_same("vllm_ascend", SPLIT, "_apply_global_rmsnorm_kernel", (2,), normalise)


MROPE = "ops/triton/linearnorm/split_qkv_rmsnorm_mrope.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("interleaved", "rope_dim", "gated"), [(True, 16, True), (True, 32, False), (False, 16, True)]
)
def test_split_and_mrope_reference_equals_the_kernels_source(
    interleaved: bool, rope_dim: int, gated: bool, dtype: torch.dtype
) -> None:
    angles = random(3, 5, rope_dim // 2, seed=3)

    def arguments() -> dict[str, Any]:
        gate = 64 if gated else 0
        return {
            "in_qkv_ptr": random(5, 64 + gate + 128, dtype=dtype),
            "q_weight_ptr": random(32, seed=1, dtype=dtype),
            "q_bias_ptr": None,
            "k_weight_ptr": random(32, seed=2, dtype=dtype),
            "k_bias_ptr": None,
            "cos_sin_ptr": torch.cat((angles.cos(), angles.sin()), -1).to(dtype),
            **{f"out_{name}_ptr": torch.zeros(5, 64, dtype=dtype) for name in "qkv"},
            "out_gate_ptr": torch.zeros(5, gate, dtype=dtype),
            "num_tokens": 5,
            "front_core_num": 1,
            "num_tokens_each_front_core": 3,
            "num_tokens_each_tail_core": 2,
            "num_q_heads": 2,
            "num_kv_heads": 2,
            "head_size": 32,
            "q_size": 64,
            "kv_size": 64,
            "eps": 1e-6,
            "mrope_section_t": rope_dim // 2 - 4,
            "mrope_section_h": 2,
            "mrope_section_w": 2,
            "has_bias": False,
            "is_interleaved": interleaved,
            "rope_dim": rope_dim,
            "half_rope_dim": rope_dim // 2,
            "IS_PARTIAL_ROPE": rope_dim != 32,
            "gate_size": gate,
        }

    assert_same("vllm_ascend", MROPE, "split_qkv_rmsnorm_mrope_kernel", (2,), arguments)


def test_split_reference_of_qwen3_next_equals_the_kernels_source() -> None:
    def arguments() -> dict[str, Any]:
        return {
            "mixed_qkv": torch.zeros(5, 2 * 2 * 8 + 4 * 16),
            "z": torch.zeros(5, 4, 16),
            "b": torch.zeros(5, 4),
            "a": torch.zeros(5, 4),
            "mixed_qkvz": random(5, 2 * (2 * 8 + 4 * 16)),
            "mixed_ba": random(5, 8, seed=1),
            "NUM_HEADS_QK": 2,
            "NUM_HEADS_V": 4,
            "HEAD_QK": 8,
            "HEAD_V": 16,
            "total_rows": 5,
            "rows_per_vec": 3,
            "QKVZ_ROW_STRIDE": 160,
            "BA_ROW_STRIDE": 8,
            "QKV_ROW_STRIDE": 96,
            "Z_ROW_STRIDE": 64,
            "BA_OUT_ROW_STRIDE": 4,
            "ROWS_PER_ITER": 2,
        }

    path = "ops/triton/fla/fused_qkvzba_split_reshape.py"
    assert_same("vllm_ascend", path, "fused_qkvzba_split_reshape_cat_kernel", (2, 1), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_keys_equal_source_and_definition(dtype: torch.dtype) -> None:
    """vllm-ascend's kernel (prefill) has a reference. vLLM's kernel (decode) runs from source."""

    def arguments() -> dict[str, Any]:
        tensors = {"X": random(7, 16, dtype=dtype), "Y": torch.zeros(7, 16, dtype=dtype)}
        return {**tensors, "eps": 1e-6, "M": 7, "N": 16, "MBLOCK": 2, "NUM_CHUNKS": 2}

    assert_same(
        "vllm_ascend", "ops/triton/fla/l2norm.py", "l2norm_fwd_kernel2_loop", (2,), arguments
    )
    # vllm 0.26 has moved the package.
    fla = (
        "model_executor/layers/fla"
        if installed_is("<0.26")
        else "third_party/flash_linear_attention"
    )
    of_vllm = kernels_of("vllm", f"{fla}/ops/l2norm.py")["l2norm_fwd_kernel2"]
    x, y = random(7, 16, dtype=dtype), torch.zeros(7, 16, dtype=dtype)
    of_vllm[(3,)](x, y, 1e-6, 7, 16, 16, 3)
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    close(y, exact)


# ---- kernels that run from source, against their definitions ----


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gated_norm_follows_its_definition(norm_before_gate: bool) -> None:
    kernel = kernels_of("vllm_ascend", "ops/triton/layernorm_gated.py")[
        "_layer_norm_fwd_1pass_kernel_npu"
    ]
    x, z, weight = random(5, 8), random(5, 8, seed=1), random(8, seed=2)
    y, rstd = torch.zeros(5, 8), torch.zeros(5)
    options = {
        "BLOCK_M": 4,
        "BLOCK_N": 8,
        "HAS_BIAS": False,
        "HAS_Z": True,
        "NORM_BEFORE_GATE": norm_before_gate,
        "IS_RMS_NORM": True,
    }
    kernel[(2, 1)](x, y, weight, None, z, None, rstd, 8, 8, 8, 5, 8, 1e-6, **options)
    gate = z.double() * z.double().sigmoid()
    inputs = x.double() if norm_before_gate else x.double() * gate
    exact = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(y, exact * gate if norm_before_gate else exact)


def test_penalties_follow_their_definition() -> None:
    kernel = kernels_of("vllm_ascend", "ops/triton/penalty.py")["apply_all_penalties_kernel"]
    logits = random(2, 5)
    seen = torch.tensor([[True, False, False, True, False], [False] * 5])
    counts = torch.tensor([[0, 2, 0, 1, 0], [0, 0, 0, 0, 3]], dtype=torch.int32)
    repetition, frequency, presence = (
        torch.tensor([2.0, 1.5]),
        torch.tensor([0.5, 0.25]),
        torch.tensor([1.0, 0.125]),
    )
    expected = logits.double().clone()
    for row in range(2):
        for token in range(5):
            if seen[row, token] or counts[row, token]:
                expected[row, token] *= (
                    1 / repetition[row] if expected[row, token] > 0 else repetition[row]
                )
            expected[row, token] -= frequency[row] * counts[row, token] + presence[row] * (
                counts[row, token] > 0
            )
    kernel[(2,)](
        logits,
        seen,
        counts > 0,
        counts,
        repetition,
        frequency,
        presence,
        num_seqs=2,
        vocab_size=5,
        stride_logits_seq=5,
        stride_logits_vocab=1,
        stride_prompt_mask_seq=5,
        stride_prompt_mask_vocab=1,
        stride_output_mask_seq=5,
        stride_output_mask_vocab=1,
        stride_bin_counts_seq=5,
        stride_bin_counts_vocab=1,
        BLOCK_SIZE=4,
    )
    close(logits, expected)


# Arguments that vllm-ascend 0.26 has added.
NOT_SYNTHETIC = (
    {}
    if installed_is("<0.26")
    else {
        "uniform_probs_ptr": None,
        "synthetic_conditional_rates_ptr": None,
        "SYNTHETIC_MODE": False,
    }
)


@pytest.mark.parametrize("block", [1, 4])
def test_greedy_rejection_keeps_drafts_up_to_the_first_mismatch(block: int) -> None:
    kernels = kernels_of("vllm_ascend", "ops/triton/reject_sample.py")
    drafts, target = torch.tensor([7, 8, 9, 5]), torch.tensor([7, 1, 9, 5])
    output = torch.full((3, 3), -1, dtype=torch.int32)
    kernels["rejection_greedy_sample_triton"][(-(-3 // block),)](
        output,
        int32(2, 2, 4),
        drafts,
        target,
        torch.tensor([100, 101, 102]),
        None,
        3,
        2,
        BLOCK_SIZE=block,
        **NOT_SYNTHETIC,
    )
    # The second of two drafts is wrong. No draft: the bonus token. Two right drafts and the bonus.
    assert output.tolist() == [[7, 1, -1], [101, -1, -1], [9, 5, 102]]


def test_short_kernel_verifies_single_drafts() -> None:
    kernels = kernels_of("vllm_ascend", "ops/triton/reject_sample.py")
    output = torch.full((2, 2), -1, dtype=torch.int32)
    kernels["rejection_greedy_sample_spec_len_1_triton"][(2,)](
        output,
        torch.tensor([7, 8]),
        torch.tensor([7, 1]),
        torch.tensor([100, 101]),
        2,
        BLOCK_SIZE=1,
        **NOT_SYNTHETIC,
    )
    assert output.tolist() == [[7, 100], [1, -1]]
